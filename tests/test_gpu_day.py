"""The GPU day, rehearsed on the CPU so that it does not rot: every stage ends by itself, and a failure stops none."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DAY = ROOT / "tools" / "gpu_day" / "day.sh"
PLANTED = """
import pytest

@pytest.mark.cuda
def test_planted():
    raise AssertionError("words of the planted failure")
"""


@pytest.mark.slow
def test_a_rehearsal_runs_every_stage_and_names_a_planted_failure(tmp_path):
    (tmp_path / "test_planted.py").write_text(PLANTED)
    more = {"OUT": str(tmp_path / "out"), "DEV": "cpu", "WORKERS": "2", "MORE_TESTS": str(tmp_path / "test_planted.py")}
    done = subprocess.run(["bash", DAY], env=os.environ | more, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "::test_planted: AssertionError: words of the planted failure" in done.stdout
    assert "1 tests failed" in done.stdout
    ends = [line.partition("] ")[2] for line in done.stdout.splitlines() if "exit code" in line]
    stages = "facts", "tests", "layer", "model"
    assert ends[:4] == [f"stage {name}: exit code {int(name == 'tests')}" for name in stages]
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert not [row for row in rows if row["kind"] == "error"]
    assert {row["kind"] for row in rows} >= {"facts", "layer", "paper", "check", "decode", "train"}
