"""Time a few operations against plain implementations, and compare the ratios with stored ones.

    uv run tools/bench_smoke.py            # prints a table; exit code 0 for any ratios
    uv run tools/bench_smoke.py --store    # stores the ratios in docs/results/bench_smoke.json

Each operation and its plain implementation take turns on one thread. A ratio is the median over turns of their CPU
times, so that a busy or different machine changes little. Ratios that differ from the stored ones by more than a factor
of OFF are printed; that is no failure, because a timing is not a test. Exit code 1: an operation crashed, its result
differs from the plain one (for attention over a selection: it is not finite), or it has no stored ratio. The real
benchmarks are in the packages.
"""

import argparse
import importlib
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # before the imports

import hashcore
import numpy as np
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.files.atomic import write_text
from sparse_decode.encode import CpuEncoder

ROOT = pathlib.Path(__file__).resolve().parent.parent
STORED = ROOT / "docs" / "results" / "bench_smoke.json"
OFF = 2.0
KEYS, WORDS, TOP = 1 << 16, 4, 1300  # 128 bits, the best 2 %
PAGE = 32
CONTEXT = 8192
TURNS = 15


class Race(NamedTuple):
    """One of our operations and its plain implementation; `same` checks that their results agree."""

    ours: Callable[[], Any]
    plain: Callable[[], Any]
    same: Callable[[Any, Any], bool]


class Row(NamedTuple):
    """A line of the table: time of the plain implementation / ours, stored and now."""

    name: str
    stored: float | None
    now: float

    @property
    def off(self) -> bool:
        return self.stored is not None and not 1 / OFF <= self.now / self.stored <= OFF


