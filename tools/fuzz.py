"""Look for broken laws at random, for as long as asked.

    uv run tools/fuzz.py --seconds 3600                # all fuzzers, in equal shares
    uv run tools/fuzz.py functions --seconds 60        # one of them

A fuzzer is a module of tests/, or of a package's tests, with `case(rng)`: it draws one case from the generator, raises
where a law is broken, and returns how many comparisons it made. Stops at the first case that does, and says the command
that repeats it.
"""

import argparse
import faulthandler
import importlib
import secrets
import sys
import time
import warnings
from pathlib import Path

import numpy as np

FUZZERS = {
    "functions": "fuzz_hashcore",  # every function of hashcore against an oracle of a few lines
    "index": "fuzz_index",  # BitIndex against a list of its rows
    "index-files": "fuzz_index_files",  # damaged and forged files of BitIndex
    "cache": "fuzz_cache",  # what is done to caches that carry codes, against plain ones
    "files": "fuzz_files",  # every other file that may come from elsewhere: a case is a round of test_fuzz_*.py
}
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ROOT / "tests", ROOT / "packages" / "sparse-decode" / "tests"


def run(name: str, seconds: float, most: int | None, seed: int, first: int) -> int:
    """Run cases from `first` on for so long, or so many; return how many comparisons they made."""
    case = importlib.import_module(FUZZERS[name]).case
    number, checks, whole, end = first, 0, False, time.monotonic() + seconds
    try:
        while number == first or (time.monotonic() < end if most is None else number < first + most):
            checks += case(np.random.default_rng([seed, number]))
            number += 1
        whole = True
    finally:
        if not whole:
            again = f"uv run tools/fuzz.py {name} --seed {seed} --first {number} --cases 1"
            print(f"{name}: stopped after {number - first} cases by this one: {again}", file=sys.stderr)
    print(f"{name}: {number - first} cases, {checks} comparisons, no law broken (seed {seed})", flush=True)
    return checks


def main() -> None:
    """Run the fuzzers that are named, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fuzzers", nargs="*", metavar="fuzzer", help=f"of {', '.join(FUZZERS)}; by default all")
    parser.add_argument("--seconds", type=float, default=300, help="for all together; a case that began is finished")
    parser.add_argument("--cases", type=int, help="so many of each instead")
    parser.add_argument("--seed", type=int, help="of the cases, by default another each time")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    if unknown := set(args.fuzzers) - set(FUZZERS):
        parser.error(f"expected fuzzers of {', '.join(FUZZERS)}, got {', '.join(sorted(unknown))}")
    sys.path[:0] = map(str, FOLDERS)
    warnings.simplefilter("error")
    faulthandler.enable()  # a crash says where, and the seed below repeats it
    names, seed = args.fuzzers or list(FUZZERS), secrets.randbelow(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    for name in names:
        run(name, args.seconds / len(names), args.cases, seed, args.first)


if __name__ == "__main__":
    main()
