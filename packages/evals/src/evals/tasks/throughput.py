"""Decode steps of a whole model, dense and sparse, with random weights over synthetic caches.

Methods take turns. Those with a dynamic cache share one, which each turn restores; each compiled one has its own static
cache. All caches exist at the same time, so the peaks of two methods differ by what their steps need.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, cast

import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.machine.distribute import device_for
from hashtrain.models import from_config
from rich.console import Console
from sparse_decode import Attachment, Budget, HashSelector, RecentSelector, Selector, attach
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from evals.costs import dense_step, sparse_step
from evals.metrics import Estimate
from evals.result import Result, Row, write_json
from evals.shapes import load_config, shape_of
from evals.speed import COMPILED, DENSE_ENDTOEND, ThroughputCommand
from evals.tasks.clocked import bandwidth_of, open_run, store_times, timed_row
from evals.tasks.compiled import CompiledSteps, layers_of, require_compiler
from evals.timing import Turn, in_turns, nothing, quantiles, read_peak, reset_peak


@torch.inference_mode()
def run(command: ThroughputCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    command = replace(command, device=str(device_for(command.device, 0)))
    config = load_config(command.shape)
    shape = shape_of(config)
    if command.dense_layers >= shape.num_layers:
        raise ValueError(f"--dense-layers must leave one of {shape.num_layers} layers, got {command.dense_layers}")
    require_compiler(command.methods, command.device)
    reset_peak(command.device)  # fails early, before anything is written, if peaks cannot be read
    settings = open_run(command, "throughput")
    torch.manual_seed(command.seed)
    made = from_config(config, dtype=getattr(torch, command.dtype))
    model: PreTrainedModel = cast(Any, made.eval()).to(command.device)
    with attach(model, RecentSelector(), dense_layers=command.dense_layers):  # rejects models without attention
        pass
    hasher = Hasher(
        HasherConfig("planes", shape, bits=command.bits, planes=command.planes, hidden=command.hidden), command.seed
    )
    speed = bandwidth_of(command)
    console.print(f"roofline: {speed / 1e9:.1f} GB/s of memory", highlight=False)
    rows: list[Row] = []
    for n in command.contexts:
        for batch in command.batches:
            sizes = {method: step_bytes(model, shape, method, n, batch, command) for method in command.methods}
            for method, size in sizes.items():
                console.print(f"  {n} tokens x {batch}, {method}: at least {1e3 * size / speed:.3f} ms a step")
            rows += _measure(command, model, hasher, n, batch, sizes, speed)
    return store_times(command, settings, rows, console)


def step_bytes(
    model: PreTrainedModel, shape: ModelShape, method: str, n: int, batch: int, command: ThroughputCommand
) -> int:
    """Return the bytes that a decode step must at least read: every weight once, and each sequence's attention."""
    weights = sum(p.nbytes for p in model.parameters())
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head is not None
    if head.weight is not embeddings.weight:  # a step reads only one row of the embeddings per sequence
        weights -= sum(p.nbytes for p in embeddings.parameters())
    element = 1 if command.dtype == "bfloat16" else 2  # the formulas assume 2 bytes
    total = weights
    for layer in range(shape.num_layers):
        own, budget = shape.at(layer), Budget(command.budget)
        k = int(budget.count(torch.tensor(n)))
        costs = sparse_step(own, n, k, command.bits, command.planes, command.hidden)
        sparse = element * (costs["gather"].bytes + costs["attend"].bytes)
        if method.startswith("planes"):
            sparse += costs["hash"].bytes + costs["score"].bytes + costs["select"].bytes
        is_dense = method in DENSE_ENDTOEND or layer < command.dense_layers
        total += batch * (element * dense_step(own, n).bytes if is_dense else sparse)
    return total


