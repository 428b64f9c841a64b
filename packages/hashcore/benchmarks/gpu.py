"""Time retrieval on a GPU: scoring compared with a copy, selection with scoring, and everything with torch.topk.

    uv run --extra cuda python packages/hashcore/benchmarks/gpu.py --out docs/results/hashcore_gpu.json

4 KV heads with 7 query heads each, as 3 planes of 128 bits; the best 2 % of n keys. Times are microseconds in a CUDA graph,
medians over replays, measured by events; a graph uses several key sets, together four times the L2 cache.
The bound is printed before measuring. The last line is JSON. Without a CUDA device: exit code 2.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import hashcore
import torch

HEADS, WORDS, PLANES, FRACTION = 4, 4, 3, 0.02
LAUNCH_US = 2.0  # of a CUDA graph, as assumed in docs/gpu.md
SIZES = (1 << 19, 1 << 21)
SELECTABLE = (torch.int32, torch.int16, torch.float32, torch.float16)  # all represent these scores exactly


class Case(NamedTuple):
    """Key sets, and outputs for their results."""

    n: int
    k: int
    w: torch.Tensor
    keys: list[torch.Tensor]
    out: tuple[torch.Tensor, torch.Tensor]


def make_case(n: int, l2_bytes: int) -> Case:
    generator = torch.Generator(device="cuda").manual_seed(n)
    sets = max(2, math.ceil(4 * l2_bytes / (16 * HEADS * n)))
    shape, low, high = (HEADS, n, WORDS), -(1 << 31), 1 << 31
    keys = [
        torch.randint(low, high, shape, device="cuda", generator=generator, dtype=torch.int64).int()
        for _ in range(sets)
    ]
    w = torch.randn(HEADS, 32 * WORDS, device="cuda", generator=generator)
    k = int(FRACTION * n)
    out = tuple(torch.empty(HEADS, k, dtype=torch.int32, device="cuda") for _ in range(2))
    return Case(n, k, w, keys, (out[0], out[1]))


def check(case: Case) -> None:
    """Compare the first key set's result with that on the CPU before timing."""
    planes, weights = hashcore.planes(case.w, PLANES)
    found = hashcore.search(planes, case.keys[0], case.k, weights, order="index")
    expected = hashcore.search(planes.cpu(), case.keys[0].cpu(), case.k, weights, order="index")
    for ours, theirs in zip(found, expected, strict=True):
        if not torch.equal(ours.cpu(), theirs):
            raise SystemExit(f"the search of {case.n} keys differs from the CPU's; times of it would mean nothing")


def measure_search(case: Case) -> dict[str, float]:
    """Time scoring alone, scoring with selection, and both including the computation of planes."""
    from gpu_timing import graph_time
    from hashcore.cuda import launch, operands, tensor_search

    planes, weights = hashcore.planes(case.w, PLANES)

    def first_only(launches, device) -> None:
        launch.run([next(iter(launches))], device)


    def score(keys: torch.Tensor) -> None:
        tensor_search.search(planes, keys, case.k, weights, operands.Bounds(), *case.out, first_only)

    def search(keys: torch.Tensor, planes: torch.Tensor = planes) -> None:
        hashcore.search(planes, keys, case.k, weights, order="index", out=case.out)

    def retrieve(keys: torch.Tensor) -> None:
        search(keys, hashcore.planes(case.w, PLANES, check=False)[0])

    steps = (score, search, retrieve)
    times = [graph_time([lambda keys=keys, step=step: step(keys) for keys in case.keys], rounds=2) for step in steps]
    return {f"{step.__name__}_us": time.median for step, time in zip(steps, times, strict=True)}


