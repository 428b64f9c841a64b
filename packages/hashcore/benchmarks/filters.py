"""Time searches of BitIndex among given ids beside searches of all codes, in turn, on one thread.

    uv run packages/hashcore/benchmarks/filters.py --out docs/results/hashcore_filters.json  # needs a quiet machine
    uv run packages/hashcore/benchmarks/filters.py --count 100000 --rounds 5   # instead of a million codes

Prints for each length of code, number of queries in a call, and share of the ids, the median ratio of processor time to
that of the search without a filter. The ids are random and sorted, int64, or given as a mask of bools; reading them is
part of the time. Requirement: no ratio is above 1.3. The last line is JSON, and --out stores it; the exit status is 1
if the requirement is not met.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # read when imported

import hashcore
import numpy as np
from machine import processor, rounded

K, PLANES = 10, 3
WORDS, QUERIES, SHARES = (4, 12), (1, 64), (0.01, 0.5)
ASKED = 1.3


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(words: int, count: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Time every filter for each number of queries, after a warm-up."""
    rng = np.random.default_rng(0)
    index = hashcore.BitIndex.from_codes(rng.integers(-(2**31), 2**31, (count, words), np.int32))
    filters: dict[str, dict[str, object]] = {"all": {}}
    for share in SHARES:
        mask = rng.random(count) < share
        filters |= {f"{name}, {share:.0%}": {name: np.flatnonzero(mask)} for name in ("ids", "without")}
        filters |= {f"mask, {share:.0%}": {"ids": mask}}
    for queries in QUERIES:
        search = functools.partial(index.search, rng.normal(size=(queries, 32 * words)), K, planes=PLANES)
        times = [
            {name: seconds(functools.partial(search, **how)) for name, how in filters.items()}
            for _ in range(rounds + 1)
        ][1:]
        ratios = {name: statistics.median(x[name] / x["all"] for x in times) for name in list(filters)[1:]}
        milliseconds = 1e3 * statistics.median(x["all"] for x in times)
        yield {"bits": 32 * words, "queries": queries, "milliseconds": milliseconds, "ratios": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="number of codes")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds, after one warm-up")
    parser.add_argument("--out", type=pathlib.Path, help="store the JSON in this file")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for words in WORDS:
        for row in measured(words, given.count, given.rounds):
            rows.append(row)
            print(f"{row['bits']} bits, {row['queries']} queries: {row['milliseconds']:.2f} ms")
            for name, ratio in row["ratios"].items():
                print(f"  {name:14}{ratio:6.2f}", flush=True)
    missed = [row for row in rows if max(row["ratios"].values()) > ASKED]
    about = {"date": time.strftime("%Y-%m-%d"), "processor": processor(), "hashcore": hashcore.__version__}
    about |= {"count": given.count, "rounds": given.rounds, "k": K, "planes": PLANES, "asked": ASKED}
    result = rounded({**about, "missed": [[row["bits"], row["queries"]] for row in missed], "rows": rows})
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