def fill(
    cache: DynamicCache, shape: ModelShape, n: int, batch: int, dtype: torch.dtype, seed: int, device: str
) -> None:
    """Fill every layer of a cache with n random keys and values, on the device where it will stay."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(shape.num_layers):
        own = shape.at(layer)
        size = (batch, own.num_kv_heads, n, own.head_dim)
        k, v = (torch.randn(size, generator=generator).to(dtype).to(device) for _ in range(2))
        cache.update(k, v, layer)


def _measure(
    command: ThroughputCommand,
    model: PreTrainedModel,
    hasher: Hasher,
    n: int,
    batch: int,
    sizes: dict[str, int],
    speed: float,
) -> list[Row]:
    selectors: dict[str, Selector | None] = {"planes": HashSelector(hasher), "recent": RecentSelector()}
    shape, dtype, budget = hasher.config.shape, getattr(torch, command.dtype), Budget(command.budget)
    cache = DynamicCache(config=model.config)  # shared by the methods: each turn removes its tokens
    fill(cache, shape, n, batch, dtype, command.seed, command.device)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=command.device)
    memory: dict[str, tuple[int, int]] = {}
    density: dict[str, float] = {}
    peaks: dict[str, int] = {}
    compiled = _compiled(command, model, cache, selectors, token)

    def turn(method: str) -> Turn:
        stack = contextlib.ExitStack()
        attached: list[Attachment | None] = [None]
        own = compiled.get(method)

        def prepare() -> None:
            reset_peak(command.device)
            if own is not None:
                if own.attachment is not None:
                    own.attachment.reset_density()
                return
            model.set_attn_implementation("eager" if method == "eager" else "sdpa")
            if (selector := selectors.get(method)) is not None:
                sparse = attach(model, selector, budget, dense_layers=command.dense_layers)
                attached[0] = stack.enter_context(sparse)

        def step(i: int) -> object:
            if own is not None:
                return own.step(token)
            return model(token, past_key_values=cache, use_cache=True).logits

        def finish() -> None:
            peaks[method] = max(peaks.get(method, 0), read_peak(command.device))
            attachment = attached[0] if own is None else own.attachment
            if attachment is not None:
                counts = attachment.counts().values()
                density[method] = sum(a for a, _ in counts) / sum(b for _, b in counts)
            if own is not None:
                memory[method] = own.memory()
                return own.rewind()
            if attachment is not None:
                memory[method] = attachment.memory(cache)
            else:
                memory[method] = sum(_nbytes_of(layer) for layer in layers_of(cache)), 0
            cache.crop(-(command.warmup + command.steps))
            stack.close()

        return Turn(prepare, step, finish)

    sync = torch.cuda.synchronize if command.device.startswith("cuda") else nothing
    turns = {method: turn(method) for method in command.methods}
    times = in_turns(turns, command.steps, command.warmup, command.repeats, sync)
    steps = {method: [[round(1000 * s, 4) for s in repeat] for repeat in found] for method, found in times.items()}
    write_json(command.out / "samples" / f"{n}x{batch}.json", {"milliseconds": steps})
    rows = []
    for method, found in times.items():
        named = quantiles(found, command.seed)
        p50 = named["p50_ms"].mean / 1e3
        totals = {
            "tokens_per_s": batch / p50,
            "share_of_bandwidth": sizes[method] / speed / p50,
            "kv_bytes": memory[method][0],
            "code_bytes": memory[method][1],
            "peak_bytes": peaks[method],
        }
        named |= {name: Estimate(float(value), None, None) for name, value in totals.items()}
        is_dense = method in DENSE_ENDTOEND
        at = {"where": f"{n} tokens x {batch}", "budget": None if is_dense else command.budget}
        at |= {"density": density.get(method, 1.0), "dense_layers": command.dense_layers}
        rows += [timed_row(command, "throughput", method, name, found, **at) for name, found in named.items()]
    return rows


def _compiled(
    command: ThroughputCommand,
    model: PreTrainedModel,
    cache: DynamicCache,
    selectors: dict[str, Selector | None],
    token: torch.Tensor,
) -> dict[str, CompiledSteps]:
    """Compile the compiled methods' steps before anything is timed."""
    torch._dynamo.reset()  # its limit on graphs should apply to one of our shapes at a time
    found: dict[str, CompiledSteps] = {}
    for method in (name for name in command.methods if name in COMPILED):
        selector = selectors.get(method.removesuffix("-compiled"))
        room = command.warmup + command.steps
        found[method] = CompiledSteps(model, cache, room, selector, Budget(command.budget), command.dense_layers)
        found[method].step(token)
        found[method].rewind()
    return found


def _nbytes_of(layer: CacheLayerMixin) -> int:
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys.nbytes + layer.values.nbytes
