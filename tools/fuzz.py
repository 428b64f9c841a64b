"""Fuzz every file that may come from elsewhere, with the laws of the tests, for as long as asked.

    uv run tools/fuzz.py --seconds 300

Rounds of the tests below with more examples and another seed each; stops at the first law that is broken, and says
the seed that breaks it again.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/test_fuzz_hashers.py", "tests/test_fuzz_stored.py", "tests/test_fuzz_runs.py")


def main() -> int:
    """Return 0 if no law was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="how long; a round that has begun is finished")
    parser.add_argument("--examples", type=int, default=300, help="of each law in a round")
    parser.add_argument("--seed", type=int, help="repeat the one round of this seed")
    args = parser.parse_args()
    end, rounds = time.monotonic() + args.seconds, 0
    while rounds == 0 or (args.seed is None and time.monotonic() < end):
        seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
        options = [
            "--import-mode=importlib",
            "-q",
            "-x",
            "-p",
            "no:xdist",
            "-o",
            "addopts=",
            f"--hypothesis-seed={seed}",
        ]
        environment = {**os.environ, "FUZZ_EXAMPLES": str(args.examples)}
        done = subprocess.run([sys.executable, "-m", "pytest", *options, *TESTS], cwd=ROOT, env=environment)
        if done.returncode:
            print(f"a law was broken: uv run tools/fuzz.py --seed {seed} --examples {args.examples}", file=sys.stderr)
            return 1
        rounds += 1
    print(f"{rounds} rounds of {args.examples} examples a law, no law broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