def measure_topk(case: Case) -> dict[str, float]:
    """Time the selection from given scores: torch.topk with its fastest dtype, and ours with int32 scores."""
    from gpu_timing import graph_time

    planes, weights = hashcore.planes(case.w, PLANES)
    scores = [hashcore.score(planes, keys, weights) for keys in case.keys]
    torch_us = {}
    for dtype in SELECTABLE:
        typed = [x.to(dtype) for x in scores]
        steps = [lambda x=x: torch.topk(x, case.k, dim=-1, sorted=False) for x in typed]
        torch_us[str(dtype).removeprefix("torch.")] = graph_time(steps).median
    ours = graph_time([lambda x=x: hashcore.topk(x, case.k) for x in scores]).median
    return {"topk_us": ours, "torch_topk_us": min(torch_us.values())} | {
        f"torch_{d}_us": t for d, t in torch_us.items()
    }


def bytes_of(case: Case) -> int:
    """Return the minimal bytes of scoring: the codes. Other bytes of a search are not counted."""
    return HEADS * case.n * 4 * WORDS


def predicted_us(case: Case, bandwidth: float) -> float:
    """Predict the time of a search from its bytes (gpu_traffic.py) and its 2 launches."""
    import gpu_traffic
    from hashcore.cuda import launch

    weights = tuple(1 << p for p in range(PLANES))
    sms = launch.sm_count(torch.device("cuda", 0))
    found = gpu_traffic.search(HEADS, case.n, WORDS, weights, case.k, sms, 4)
    return found.total / bandwidth + 2 * LAUNCH_US


def measure(n: int, l2_bytes: int, bandwidth: float) -> dict[str, float]:
    case = make_case(n, l2_bytes)
    bound = bytes_of(case) / bandwidth
    print(f"n = {n:,}: {bytes_of(case) / 1e6:.1f} MB a search, at least {bound:.1f} us; {len(case.keys)} key sets")
    check(case)
    found = measure_search(case) | measure_topk(case)
    select = found["search_us"] - found["score_us"]
    return found | {
        "n": n,
        "k": case.k,
        "bound_us": bound,
        "predicted_us": predicted_us(case, bandwidth),
        "score_share_of_copy": bound / found["score_us"],
        "select_us": select,
        "select_share_of_score": select / found["score_us"],
        "torch_topk_over_select": found["torch_topk_us"] / select,
        "torch_topk_over_topk": found["torch_topk_us"] / found["topk_us"],
    }


def bars(rows: list[dict[str, float]], device: str) -> list[dict[str, Any]]:
    """Return the requirements and whether they are met. Times are required of one device only."""
    asked: list[tuple[str, float, str, float]] = []
    for row in rows:
        n = f"{row['n']:,}"
        asked.append((f"score, share of copy bandwidth, n = {n}", row["score_share_of_copy"], ">=", 0.8))
        asked.append((f"select, share of score, n = {n}", row["select_share_of_score"], "<=", 0.25))
        asked.append((f"torch.topk / select, n = {n}", row["torch_topk_over_select"], ">=", 5.0))
    if "H200" in device:
        asked.append(("retrieval of 524,288 keys x 4, us", rows[0]["retrieve_us"], "<=", 25.0))
    return [
        {"what": what, "value": value, "asked": f"{sign} {bar}", "met": value >= bar if sign == ">=" else value <= bar}
        for what, value, sign, bar in asked
    ]


def run() -> dict[str, Any]:
    """Measure all sizes, printing results."""
    import gpu_timing as timing

    result = timing.environment()
    bandwidth = timing.copy_bandwidth()
    print(f"{result['device']}, {result['date']}: a copy moves {bandwidth / 1e6:.2f} TB/s, read and written")
    rows = [measure(n, result["l2_bytes"], bandwidth) for n in SIZES]
    size = 1 << 28
    filled = torch.empty(size, dtype=torch.uint8, device="cuda")
    busy = timing.state_under(timing.graph_of([lambda: filled.fill_(1)]), size / bandwidth)
    result |= {"copy_bytes_a_us": bandwidth, "busy": busy}
    result |= {"rows": rows, "bars": bars(rows, result["device"])}
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    for bar in result["bars"]:
        print(f"{'met   ' if bar['met'] else 'MISSED'} {bar['what']}: {bar['value']:.3g} (asked {bar['asked']})")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Retrieval on a GPU.")
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