def spent(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def ratio(name: str, race: Race, turns: int) -> float:
    """Return plain time / our time: the median over turns, after an untimed first one."""
    if not race.same(race.ours(), race.plain()):
        raise ValueError(f"expected ours and the plain implementation to agree, they differ: {name}; run the tests")
    return statistics.median(spent(race.plain) / max(spent(race.ours), 1e-7) for _ in range(turns))


def retrieval(rng: np.random.Generator) -> dict[str, Race]:
    """Return the comparisons for hashcore's functions."""
    keys = rng.integers(-(2**31), 2**31, (KEYS, WORDS), np.int32)
    queries = rng.integers(-(2**31), 2**31, (7, WORDS), np.int32)
    vectors = rng.standard_normal((CONTEXT, 32 * WORDS), np.float32)
    scores = hashcore.score(queries, keys)
    one = queries[:1]
    pages, table = rng.permutation(KEYS // PAGE), np.empty(KEYS // PAGE, np.int64)
    table[pages] = np.arange(KEYS // PAGE)
    pool = keys.reshape(-1, PAGE, WORDS)[pages]  # page table[i] holds keys i PAGE and following
    ones = (1,) * len(queries[:4])

    def brute() -> np.ndarray:
        matches = 32 * WORDS - np.bitwise_count((one[0] ^ keys).view(np.uint32)).sum(-1, dtype=np.int32)
        return np.sort(matches)[: -TOP - 1 : -1][None]

    def topk_of_scores() -> Any:
        return torch.topk(torch.from_numpy(hashcore.score(queries, keys)), TOP).values

    return {
        "search, one query: numpy by brute force": Race(
            lambda: hashcore.search(one, keys, TOP)[0], brute, np.array_equal
        ),
        "search, 7 queries: scores, torch.topk": Race(
            lambda: hashcore.search(queries, keys, TOP)[0], topk_of_scores, lambda a, b: np.array_equal(a, b.numpy())
        ),
        "search in shuffled pages of 32: side by side": Race(
            lambda: hashcore.search(queries[:4], pool, TOP, ones, blocks=table),
            lambda: hashcore.search(queries[:4], keys, TOP, ones),
            lambda a, b: all(map(np.array_equal, a, b)),
        ),
        "topk of 7 rows of scores: torch.topk": Race(
            lambda: np.sort(hashcore.topk(scores, TOP)[0]),
            lambda: torch.topk(torch.from_numpy(scores), TOP).values,
            lambda a, b: np.array_equal(a[:, ::-1], b.numpy()),
        ),
        "pack: numpy.packbits": Race(
            lambda: hashcore.pack(vectors),
            lambda: np.packbits(vectors > 0, axis=-1, bitorder="little").view(np.int32),
            np.array_equal,
        ),
    }


def attention_benchmark() -> ModuleType:
    """Import the benchmark of a decode step; its steps and caches are used here with a shorter context."""
    sys.path.insert(0, str(ROOT / "packages" / "sparse-decode" / "benchmarks"))  # it imports its neighbours
    try:
        return importlib.import_module("attention")
    finally:
        del sys.path[0]


def decoding() -> dict[str, Race]:
    """Return the comparisons for a decode step's attention, and for hashing its query."""
    bench = attention_benchmark()
    plan, q = bench.make_plan(bench.Budget(bench.FRACTION)), torch.randn(1, bench.HQ, 1, bench.D)
    caches = [bench.make_cache(plan, CONTEXT, torch.float32) for _ in range(bench.COPIES)]
    sparse, dense = bench.sparse_step(plan, caches, q), bench.dense_ways(caches, q)["SDPA, group as rows"]
    layer, encoder = Hasher(HasherConfig("planes", ModelShape(1, bench.HQ, bench.HKV, bench.D))).layer(0), CpuEncoder()

    def finite(a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(a.isfinite().all() and b.isfinite().all() and a.numel() == b.numel())

    return {
        f"attention step of {CONTEXT:,} tokens: dense": Race(lambda: sparse(0), lambda: dense(0), finite),
        "hashing a query: the module": Race(
            lambda: encoder.queries(layer, q, False)[0],
            lambda: layer.encode_queries(q)[0],
            # Another order of summation may move sums across a threshold.
            lambda a, b: float((hashcore.unpack(a) != hashcore.unpack(b)).float().mean()) < 0.02,
        ),
    }


def measure(turns: int = TURNS) -> dict[str, float]:
    """Return all ratios by name."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        races = retrieval(np.random.default_rng(0)) | decoding()
        return {name: ratio(name, race, turns) for name, race in races.items()}


def stored(path: pathlib.Path) -> dict[str, float]:
    return json.loads(path.read_text())["ratios"] if path.is_file() else {}


def table(rows: list[Row]) -> str:
    lines = [f"{'time of the plain one / ours':44}{'stored':>8}{'now':>8}{'now/stored':>12}"]
    for row in rows:
        before = ("none", "") if row.stored is None else (f"{row.stored:.2f}", f"{row.now / row.stored:.2f}")
        lines.append(f"{row.name:44}{before[0]:>8}{row.now:8.2f}{before[1]:>12}")
    return "\n".join(lines)


def report(now: dict[str, float], before: dict[str, float]) -> int:
    """Print the table and large differences; return 1 if a measured or a stored ratio lacks its counterpart."""
    rows = [Row(name, before.get(name), value) for name, value in now.items()]
    print(table(rows))
    for row in rows:
        if row.off:
            print(f"off by more than {OFF:g}: {row.name}, {row.stored:.2f} stored and {row.now:.2f} now; no failure")
    if lost := sorted(now.keys() ^ before.keys()):
        message = (
            f"expected a stored and a measured ratio for each race, one is missing for {', '.join(lost)}; run --store"
        )
        print(f"bench_smoke: {message}", file=sys.stderr)
    return int(bool(lost))


def main(arguments: list[str], path: pathlib.Path = STORED) -> int:
    parser = argparse.ArgumentParser(description="Compare a few ratios of times with stored ones.")
    parser.add_argument("--store", action="store_true", help="store the ratios for later comparisons")
    options, begun = parser.parse_args(arguments), time.monotonic()
    now = measure()
    if options.store:
        header = {"turns": TURNS, "torch": torch.__version__, "numpy": np.__version__}
        write_text(path, json.dumps({**header, "ratios": {n: round(r, 3) for n, r in now.items()}}, indent=1) + "\n")
    code = report(now, stored(path))
    print(f"{time.monotonic() - begun:.0f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
