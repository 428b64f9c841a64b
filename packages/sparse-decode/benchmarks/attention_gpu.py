"""Time a decode step's attention on a GPU, sparse and dense: speed-up, and share of its upper bound.

    uv run --extra cuda python packages/sparse-decode/benchmarks/attention_gpu.py --out docs/results/attention_gpu.json

28 query heads on 4 KV heads of 128, bfloat16 (Qwen2.5-7B). The sparse step computes planes from query weights, scores
the codes, selects 2 % and attends; it does not include the hasher. Dense is torch's SDPA with each of its backends,
with enable_gqa and with the group as query rows, and FlashInfer and flash-attn if installed; the fastest counts. With
flash-attn, the paper's set-up is timed, too: the same selection, gathered by torch.
Times are in microseconds, in a CUDA graph over several caches, whose selected parts are four times the L2 cache.
The bound, and what docs/gpu.md's model predicts, are printed before measuring. The last line is JSON. Without a CUDA
device: exit code 2.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hashcore
import torch
from gpu_model import Layer, card_of, predicted_us
from sparse_decode.attention import flash
from sparse_decode.attention.attend import attend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

LAYER = Layer(kv_heads=4, query_heads=28, planes=6)
HEADS, KV_HEADS, DIM, WORDS, PLANES, FRACTION = LAYER.query_heads, LAYER.kv_heads, LAYER.dim, 4, LAYER.planes, 0.02
LAUNCHES = 5  # planes; search, two; attention, two
# Batch size, tokens, and the required speed-up over dense.
SIZES = [(1, 1 << 15, 2.5), (8, 1 << 15, 5.0), (1, 1 << 17, 7.0), (1, 1 << 19, 12.0), (1, 1 << 21, 14.0)]
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
MOST_BYTES = 16 << 30  # of caches


class Cache(NamedTuple):
    """One layer's cache, and the queries of a step."""

    q: torch.Tensor
    w: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    codes: torch.Tensor


def predicted(device: str, batch: int, n: int) -> tuple[float, float] | None:
    """Return the microseconds of a dense and of a sparse step by the model; None for a device that it does not list."""
    if (card := card_of(device)) is None:
        return None
    sizes = (LAYER.dense_bytes(n, batch), 1), (LAYER.selected_bytes(n, batch), LAUNCHES)
    dense, sparse = (predicted_us(size, launches, card.bytes_per_us) for size, launches in sizes)
    return dense, sparse


def make(batch: int, n: int) -> Cache:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    codes = torch.randint(-(1 << 31), 1 << 31, (batch, KV_HEADS, n, WORDS), device="cuda").int()
    k, v = randn(batch, KV_HEADS, n, DIM), randn(batch, KV_HEADS, n, DIM)
    return Cache(randn(batch, HEADS, 1, DIM), randn(batch, KV_HEADS, 32 * WORDS).float(), k, v, codes)


def step(cache: Cache) -> torch.Tensor:
    planes, weights = hashcore.planes(cache.w, PLANES, check=False)
    count = int(FRACTION * cache.k.shape[2])
    _, indices = hashcore.search(planes, cache.codes, count, weights, order="index")
    return attend(cache.q, cache.k, cache.v, indices[:, :, None], DIM**-0.5)


def gather_only(indices: torch.Tensor) -> Callable[[Cache], torch.Tensor]:
    return lambda cache: attend(cache.q, cache.k, cache.v, indices, DIM**-0.5)


def paper_step(cache: Cache) -> torch.Tensor:
    """Run `step` with torch's gather and flash-attn as attention."""
    planes, weights = hashcore.planes(cache.w, PLANES, check=False)
    count = int(FRACTION * cache.k.shape[2])
    _, indices = hashcore.search(planes, cache.codes, count, weights, order="index")
    return flash.attend(cache.q, cache.k, cache.v, indices[:, :, None], DIM**-0.5, None)


def dense_ways(batch: int) -> dict[str, Callable[[Cache], Any]]:
    """Return implementations of dense attention by name; some may not run on this device."""

    def sdpa(backend: SDPBackend, grouped: bool) -> Callable[[Cache], Any]:
        def run(cache: Cache) -> torch.Tensor:
            q = cache.q.view(batch, KV_HEADS, HEADS // KV_HEADS, DIM) if grouped else cache.q
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, cache.k, cache.v, enable_gqa=not grouped)

        return run

    ways = {
        f"{backend.name.lower()}, {'group as rows' if grouped else 'enable_gqa'}": sdpa(backend, grouped)
        for backend in BACKENDS
        for grouped in (False, True)
    }
    if batch == 1 and importlib.util.find_spec("flashinfer"):
        import flashinfer

        options = {"kv_layout": "HND", "use_tensor_cores": True}
        ways["flashinfer"] = lambda cache: flashinfer.single_decode_with_kv_cache(
            cache.q[0, :, 0], cache.k[0], cache.v[0], **options
        )
    if importlib.util.find_spec("flash_attn"):
        ways["flash-attn"] = lambda cache: flash.dense(cache.q, cache.k, cache.v, DIM**-0.5, None)
    return ways


