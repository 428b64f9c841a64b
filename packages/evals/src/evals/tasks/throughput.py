"""Decode steps of a whole model, dense and sparse, with random weights over synthetic caches.

Methods take turns and share one cache, which each turn restores.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.config import RECENT, SINK
from hashtrain.demo import model_path
from hashtrain.device import device_for
from hashtrain.models import from_config, load_config
from rich.console import Console
from sparse_decode import Budget, HashSelector, RecentSelector, Selector, attach
from transformers import DynamicCache, PreTrainedModel, Qwen2Config

from evals.metrics import Estimate, mean_estimates
from evals.results import Result, Row, versions, write_json
from evals.runner import RunFolder, environment_of
from evals.setup import store
from evals.tasks.settings import DENSE_WAYS, SMALL, ThroughputCommand

QUANTILES = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}
PLANES = HasherConfig("transform", ModelShape(1, 1, 1, 128)).planes
"""Bit planes of a query: those of `transform`, the default hasher of `attach`."""
# Qwen2.5-7B's groups and heads, 4 layers, little besides attention.
_SMALL: dict[str, Any] = {
    **{"hidden_size": 896, "intermediate_size": 896, "vocab_size": 1024, "num_hidden_layers": 4, "head_dim": 128},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 1 << 22},
}


@torch.inference_mode()
def run(command: ThroughputCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`. A second run measures all again."""
    command = replace(command, device=str(device_for(command.device, 0)))
    config = Qwen2Config(**_SMALL) if command.shape == SMALL else load_config(model_path(command.shape))
    shape = ModelShape.of(config)
    if command.dense_layers >= shape.num_layers:
        raise ValueError(f"--dense-layers must leave one of {shape.num_layers} layers, got {command.dense_layers}")
    settings = command.settings("throughput")
    RunFolder(command.out, settings, command.device)
    torch.manual_seed(command.seed)
    made = from_config(config, dtype=getattr(torch, command.dtype))
    model: PreTrainedModel = cast(Any, made.eval()).to(command.device)
    with attach(model, RecentSelector(), dense_layers=command.dense_layers):  # rejects models without attention
        pass
    hasher = Hasher(HasherConfig("planes", shape, planes=PLANES), command.seed)
    rows: list[Row] = []
    for n in command.contexts:
        for batch in command.batches:
            console.print(f"  {n} tokens x {batch}", highlight=False)
            rows += _measure(command, model, hasher, n, batch)
    return store(command.out, Result(settings, environment_of(command.out), rows), console)


def timed(
    step: Callable[[], object],
    steps: int,
    warmup: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Call `step` `warmup` times, then `steps` times; return the seconds of each of the latter."""
    times: list[float] = []
    for _ in range(warmup + steps):
        began = clock()
        step()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        times.append(clock() - began)
    return times[warmup:]


def quantiles(times: list[list[float]]) -> dict[str, Estimate]:
    """Estimate the 50, 90 and 99 % quantiles of a step's milliseconds: the mean over repeats, and its interval.

    With few steps per repeat the 99 % quantile is close to the slowest step.
    """
    milliseconds = 1000 * np.array(times)
    columns = np.stack([np.percentile(milliseconds, share, axis=1) for share in QUANTILES.values()], axis=1)
    return dict(zip(QUANTILES, mean_estimates(columns, 0), strict=True))


def fill(
    cache: DynamicCache, shape: ModelShape, n: int, batch: int, dtype: torch.dtype, seed: int, device: str
) -> None:
    """Fill every layer of a cache with n random keys and values, on the device where it will stay."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(shape.num_layers):
        own = shape.at(layer)
        size = (batch, own.num_kv_heads, n, own.head_dim)
        k, v = (torch.randn(size, generator=generator, dtype=torch.float32).to(dtype).to(device) for _ in range(2))
        cache.update(k, v, layer)
    cache.activate_past_recording()  # so that sliding windows can be cropped


def _measure(command: ThroughputCommand, model: PreTrainedModel, hasher: Hasher, n: int, batch: int) -> list[Row]:
    """Time all methods at one context length and batch size: in turns, so that a busy moment affects all of them."""
    selectors: dict[str, Selector] = {"planes": HashSelector(hasher), "recent": RecentSelector()}
    cache = DynamicCache(config=model.config)  # shared by the methods: each turn removes its tokens
    fill(cache, hasher.config.shape, n, batch, getattr(torch, command.dtype), command.seed, command.device)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=command.device)
    times: dict[str, list[list[float]]] = {method: [] for method in command.methods}
    memory, density = dict[str, tuple[int, int]](), dict[str, float]()  # bytes of keys and values, and of codes

    def step() -> object:
        return model(token, past_key_values=cache, use_cache=True)

    for method in command.methods * command.repeats:
        model.set_attn_implementation("eager" if method == "eager" else "sdpa")
        if method in DENSE_WAYS:
            times[method].append(timed(step, command.steps, command.warmup, command.device))
            layers = cast(list[Any], cache.layers)
            memory[method] = sum(x.nbytes for layer in layers for x in (layer.keys, layer.values)), 0
        else:
            budget, dense = Budget(command.budget), command.dense_layers
            with attach(model, selectors[method], budget, dense_layers=dense) as sparse:
                times[method].append(timed(step, command.steps, command.warmup, command.device))
                counts = sparse.counts().values()
                density[method] = sum(a for a, _ in counts) / sum(b for _, b in counts)
                memory[method] = sparse.memory(cache)
        cache.crop(-(command.warmup + command.steps))
    steps = {method: [[round(1000 * s, 4) for s in repeat] for repeat in found] for method, found in times.items()}
    write_json(command.out / "samples" / f"{n}x{batch}.json", {"milliseconds": steps})
    rows = []
    for method, found in times.items():
        named = quantiles(found)
        totals = {
            "tokens_per_s": 1e3 * batch / named["p50_ms"].mean,
            "kv_bytes": memory[method][0],
            "code_bytes": memory[method][1],
        }
        named |= {name: Estimate(float(value), None, None) for name, value in totals.items()}
        shared: dict[str, Any] = {
            **{"task": "throughput", "method": method, "variant": method, "bits": None, "rule": "visible"},
            **{"budget": None if method in DENSE_WAYS else command.budget, "density": density.get(method, 1.0)},
            **{"dense_layers": command.dense_layers, "phase": "decode", "n": command.repeats},
            **({"sink": 0, "recent": 0} if method in DENSE_WAYS else {"sink": SINK, "recent": RECENT}),
            **{"seed": command.seed, "versions": versions(), "where": f"{n} tokens x {batch}"},
        }
        rows += [Row(**shared, metric=m, value=x.mean, low=x.low, high=x.high) for m, x in named.items()]
    return rows
