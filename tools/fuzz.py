"""Search for broken invariants with random inputs, for a given time.

    uv run tools/fuzz.py --seconds 3600                # all fuzzers, in equal shares
    uv run tools/fuzz.py functions --seconds 60        # one of them

A fuzzer is a module of tests/, or of a package's tests, with a function `case(rng)`: it draws one case from the
generator, raises if an invariant is broken, and returns the number of calls, steps or files it tried. Stops at the
first failing case and prints the command that repeats it.
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
    "functions": ("fuzz_hashcore", "calls"),  # every function of hashcore against a short oracle
    "index": ("fuzz_index", "searches"),  # BitIndex against a list of its rows
    "index-files": ("fuzz_index_files", "files"),  # damaged and forged files of BitIndex
    "cache": ("fuzz_cache", "steps"),  # operations on caches with codes, against plain ones
    "files": ("fuzz_files", "files"),  # all other files from untrusted sources: a case is a round of test_fuzz_*.py
}
"""Module of each fuzzer, and what it counts."""
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ROOT / "tests", ROOT / "packages" / "sparse-decode" / "tests"


def run(name: str, seconds: float, most: int | None, seed: int, first: int) -> int:
    """Run cases from `first` on for so many seconds, or `most` cases; return the sum of what they counted."""
    module, unit = FUZZERS[name]
    case = importlib.import_module(module).case
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
    print(f"{name}: {number - first} cases, {checks} {unit}, no invariant broken (seed {seed})", flush=True)
    return checks


def main() -> None:
    """Run the named fuzzers, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fuzzers", nargs="*", metavar="fuzzer", help=f"of {', '.join(FUZZERS)}; default: all")
    parser.add_argument("--seconds", type=float, default=300, help="for all together; a started case is finished")
    parser.add_argument("--cases", type=int, help="number of cases per fuzzer, instead of --seconds")
    parser.add_argument("--seed", type=int, help="of the cases; default: a random one")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    if unknown := set(args.fuzzers) - set(FUZZERS):
        parser.error(f"expected fuzzers of {', '.join(FUZZERS)}, got {', '.join(sorted(unknown))}")
    sys.path[:0] = map(str, FOLDERS)
    warnings.simplefilter("error")
    faulthandler.enable()  # shows where a crash happened; the printed seed repeats it
    names, seed = args.fuzzers or list(FUZZERS), secrets.randbelow(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    for name in names:
        run(name, args.seconds / len(names), args.cases, seed, args.first)


if __name__ == "__main__":
    main()
