"""Decode steps of a whole model, dense and sparse, with random weights over synthetic caches.

Methods take turns. Those with a dynamic cache share one, which each turn restores; each compiled one has its own static
cache. All caches exist at the same time, so the peaks of two methods differ by what their steps need.
"""

import contextlib
from dataclasses import replace
from typing import Any, cast

import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.machine.distribute import device_for
from hashtrain.models import from_config
from rich.console import Console
from sparse_decode import Attachment, Budget, HashSelector, RecentSelector, Selector, attach
from sparse_decode.budget import LayerBudget
from transformers import DynamicCache, PreTrainedModel

from evals.costs import dense_step, sparse_step
from evals.metrics import Estimate
from evals.result import Result, Row, write_json
from evals.shapes import load_config, shape_of
from evals.speed import COMPILED, DENSE_ENDTOEND, SpeedCommand, ThroughputCommand
from evals.tasks.compiled import CompiledSteps, bytes_of, require_compiler
from evals.tasks.formula import formula_row, open_run, store_rows
from evals.timing import Turn, in_turns, nothing, quantiles, read_bandwidth, read_peak, reset_peak


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
    settings = open_run(command, "throughput", command.device)
    torch.manual_seed(command.seed)
    made = from_config(config, dtype=getattr(torch, command.dtype))
    model: PreTrainedModel = cast(Any, made.eval()).to(command.device)
    with attach(model, RecentSelector(), dense_layers=command.dense_layers):  # rejects models without attention
        pass
    sizes: Any = {"bits": command.bits, "planes": command.planes, "hidden": command.hidden}
    hasher = Hasher(HasherConfig("planes", shape, **sizes), command.seed)
    speed = roofline(command, console)
    rows: list[Row] = []
    for n in command.contexts:
        for batch in command.batches:
            least = {method: step_bytes(model, shape, method, n, batch, command) for method in command.methods}
            for method, size in least.items():
                console.print(f"  {n} tokens x {batch}, {method}: at least {1e3 * size / speed:.3f} ms a step")
            rows += _measure(command, model, hasher, n, batch, least, speed)
    return store_rows(command, settings, rows, console)


def roofline(command: SpeedCommand, console: Console) -> float:
    """Return the memory bandwidth in bytes per second, as given or measured now, and print it."""
    speed = read_bandwidth(command.device) if command.bandwidth is None else command.bandwidth * 1e9
    console.print(f"roofline: {speed / 1e9:.1f} GB/s of memory", highlight=False)
    return speed


def timed_row(command: SpeedCommand, task: str, method: str, metric: str, found: Estimate, **more: Any) -> Row:
    """Return a row of a measured time; n is the number of repeats."""
    interval = {"low": found.low, "high": found.high, "phase": "decode", "n": command.repeats, "seed": command.seed}
    return formula_row(task, method, metric, found.mean, **interval | more)


def step_bytes(
    model: PreTrainedModel, shape: ModelShape, method: str, n: int, batch: int, command: ThroughputCommand
) -> int:
    """Return the bytes that a decode step must at least read: every weight once, and each sequence's attention."""
    total = sum(p.nbytes for p in model.parameters())
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head is not None
    if head.weight is not embeddings.weight:  # a step reads only one row of the embeddings per sequence
        total -= sum(p.nbytes for p in embeddings.parameters())
    element = 1 if command.dtype == "bfloat16" else 2  # the formulas assume 2 bytes
    for layer in range(shape.num_layers):
        own, budget = shape.at(layer), LayerBudget(command.budget)
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


