"""Search for broken invariants with random inputs, for a given time.

    uv run tests/fuzz.py --seconds 3600                # all fuzzers, in equal shares
    uv run tests/fuzz.py functions --seconds 60        # one of them
    uv run tests/fuzz.py cache --count 20000 --out docs/results/fuzz.json  # for the table of docs/families.md

A fuzzer is a module of tests/, or of a package's tests, with a function `case(rng)`: it draws one case from the
generator, raises if an invariant is broken, and returns the number of calls, steps or files it tried. Stops at the
first failing case and prints the command that repeats it. `--out` keeps what the file holds of other fuzzers.
"""

import argparse
import faulthandler
import importlib
import json
import secrets
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hashtrain.files.atomic import write_text

FUZZERS = {
    "functions": ("fuzz_hashcore", "calls"),  # every function of hashcore against its reference
    "index": ("fuzz_index", "searches"),  # BitIndex against a list of its rows
    "index-files": ("fuzz_index_files", "files"),  # damaged and forged files of BitIndex
    "cache": ("fuzz_cache", "steps"),  # operations on caches with codes, against plain ones
    "files": ("fuzz_files", "files"),  # all other files from untrusted sources, damaged and lying
}
"""Module of each fuzzer, and what it counts."""
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ROOT / "tests", ROOT / "packages" / "sparse-decode" / "tests"


def run(name: str, goes_on: Callable[[int, int], bool], seed: int, first: int) -> dict[str, Any]:
    """Run cases from number `first` on, at least one, while `goes_on(cases, checks)`; return what was counted.

    Args:
        goes_on: called with the cases that were run, and with the sum of what they tried.
    """
    module, unit = FUZZERS[name]
    case = importlib.import_module(module).case
    number, checks = first, 0
    try:
        while number == first or goes_on(number - first, checks):
            checks += case(np.random.default_rng([seed, number]))
            number += 1
    except BaseException:  # also an interrupt
        again = f"uv run tests/fuzz.py {name} --seed {seed} --first {number} --cases 1"
        print(f"{name}: stopped after {number - first} cases by this one: {again}", file=sys.stderr)
        raise
    print(f"{name}: {number - first} cases, {checks} {unit}, no invariant broken (seed {seed})", flush=True)
    return {"cases": number - first, "checks": checks, "unit": unit, "seed": seed, "first": first}


def limit(seconds: float, cases: int | None, count: int | None) -> Callable[[int, int], bool]:
    """Return a function that says whether to continue, given the cases and checks so far."""
    end = time.monotonic() + seconds
    if count is not None:
        return lambda _, checks: checks < count
    return (lambda done, _: done < cases) if cases is not None else (lambda *_: time.monotonic() < end)


def main() -> None:
    """Run the named fuzzers, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fuzzers", nargs="*", metavar="fuzzer", help=f"of {', '.join(FUZZERS)}; default: all")
    parser.add_argument("--seconds", type=float, default=300, help="for all together; a started case is finished")
    parser.add_argument("--cases", type=int, help="number of cases per fuzzer, instead of --seconds")
    parser.add_argument("--count", type=int, help="calls, searches, files or steps per fuzzer, instead of --seconds")
    parser.add_argument("--seed", type=int, help="of the cases; default: a random one")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--out", type=Path, help="JSON file to which the counts are added")
    args = parser.parse_args()
    if unknown := set(args.fuzzers) - set(FUZZERS):
        parser.error(f"expected fuzzers of {', '.join(FUZZERS)}, got {', '.join(sorted(unknown))}")
    sys.path[:0] = map(str, FOLDERS)
    warnings.simplefilter("error")
    faulthandler.enable()  # shows where a crash happened; the printed seed repeats it
    names, seed = args.fuzzers or list(FUZZERS), secrets.randbelow(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    for name in names:
        goes_on = limit(args.seconds / len(names), args.cases, args.count)
        found = run(name, goes_on, seed, args.first)
        if args.out is not None:
            before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
            write_text(args.out, json.dumps({**before, name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
