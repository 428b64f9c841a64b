"""Time one decode step of attention, sparse and dense, on the CPU.

    uv run packages/sparse-decode/benchmarks/attention.py --out docs/results/sparse_attention.json

A step of one layer, batch 1, 28 query heads, 4 KV heads of 128 (Qwen2.5-7B). Sparse: append the new key and value, hash
the key and the query, score all codes, select 2 %, attend to them and add the remainder. Dense: the fastest of the
implementations below, none of which repeats keys and values; appending to its cache is not timed. Steps alternate
between several caches, and a dense pass reads more than the last-level cache, so that no step finds its data there.
Times are medians of processor time, which depends less on other load. The last line is JSON.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hashtrain import Hasher, HasherConfig, ModelShape
from results import machine, store
from sparse_decode import HashSelector
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.cache import retype
from sparse_decode.caches.growing import GrowingLayer, Owned
from sparse_decode.inputs import Inputs
from sparse_decode.planning import CODE_BYTES
from sparse_decode.step import SparseLayer
from torch import Tensor
from transformers.cache_utils import DynamicLayer

HQ, HKV, D = 28, 4, 128
FRACTION = 0.02
BARS = {32768: 4, 131072: 6, 524288: 8}
"""Target ratio for each length."""
COPIES = 3
"""Target ratio of plain 2 % to a budget of equal divergence."""

Step = Callable[[int], object]


def dense_ways(caches: list[GrowingLayer], q: Tensor) -> dict[str, Step]:
    """Return implementations of dense attention in torch that do not repeat keys or values, by name."""
    grouped = q.view(1, HKV, HQ // HKV, D)

    def kv(i: int) -> tuple[Tensor, Tensor]:
        keys, values = caches[i % COPIES].keys, caches[i % COPIES].values
        assert keys is not None
        assert values is not None
        return keys, values

    def matmul(i: int) -> Tensor:
        k, v = kv(i)
        return (grouped @ k.mT).mul_(D**-0.5).softmax(-1) @ v

    def head_by_head(i: int) -> list[Tensor]:
        """Use one matrix product per KV head: torch may copy keys for a batched product."""
        k, v = kv(i)
        return [(grouped[0, h] @ k[0, h].T).mul_(D**-0.5).softmax(-1) @ v[0, h] for h in range(HKV)]

    return {
        "SDPA, enable_gqa": lambda i: F.scaled_dot_product_attention(q, *kv(i), enable_gqa=True),
        "SDPA, group as rows": lambda i: F.scaled_dot_product_attention(grouped, *kv(i)),
        "grouped matmul": matmul,
        "matmul head by head": head_by_head,
    }


def make_layer(budget: LayerBudget) -> SparseLayer:
    """Return a sparse layer with an untrained hasher of the default variant and arbitrary coefficients."""
    hasher = Hasher(HasherConfig("transform", ModelShape(1, HQ, HKV, D)))
    hasher.layer(0).remainder.copy_(torch.tensor([-1.0, 0.4, 0.5, 0.1, -0.2, 0.6]))
    return SparseLayer(0, HashSelector(hasher), budget, None, hasher.remainder(0))


def make_cache(sparse: SparseLayer, n: int, dtype: torch.dtype) -> GrowingLayer:
    """Return a cache of `n` random tokens with random codes, which take the same time to score as real ones."""
    k, v = (torch.randn(1, HKV, n, D, dtype=torch.float32).to(dtype) for _ in range(2))
    layer = retype(DynamicLayer(), Owned(), sparse.encoder)
    for part in range(0, n, n // 2):  # twice, so that the buffers have room for the steps
        layer.lazy_initialization(k, v) if not part else None
        piece = slice(part, part + n // 2)
        layer._keys.append(k[:, :, piece])
        layer._values.append(v[:, :, piece])
        layer._codes.append(torch.randint(-(1 << 31), 1 << 31, (1, HKV, n // 2, 4)).to(torch.int32))
    layer.keys, layer.values = layer._keys.view(), layer._values.view()
    layer.mark()
    return layer


def sparse_step(sparse: SparseLayer, caches: list[GrowingLayer], q: Tensor) -> Step:
    """Return the sparse step to time, as in a model; the token that it appends stays in the cache."""
    new = torch.randn(2, 1, HKV, 1, D).to(q.dtype)

    def step(i: int) -> Tensor:
        layer = caches[i % COPIES]
        k, v = layer.update(new[0], new[1])
        return sparse.step(Inputs(q, k, v, D**-0.5), None, layer)

    return step


def measure(n: int, dtype: torch.dtype, repeats: int, budget: LayerBudget) -> dict[str, object]:
    """Time sparse and dense steps at one length."""
    layer, q = make_layer(budget), torch.randn(1, HQ, 1, D).to(dtype)
    caches = [make_cache(layer, n, dtype) for _ in range(COPIES)]
    dense, sparse = dense_ways(caches, q), sparse_step(layer, caches, q)
    for i in range(COPIES):
        sparse(i)
    first = {name: seconds(way, 0) for name, way in dense.items()}
    near = {name: way for name, way in dense.items() if first[name] < 2 * min(first.values())}
    times: dict[str, list[float]] = {name: [] for name in ("sparse", *near)}
    for i in range(repeats):
        for offset, (name, way) in enumerate([("sparse", sparse), *near.items()]):
            times[name].append(seconds(way, i + offset))
    found = {name: statistics.median(taken) for name, taken in times.items()}
    best = min(near, key=lambda name: found[name])
    ratios = [d / s for d, s in zip(times[best], times["sparse"], strict=True)]
    return {
        "n": n,
        "dtype": str(dtype).removeprefix("torch."),
        "sparse_ms": 1e3 * found["sparse"],
        "dense_ms": {name: 1e3 * found.get(name, first[name]) for name in dense},
        "fastest": best,
        "ratio": found[best] / found["sparse"],
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "asked": BARS.get(n),
    }


def seconds(way: Step, i: int) -> float:
    """Return the processor time of one step."""
    began = time.process_time()
    way(i)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fraction", type=float, default=FRACTION, help="share of the tokens")
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    budget = LayerBudget(given.fraction)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    shape = {"query_heads": HQ, "kv_heads": HKV, "head_dim": D, "fraction": budget.fraction}
    shape["planes"] = HasherConfig("transform", ModelShape(1, HQ, HKV, D)).planes
    result = {**shape, **machine(), "repeats": given.repeats, "rows": []}
    with torch.no_grad():
        for n in given.lengths:
            for name in given.dtypes:
                dtype = getattr(torch, name)
                row, read = 2 * D * dtype.itemsize, budget.count_heads(n)[0]
                allowed = n * row / (n * CODE_BYTES + read * row)
                print(f"{n:,} tokens, {name}: codes and selected rows allow {allowed:.1f} x", flush=True)
                row = measure(n, dtype, given.repeats, budget)
                result["rows"].append(row)
                print(f"  {row['ratio']:.1f} x (target {row['asked']}): {json.dumps(row)}", flush=True)
    store(result, given.out)


if __name__ == "__main__":
    main()