def time_dense(batch: int, caches: list[Cache]) -> dict[str, float]:
    from gpu_timing import graph_time

    times = {}
    for name, way in dense_ways(batch).items():
        try:
            times[name] = graph_time([lambda cache=cache, way=way: way(cache) for cache in caches]).median
        except RuntimeError as error:  # a backend without support for these shapes or this device
            torch.cuda.synchronize()
            print(f"  {name} does not run: {str(error).splitlines()[0]}")
    if not times:
        raise SystemExit("expected an implementation of dense attention that runs here, found none")
    return times


def check(cache: Cache) -> None:
    """Compare a step with that on the CPU before timing."""
    on_cpu = Cache(*(x.cpu() for x in cache))
    torch.testing.assert_close(step(cache).cpu(), step(on_cpu), rtol=1e-2, atol=1e-2)


def measure(device: str, batch: int, n: int, asked: float, l2_bytes: int, bandwidth: float) -> dict[str, Any]:
    from gpu_timing import graph_time

    sizes = LAYER.dense_bytes(n, batch), LAYER.selected_bytes(n, batch)
    ceiling, foreseen = sizes[0] / sizes[1], predicted(device, batch, n)
    print(
        f"batch {batch}, {n:,} tokens: dense moves {sizes[0] / 1e6:.0f} MB, at least {sizes[0] / bandwidth:.1f} us; "
        f"sparse {sizes[1] / 1e6:.1f} MB, at least {sizes[1] / bandwidth:.1f} us: {ceiling:.1f} times less"
    )
    if foreseen is not None:
        print(f"  predicted: dense {foreseen[0]:.1f} us, sparse {foreseen[1]:.1f} us")
    wanted = max(2, math.ceil(4 * l2_bytes / sizes[1]))
    caches = [make(batch, n) for _ in range(min(wanted, max(2, MOST_BYTES // int(sizes[0]))))]
    if n == SIZES[0][1]:
        check(caches[0])
    sparse = graph_time([lambda cache=cache: step(cache) for cache in caches]).median
    planes, weights = hashcore.planes(caches[0].w, PLANES)
    _, indices = hashcore.search(planes, caches[0].codes, int(FRACTION * n), weights, order="index")
    attention = gather_only(indices[:, :, None])
    gather = graph_time([lambda cache=cache: attention(cache) for cache in caches]).median
    paper = None
    if importlib.util.find_spec("flash_attn"):
        torch.testing.assert_close(paper_step(caches[0]), step(caches[0]), rtol=1e-2, atol=1e-2)
        paper = graph_time([lambda cache=cache: paper_step(cache) for cache in caches]).median
    dense = time_dense(batch, caches)
    fastest = min(dense, key=lambda name: dense[name])
    return {
        "batch": batch,
        "tokens": n,
        "asked": asked,
        "sparse_us": sparse,
        "gather_us": gather,
        "flash_attn_us": paper,
        "dense_us": dense[fastest],
        "dense": fastest,
        "ratio": dense[fastest] / sparse,
        "ceiling": ceiling,
        "share_of_ceiling": dense[fastest] / sparse / ceiling,
        "predicted_us": foreseen,
        "all_dense_us": dense,
        "caches": len(caches),
    }


def run() -> dict[str, Any]:
    """Measure all sizes, printing results."""
    import gpu_timing as timing

    result = timing.environment()
    bandwidth = timing.copy_bandwidth()
    print(f"{result['device']}, {result['date']}: a copy moves {bandwidth / 1e6:.2f} TB/s, read and written")
    rows = []
    for batch, n, asked in SIZES:
        rows.append(measure(result["device"], batch, n, asked, result["l2_bytes"], bandwidth))
        row = rows[-1]
        print(
            f"  sparse {row['sparse_us']:.1f} us (attention alone {row['gather_us']:.1f}), "
            f"dense {row['dense_us']:.1f} us ({row['dense']}): {row['ratio']:.2f}x, "
            f"{row['share_of_ceiling']:.0%} of the ceiling"
        )
    bars = [
        {
            "what": f"dense / sparse, batch {row['batch']}, {row['tokens']:,} tokens",
            "value": row["ratio"],
            "asked": f">= {row['asked']}",
            "met": row["ratio"] >= row["asked"],
        }
        for row in rows
    ]
    return result | {"copy_bytes_a_us": bandwidth, "rows": rows, "bars": bars}


def main() -> int:
    parser = argparse.ArgumentParser(description="A decode step's attention on a GPU.")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none; run this on a machine with a GPU", file=sys.stderr)
        return 2
    result = run()
    if out:
        temporary = out.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(temporary, out)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
