"""Time search and scores on one CPU thread, compared with faiss, torch.topk and reading the codes from memory.

    uv run --with faiss-cpu packages/hashcore/benchmarks/cpu.py --cpu 1 --out docs/results/hashcore_cpu.json
    uv run --with faiss-cpu packages/hashcore/benchmarks/cpu.py --sizes 131072 --rounds 1   # a short one
    uv run --with faiss-cpu packages/hashcore/benchmarks/cpu.py --sizes --out FILE   # only pages; FILE keeps the rest

All functions are timed in turn on a set of random codes, so that other load affects them equally; a ratio is the median
over turns. The sets together are FLUSH times the last-level cache, so that each is read from memory; cache-hot figures
repeat one set. faiss has its own copies of the codes. The upper bounds are printed first. Times are processor time,
which depends less on other load; ratios are given of processor and wall time. Keys in pages are timed against the same
keys side by side; the pages are far apart and in random order, as in a cache that holds keys and values, too. The last
line is JSON; --out stores it.
"""

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # read when imported

import faiss
import hashcore
import hashcore.torch_ops
import numba
import numpy as np
import torch
from machine import processor, rounded
from numpy.typing import NDArray

WORDS = 4  # 128 bits
SIZES = (1 << 17, 1 << 20)
QUERIES = (1, 28)
SHARE = 50  # top 2 %
GROUP = 7
FLUSH = 4
PAGE, PAGED = 32, 1 << 17  # keys per page, and keys of a search in pages
PAGE_BYTES = 2 * 2 * 128 * PAGE  # keys and values of one head in a page, 128 numbers of 16 bits
POOL = 1 << 31  # most bytes of a pool
PAGED_AS = ((1, 4), (1, 6), (4, 4), (4, 6), (8, 4), (8, 6))  # KV heads, planes
SHORT = 1024  # keys of a search whose overhead takes longer than its kernel
HOT = 15  # timed repetitions of the cache-hot figures, after one warm-up

Codes = NDArray[np.int32]
Works = dict[str, Callable[[int], Any]]  # functions of the number of a set


class Spent(NamedTuple):
    """Processor and wall time of one call in seconds."""

    processor: float
    wall: float


@numba.njit(nogil=True)
def read(words: NDArray[np.uint64]) -> np.uint64:
    """Read codes with minimal work on them."""
    together = np.uint64(0)
    for i in range(len(words)):
        together ^= words[i]
    return together


def random_codes(rng: np.random.Generator, *shape: int) -> Codes:
    return rng.integers(-(2**31), 2**31, (*shape, WORDS), np.int32)


def timed(work: Callable[[], Any]) -> Spent:
    processor, wall = time.process_time(), time.perf_counter()
    work()
    return Spent(time.process_time() - processor, time.perf_counter() - wall)


def in_turn(works: Works, sets: list[int]) -> dict[str, list[Spent]]:
    """Time every function on each of the sets in turn, after a warm-up."""
    for work in works.values():
        work(sets[-1])
    rounds = [{name: timed(lambda work=work, i=i: work(i)) for name, work in works.items()} for i in sets]
    return {name: [spent[name] for spent in rounds] for name in works}


def microseconds(spent: list[Spent]) -> float:
    return 1e6 * statistics.median(at.processor for at in spent)


def ratio(slow: list[Spent], fast: list[Spent]) -> dict[str, float]:
    """Return the median ratios of two functions' times."""
    pairs = list(zip(slow, fast, strict=True))
    return {
        clock: statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs) for clock in Spent._fields
    }


def cold_and_hot(works: Works, count: int, rounds: int) -> dict[str, dict[str, list[Spent]]]:
    """Time the functions on all sets (from memory), and repeatedly on one of them (from cache)."""
    return {"memory": in_turn(works, rounds * list(range(count))), "cache": in_turn(works, [0] * HOT)}


