"""Time searches of BitIndex among given ids beside searches of all codes, in turn, on one thread.

    uv run packages/hashcore/benchmarks/filters.py               # a million codes; needs a quiet machine
    uv run packages/hashcore/benchmarks/filters.py --count 100000 --rounds 5

Prints for each length of code, number of queries in a call, and share of the ids, the median ratio of processor time to
that of the search without a filter. The ids are random and sorted, int64, or given as a mask of
bools; reading them is part of the time.
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # read when imported

import hashcore
import numpy as np

K, PLANES = 10, 3
WORDS, QUERIES, SHARES = (4, 12), (1, 64), (0.01, 0.5)


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="number of codes")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds, after one warm-up")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    for words in WORDS:
        index = hashcore.BitIndex.from_codes(rng.integers(-(2**31), 2**31, (given.count, words), np.int32))
        filters: dict[str, dict[str, object]] = {"all": {}}
        for share in SHARES:
            mask = rng.random(given.count) < share
            filters |= {f"{name}, {share:.0%}": {name: np.flatnonzero(mask)} for name in ("ids", "without")}
            filters |= {f"mask, {share:.0%}": {"ids": mask}}
        for queries in QUERIES:
            search = functools.partial(index.search, rng.normal(size=(queries, 32 * words)), K, planes=PLANES)
            rounds = [
                {name: seconds(functools.partial(search, **how)) for name, how in filters.items()}
                for _ in range(given.rounds + 1)
            ][1:]
            print(f"{32 * words} bits, {queries} queries: {1e3 * statistics.median(x['all'] for x in rounds):.2f} ms")
            for name in list(filters)[1:]:
                print(f"  {name:14}{statistics.median(x[name] / x['all'] for x in rounds):6.2f}")


if __name__ == "__main__":
    main()
