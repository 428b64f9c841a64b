"""The laws of test_fuzz_*.py with many more examples: a case is one round of all of them, by another seed."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = 300
TESTS = Path(__file__).parent
LAWS = ("test_fuzz_hashers.py", "test_fuzz_stored.py", "test_fuzz_runs.py")


def case(rng) -> int:
    """Run every law once; return the number of examples that all laws have tried."""
    seed = int(rng.integers(1 << 32))
    options = ["--import-mode=importlib", "-q", "-x", "-p", "no:xdist", "-o", "addopts=", f"--hypothesis-seed={seed}"]
    options.append("--hypothesis-show-statistics")
    command = [sys.executable, "-m", "pytest", *options, *(str(TESTS / law) for law in LAWS)]
    environment = {**os.environ, "FUZZ_EXAMPLES": str(EXAMPLES)}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"a law was broken by seed {seed}:\n{done.stdout}"
    tried = sum(int(count) for count in re.findall(r"^ +- (\d+) passing,? ", done.stdout, re.M))
    assert tried, f"expected the statistics of hypothesis, got\n{done.stdout}"
    return tried