class Bench:
    """Sets of n keys, and faiss indexes of the same keys."""

    def __init__(self, n: int, cache: int, rng: np.random.Generator) -> None:
        self.n, self.k, self.rng = n, n // SHARE, rng
        self.keys = [random_codes(rng, n) for _ in range(-(-FLUSH * cache // (4 * WORDS * n)))]
        self.flat = []

    def add_faiss(self) -> None:
        for keys in self.keys:
            self.flat.append(faiss.IndexBinaryFlat(32 * WORDS))
            self.flat[-1].add(keys.view(np.uint8))

    def search_faiss(self, i: int, octets: NDArray[np.uint8], mode: str) -> tuple[Any, Any]:
        self.flat[i].use_heap = mode == "heap"
        return self.flat[i].search(octets, self.k)

    def search(self, queries: int, rounds: int) -> dict[str, Any]:
        """Time searches for the best 2 % of the keys."""
        query, k = random_codes(self.rng, queries), self.k
        octets = query.view(np.uint8)
        works: Works = {
            "search": lambda i: hashcore.search(query, self.keys[i], k),
            "faiss heap": lambda i: self.search_faiss(i, octets, "heap"),
            "faiss counting": lambda i: self.search_faiss(i, octets, "counting"),
            "torch.topk": lambda i: torch.topk(torch.from_numpy(hashcore.score(query, self.keys[i])), k),
        }
        if queries == 1:
            works["read"] = lambda i: read(self.keys[i].reshape(-1).view(np.uint64))
        self.agree(works)
        row: dict[str, Any] = {"n": self.n, "queries": queries, "k": k}
        for place, spent in cold_and_hot(works, len(self.keys), rounds).items():
            rival = min(("faiss heap", "faiss counting"), key=lambda name: microseconds(spent[name]))
            row[place] = {"microseconds": {name: microseconds(times) for name, times in spent.items()}}
            row[place] |= {"faiss": rival, "over_faiss": ratio(spent[rival], spent["search"])}
            row[place]["over_torch"] = ratio(spent["torch.topk"], spent["search"])
            if "read" in spent:
                row[place]["over_read"] = ratio(spent["search"], spent["read"])
        return row

    def agree(self, works: Works) -> None:
        """Check that all searches find the same scores, before timing."""
        for i in (0, len(self.keys) - 1):
            scores = works["search"](i)[0]
            np.testing.assert_array_equal(scores, works["torch.topk"](i).values)
            for mode in ("heap", "counting"):
                differing = np.sort(works[f"faiss {mode}"](i)[0], axis=1)
                np.testing.assert_array_equal(32 * WORDS - scores, differing)

    def score(self, rounds: int) -> dict[str, Any]:
        """Time the scores of one query and reading the codes; grouped queries and the same number of single ones."""
        group = random_codes(self.rng, GROUP)
        planes, weights = hashcore.group_planes(group)
        works: Works = {
            "read": lambda i: read(self.keys[i].reshape(-1).view(np.uint64)),
            "score": lambda i: hashcore.score(group[:1], self.keys[i]),
            "grouped": lambda i: hashcore.score(planes, self.keys[i], weights),
            "one call": lambda i: hashcore.score(group, self.keys[i]),
            "calls": lambda i: [hashcore.score(group[g : g + 1], self.keys[i]) for g in range(GROUP)],
        }
        np.testing.assert_array_equal(works["grouped"](0), works["one call"](0).sum(0))
        row: dict[str, Any] = {"n": self.n, "group": GROUP}
        for place, spent in cold_and_hot(works, len(self.keys), rounds).items():
            row[place] = {"microseconds": {name: microseconds(times) for name, times in spent.items()}}
            row[place] |= {"over_read": ratio(spent["score"], spent["read"])}
            row[place] |= {
                f"{name}_over_grouped": ratio(spent[name], spent["grouped"]) for name in ("one call", "calls")
            }
        return row


class Pool:
    """Pages of codes with room for keys and values before them, and page tables of disjoint sets of PAGED keys."""

    def __init__(self, heads: int, sets: int, rng: np.random.Generator) -> None:
        blocks, words = PAGED // PAGE, PAGE * WORDS
        page = heads * (PAGE_BYTES // 4 + words) + 16  # an odd number of cache lines: sparse_decode.pages.tail_bytes
        memory = np.zeros(sets * blocks * page + 16, np.int32)
        memory = memory[-(memory.ctypes.data // 4) % 16 :][: sets * blocks * page]  # pages start at cache lines
        own = memory.reshape(sets * blocks, page)[:, -heads * words - 16 : -16].reshape(-1, heads, PAGE, WORDS)
        own[:] = random_codes(rng, len(own), heads, PAGE)
        self.pages: Codes = own.transpose(1, 0, 2, 3)
        self.tables: list[NDArray[np.int64]] = list(rng.permutation(len(own)).reshape(sets, blocks))
        self.keys: list[Codes] = [self.pages[:, table].reshape(heads, PAGED, WORDS) for table in self.tables]


def paged(heads: int, planes: int, cache: int, rounds: int, rng: np.random.Generator) -> dict[str, Any]:
    """Time searches for the best 2 % of PAGED keys of each head, in pages and side by side."""
    each = heads * PAGED // PAGE * PAGE_BYTES
    pool = Pool(heads, max(2, min(-(-FLUSH * cache // (4 * WORDS * PAGED * heads)), POOL // each)), rng)
    query, weights, k = random_codes(rng, heads, planes), (1,) * planes, PAGED // SHARE
    works: Works = {
        "pages": lambda i: hashcore.search(query, pool.pages, k, weights, blocks=pool.tables[i]),
        "side by side": lambda i: hashcore.search(query, pool.keys[i], k, weights),
    }
    for found, wanted in zip(works["pages"](0), works["side by side"](0), strict=True):
        np.testing.assert_array_equal(found, wanted)
    row: dict[str, Any] = {"n": PAGED, "heads": heads, "planes": planes, "page": PAGE, "k": k}
    for place, spent in cold_and_hot(works, len(pool.tables), rounds).items():
        row[place] = {"microseconds": {name: microseconds(times) for name, times in spent.items()}}
        row[place]["over_side_by_side"] = ratio(spent["pages"], spent["side by side"])
    return row


def calls(rng: np.random.Generator) -> dict[str, float]:
    """Time short searches from cache in microseconds: with arrays, tensors and the torch operator."""
    query, keys, k = random_codes(rng, 1), random_codes(rng, SHORT), SHORT // SHARE
    tensors, sizes = (torch.from_numpy(query), torch.from_numpy(keys)), torch.tensor([k])
    flat = faiss.IndexBinaryFlat(32 * WORDS)
    flat.add(keys.view(np.uint8))
    every = None, True, None, k, None, None, None, SHORT, 0, 0, 0  # best first; no pages; no values per row
    works: Works = {
        "arrays": lambda i: hashcore.search(query, keys, k),
        "tensors": lambda i: hashcore.search(*tensors, k),
        "a k for each row": lambda i: hashcore.search(*tensors, sizes),
        "operator": lambda i: torch.ops.hashcore.search(*tensors, *every),
        "faiss": lambda i: flat.search(query.view(np.uint8), k),
    }
    spent = {name: microseconds(times) for name, times in in_turn(works, [0] * 20 * HOT).items()}
    print(f"a search of {SHORT} keys: " + ", ".join(f"{name} {us:.0f} us" for name, us in spent.items()))
    return spent


def ceilings(bench: Bench) -> dict[str, float]:
    """Measure the bandwidth of reading codes and the speed of scoring in cache; print the bounds that follow."""
    few, planes, weights = random_codes(bench.rng, 1024), random_codes(bench.rng, 32, 8), (1,) * 8
    works: Works = {
        "read": lambda i: read(bench.keys[i].reshape(-1).view(np.uint64)),
        "score": lambda i: hashcore.score(planes, few, weights),
    }
    spent = in_turn(works, list(range(len(bench.keys))))
    octets = 4 * WORDS * bench.n / (microseconds(spent["read"]) * 1e-6)
    per_score = microseconds(spent["score"]) * 1e-6 / (len(weights) * len(planes) * len(few))
    print(f"reads {octets / 1e9:.1f} GB/s from memory; scoring a key in cache takes {1e9 * per_score:.3f} ns")
    for n in SIZES:
        for queries in QUERIES:
            reading, scoring = 4e6 * WORDS * n / octets, 1e6 * queries * n * per_score
            print(f"  {n} keys, {queries} queries: at least {reading:.0f} us to read, {scoring:.0f} us to score")
    return {"bytes_per_second": octets, "seconds_per_score": per_score}


def last_level_cache() -> int:
    """Return its size in bytes; 32 MiB if unknown."""
    sizes = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((1024 * int(path.read_text().strip().removesuffix("K")) for path in sizes), default=1 << 25)


def show(row: dict[str, Any]) -> None:
    """Print the results of one size."""
    more = [f", {row[name]} {name}" for name in ("queries", "heads", "planes") if name in row]
    print(f"{row['n']} keys" + "".join(more))
    for place in ("memory", "cache"):
        times = ", ".join(f"{name} {us:.0f} us" for name, us in row[place]["microseconds"].items())
        ratios = {name: at for name, at in row[place].items() if "over" in name}
        shown = ", ".join(f"{name} {at['processor']:.2f} ({at['wall']:.2f} wall)" for name, at in ratios.items())
        print(f"  from {place}: {times}; {shown}", flush=True)


def whole(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Time short calls, and scores and searches of all sizes."""
    cache, rng = last_level_cache(), np.random.default_rng(0)
    versions = {module.__name__: module.__version__ for module in (hashcore, numba, np, torch, faiss)}
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "processor": processor(), "versions": versions}
    result |= {"last_level_cache": cache, "bits": 32 * WORDS, "calls": calls(rng), "search": [], "score": []}
    for n in sizes:
        bench = Bench(n, cache, rng)
        if "ceilings" not in result:
            result["ceilings"] = ceilings(bench)
        result["score"].append(bench.score(rounds))
        show(result["score"][-1])
        bench.add_faiss()
        for queries in QUERIES:
            result["search"].append(bench.search(queries, rounds if queries == 1 else 1))
            show(result["search"][-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="keys per set; none: only pages")
    parser.add_argument("--rounds", type=int, default=3, help="passes over all sets")
    parser.add_argument("--cpu", type=int, help="pin the process to this CPU")
    parser.add_argument("--out", type=pathlib.Path, help="store the JSON in this file")
    given = parser.parse_args()
    if min(given.sizes, default=SHARE) < SHARE or given.rounds < 1:
        parser.error(f"--sizes must be at least {SHARE} and --rounds at least 1")
    if given.cpu is not None:
        os.sched_setaffinity(0, {given.cpu})
    faiss.omp_set_num_threads(1)
    torch.set_num_threads(1)

    result = whole(given.sizes, given.rounds) if given.sizes else {}
    pages = {"date": time.strftime("%Y-%m-%d"), "processor": processor(), "rows": []}
    for heads, planes in PAGED_AS:
        rng = np.random.default_rng(heads)
        pages["rows"].append(paged(heads, planes, last_level_cache(), given.rounds, rng))
        show(pages["rows"][-1])
    if given.out and not given.sizes:
        result = json.loads(given.out.read_text())
    result["pages"] = pages
    if given.out:
        given.out.write_text(json.dumps(rounded(result), indent=1) + "\n")
    print(json.dumps(rounded(result)))


if __name__ == "__main__":
    main()