class _Cell:
    """The turns of all methods at one context length and batch size, and what they used.

    Attributes:
        memory: bytes of keys and values, and of codes; density: selected / visible; peaks: bytes of memory at most.
    """

    def __init__(self, command: ThroughputCommand, model: PreTrainedModel, hasher: Hasher, n: int, batch: int):
        self._command, self._model = command, model
        self._selectors: dict[str, Selector | None] = {"planes": HashSelector(hasher), "recent": RecentSelector()}
        self._cache = DynamicCache(config=model.config)  # shared by the methods: each turn removes its tokens
        dtype = getattr(torch, command.dtype)
        fill(self._cache, hasher.config.shape, n, batch, dtype, command.seed, command.device)
        self._token = torch.zeros(batch, 1, dtype=torch.int64, device=command.device)
        self._compiled = self._compile()
        self.memory: dict[str, tuple[int, int]] = {}
        self.density: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def _compile(self) -> dict[str, CompiledSteps]:
        """Compile the compiled methods' steps before anything is timed."""
        torch._dynamo.reset()  # its limit on graphs should apply to one of our shapes at a time
        command, found = self._command, dict[str, CompiledSteps]()
        how = Budget(command.budget), command.dense_layers
        for method in (name for name in command.methods if name in COMPILED):
            selector = self._selectors.get(method.removesuffix("-compiled"))
            own = CompiledSteps(self._model, self._cache, command.warmup + command.steps, selector, *how)
            own.step(self._token)
            own.rewind()
            found[method] = own
        return found

    def turn(self, method: str) -> Turn:
        """Return the turn of a method."""
        own = self._compiled.get(method)
        return self._plain_turn(method) if own is None else self._compiled_turn(method, own)

    def _compiled_turn(self, method: str, own: CompiledSteps) -> Turn:
        def prepare() -> None:
            reset_peak(self._command.device)
            if own.attachment is not None:
                own.attachment.reset_density()

        def finish() -> None:
            self._note(method, own.attachment)
            self.memory[method] = own.memory()
            own.rewind()

        return Turn(prepare, lambda i: own.step(self._token), finish)

    def _plain_turn(self, method: str) -> Turn:
        command, model, cache = self._command, self._model, self._cache
        stack = contextlib.ExitStack()
        attached: list[Attachment | None] = [None]

        def prepare() -> None:
            reset_peak(command.device)
            model.set_attn_implementation("eager" if method == "eager" else "sdpa")
            if (selector := self._selectors.get(method)) is not None:
                sparse = attach(model, selector, Budget(command.budget), dense_layers=command.dense_layers)
                attached[0] = stack.enter_context(sparse)

        def finish() -> None:
            self._note(method, attached[0])
            if attached[0] is not None:
                self.memory[method] = attached[0].memory(cache)
            else:
                self.memory[method] = bytes_of(cache), 0
            cache.crop(-(command.warmup + command.steps))
            stack.close()

        return Turn(prepare, lambda i: model(self._token, past_key_values=cache, use_cache=True).logits, finish)

    def _note(self, method: str, attachment: Attachment | None) -> None:
        """Record the peak of memory and the density of a turn."""
        self.peaks[method] = max(self.peaks.get(method, 0), read_peak(self._command.device))
        if attachment is not None:
            counts = attachment.counts().values()
            self.density[method] = sum(a for a, _ in counts) / sum(b for _, b in counts)


def _measure(
    command: ThroughputCommand,
    model: PreTrainedModel,
    hasher: Hasher,
    n: int,
    batch: int,
    sizes: dict[str, int],
    speed: float,
) -> list[Row]:
    cell = _Cell(command, model, hasher, n, batch)
    sync = torch.cuda.synchronize if command.device.startswith("cuda") else nothing
    turns = {method: cell.turn(method) for method in command.methods}
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
            "kv_bytes": cell.memory[method][0],
            "code_bytes": cell.memory[method][1],
            "peak_bytes": cell.peaks[method],
        }
        named |= {name: Estimate(float(value), None, None) for name, value in totals.items()}
        at = {"where": f"{n} tokens x {batch}", "budget": None if method in DENSE_ENDTOEND else command.budget}
        at |= {"density": cell.density.get(method, 1.0), "dense_layers": command.dense_layers}
        rows += [timed_row(command, "throughput", method, name, found, **at) for name, found in named.items()]
    return rows
