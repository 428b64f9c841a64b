"""The fuzzers of tests/fuzz.py for a few seconds each, always on the same cases."""

import os
import sys

import pytest

CASES = {"functions": 100, "index": 80, "index-files": 300, "cache": 8, "files": 80}


@pytest.mark.parametrize("name", CASES)
def test_no_law_is_broken(load, name, monkeypatch):
    if name == "files" and os.environ.get("CI") != "true":  # it reads lines for the harness, too
        pytest.importorskip("datasets", reason="datasets is not installed: `uv sync --group lm-eval`")
    fuzz = load("tests", "fuzz")
    assert set(fuzz.FUZZERS) == set(CASES)
    monkeypatch.setattr(sys, "path", [*map(str, fuzz.FOLDERS), *sys.path])
    assert fuzz.run(name, fuzz.limit(0, CASES[name], None), 20, 0)["checks"] >= CASES[name]
