"""Time a few operations against plain implementations, and compare the ratios with stored ones.

    uv run tools/bench_smoke.py            # prints a table; exit code 0 for any ratios
    uv run tools/bench_smoke.py --store    # stores the ratios in docs/results/bench_smoke.json

Each operation and its plain implementation take turns on one thread. A ratio is the median over turns of their CPU
times, so that a busy or different machine changes little. Ratios that differ from the stored ones by more than a factor
of OFF are marked; that is no failure, because a timing is not a test. Exit code 1: an operation crashed, or has no
stored ratio. That results are equal is for the packages' tests; the real benchmarks are there, too.
"""

import importlib
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # before the imports

import hashcore
import numpy as np
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.files.atomic import write_text
from sparse_decode.hashing.encode import CpuEncoder

ROOT = pathlib.Path(__file__).resolve().parent.parent
STORED = ROOT / "docs" / "results" / "bench_smoke.json"
OFF = 2.0
KEYS, WORDS, TOP = 1 << 16, 4, 1300  # 128 bits, the best 2 %
PAGE = 32
CONTEXT = 8192
TURNS = 15

Race = tuple[Callable[[], Any], Callable[[], Any]]
"""One of our operations, and its plain implementation."""


def ratio(race: Race, turns: int) -> float:
    """Return plain time / our time: the median over turns, after an untimed first one."""

    def spent(work: Callable[[], Any]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    ours, plain = race
    ours()
    plain()
    return statistics.median(spent(plain) / max(spent(ours), 1e-7) for _ in range(turns))


def retrieval(rng: np.random.Generator) -> dict[str, Race]:
    """Return the comparisons for hashcore's functions."""
    keys = rng.integers(-(2**31), 2**31, (KEYS, WORDS), np.int32)
    queries = rng.integers(-(2**31), 2**31, (7, WORDS), np.int32)
    one, four, ones = queries[:1], queries[:4], (1,) * 4
    vectors, scores = rng.standard_normal((CONTEXT, 32 * WORDS), np.float32), hashcore.score(queries, keys)
    pages = rng.permutation(KEYS // PAGE)
    table, pool = np.argsort(pages), keys.reshape(-1, PAGE, WORDS)[pages]  # page table[i]: keys i PAGE and following

    def brute() -> np.ndarray:
        matches = 32 * WORDS - np.bitwise_count((one ^ keys).view(np.uint32)).sum(-1, dtype=np.int32)
        return np.sort(matches)[: -TOP - 1 : -1]

    def topk(scores: np.ndarray) -> torch.Tensor:
        return torch.topk(torch.from_numpy(scores), TOP).values

    return {
        "search, one query: numpy by brute force": (lambda: hashcore.search(one, keys, TOP), brute),
        "search, 7 queries: scores, torch.topk": (
            lambda: hashcore.search(queries, keys, TOP),
            lambda: topk(hashcore.score(queries, keys)),
        ),
        "search in shuffled pages of 32: side by side": (
            lambda: hashcore.search(four, pool, TOP, ones, blocks=table),
            lambda: hashcore.search(four, keys, TOP, ones),
        ),
        "topk of 7 rows of scores: torch.topk": (lambda: np.sort(hashcore.topk(scores, TOP)[0]), lambda: topk(scores)),
        "pack: numpy.packbits": (lambda: hashcore.pack(vectors), lambda: np.packbits(vectors > 0, axis=-1)),
    }


def decoding(context: int = CONTEXT) -> dict[str, Race]:
    """Return the comparisons for a decode step's attention, and for hashing its query."""
    sys.path.insert(0, str(ROOT / "packages" / "sparse-decode" / "benchmarks"))
    bench = importlib.import_module("attention")  # the benchmark of a decode step
    plan, q = bench.make_plan(bench.Budget(bench.FRACTION)), torch.randn(1, bench.HQ, 1, bench.D)
    caches = [bench.make_cache(plan, context, torch.float32) for _ in range(bench.COPIES)]
    sparse, dense = bench.sparse_step(plan, caches, q), bench.dense_ways(caches, q)["SDPA, group as rows"]
    layer, encoder = Hasher(HasherConfig("planes", ModelShape(1, bench.HQ, bench.HKV, bench.D))).layer(0), CpuEncoder()
    return {
        f"attention step of {context:,} tokens: dense": (lambda: sparse(0), lambda: dense(0)),
        "hashing a query: the module": (lambda: encoder.queries(layer, q, False), lambda: layer.encode_queries(q)),
    }


def report(now: dict[str, float], before: dict[str, float]) -> int:
    """Print the table; return 1 if a measured or a stored ratio lacks its counterpart."""
    print(f"{'time of the plain one / ours':44}{'stored':>8}{'now':>8}{'now/stored':>12}")
    for name in now | before:
        stored, found = before.get(name, float("nan")), now.get(name, float("nan"))
        off = "" if 1 / OFF <= found / stored <= OFF else f"  off by more than {OFF:g}; no failure"
        print(f"{name:44}{stored:8.2f}{found:8.2f}{found / stored:12.2f}{off}")
    if lost := sorted(now.keys() ^ before.keys()):
        print(f"bench_smoke: a ratio of {', '.join(lost)} is missing; run --store", file=sys.stderr)
    return int(bool(lost))


@torch.no_grad()
def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    races = retrieval(np.random.default_rng(0)) | decoding()
    now = {name: round(ratio(race, TURNS), 3) for name, race in races.items()}
    if arguments == ["--store"]:
        header = {"turns": TURNS, "torch": torch.__version__, "numpy": np.__version__}
        write_text(STORED, json.dumps({**header, "ratios": now}, indent=1) + "\n")
    return report(now, json.loads(STORED.read_text())["ratios"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
