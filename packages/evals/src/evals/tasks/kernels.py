"""Latency of each part of a sparse decode step in one layer, and the share of the memory roofline reached."""

from collections.abc import Callable

import hashcore
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.training.target import top_count
from rich.console import Console
from sparse_decode import attend
from torch.nn import functional as F

from evals.costs import dense_step, sparse_step
from evals.metrics import Estimate
from evals.result import Result, Row
from evals.shapes import load_config, shape_of
from evals.speed import STEPS, KernelsCommand
from evals.tasks.formula import open_run, store_rows
from evals.tasks.throughput import roofline, timed_row
from evals.timing import Turn, in_turns, nothing, quantiles

_BEYOND_CACHE = 1 << 27  # bytes: smallest total size of the copies of a step's input
_MOST_COPIES = 16


@torch.inference_mode()
def run(command: KernelsCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    shape = shape_of(load_config(command.shape)).at(0)
    settings = open_run(command, "kernels")
    speed = roofline(command, console)
    rows: list[Row] = []
    for n in command.contexts:
        bounds = bounds_of(shape, n, command)
        for step, size in bounds.items():
            console.print(f"  {n} tokens, {step}: at least {1e3 * size / speed:.4f} ms", highlight=False)
        turns = {name: Turn(nothing, step, nothing) for name, step in steps_of(shape, n, command).items()}
        times = in_turns(turns, command.steps, command.warmup, command.repeats)
        for step, found in times.items():
            named = quantiles(found, command.seed)
            at = {"where": f"{n} tokens, {step}", "budget": None if step == "dense" else command.budget}
            method = "dense" if step == "dense" else "planes"
            share = 1e3 * bounds[step] / speed / named["p50_ms"].mean
            named["share_of_roofline"] = Estimate(share, None, None)
            rows += [timed_row(command, "kernels", method, metric, found, **at) for metric, found in named.items()]
    return store_rows(command, settings, rows, console)


def bounds_of(shape: ModelShape, n: int, command: KernelsCommand) -> dict[str, int]:
    """Return the bytes that each timed step must at least read and write (`evals.costs`).

    `score` and `select` exchange scores through memory, 4 bytes each; `search` keeps them on the chip.
    """
    k = top_count(n, command.budget)
    costs = sparse_step(shape, n, k, command.bits, command.planes, command.hidden)
    codes, indices = n * shape.num_kv_heads * command.bits // 8, 8 * k * shape.num_kv_heads
    scores = 4 * n * shape.num_kv_heads
    element = 1 if command.dtype == "bfloat16" else 2  # the formulas assume 2 bytes
    return {
        "hash": 2 * costs["hash"].bytes,  # on the CPU the functions' weights are float32
        "score": codes + scores,
        "select": scores + indices,
        "search": codes + indices,
        "attend": element * (costs["gather"].bytes + costs["attend"].bytes),
        "dense": element * dense_step(shape, n).bytes,
    }


def steps_of(shape: ModelShape, n: int, command: KernelsCommand) -> dict[str, Callable[[int], object]]:
    """Create the steps on random data; consecutive steps use different copies, so that no data is in a CPU cache."""
    generator = torch.Generator().manual_seed(command.seed)
    hq, hkv, d, words = shape.num_query_heads, shape.num_kv_heads, shape.head_dim, command.bits // 32
    config = HasherConfig("planes", shape, bits=command.bits, planes=command.planes, hidden=command.hidden)
    hasher, dtype = Hasher(config, command.seed).layer(0), getattr(torch, command.dtype)
    k = top_count(n, command.budget)

    def copies(size: int) -> range:
        return range(min(_MOST_COPIES, -(-_BEYOND_CACHE // size)))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    q, key = normal(1, hq, 1, d), normal(1, hkv, 1, d)
    codes = [
        torch.randint(-(1 << 31), 1 << 31, (1, hkv, n, words), generator=generator, dtype=torch.int32)
        for _ in copies(4 * hkv * n * words)
    ]
    kv = [(normal(1, hkv, n, d), normal(1, hkv, n, d)) for _ in copies(2 * hkv * n * d * dtype.itemsize)]
    query, weights = hasher.encode_queries(q)
    scores = [hashcore.score(query, one[:, :, None], weights=weights) for one in codes]
    chosen = [hashcore.topk(one, k)[1] for one in scores]

    steps: dict[str, Callable[[int], object]] = {
        "hash": lambda i: (hasher.encode_queries(q), hasher.encode_keys(key)),
        "score": lambda i: hashcore.score(query, codes[i % len(codes)][:, :, None], weights=weights),
        "select": lambda i: hashcore.topk(scores[i % len(scores)], k),
        "search": lambda i: hashcore.search(query, codes[i % len(codes)][:, :, None], k, weights, order="index"),
        "attend": lambda i: attend(q, *kv[i % len(kv)], chosen[i % len(chosen)], d**-0.5),
        "dense": lambda i: F.scaled_dot_product_attention(q, *kv[i % len(kv)], enable_gqa=True),
    }
    assert tuple(steps) == STEPS
    return steps
