"""The fuzzers of tests/fuzz.py for a few seconds each, always on the same cases."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
CASES = {"functions": 500, "index": 60, "index-files": 1000, "cache": 8}


@pytest.mark.parametrize("name", CASES)
def test_no_law_is_broken(load, name, monkeypatch):
    fuzz = load("tests", "fuzz")
    monkeypatch.setattr(sys, "path", [*map(str, fuzz.FOLDERS), *sys.path])
    assert fuzz.run(name, fuzz.limit(0, CASES[name], None), 20, 0)["checks"] >= CASES[name]


def test_every_fuzzer_is_tested_here_or_is_tests(load):
    assert set(load("tests", "fuzz").FUZZERS) == {*CASES, "files"}


def test_a_broken_law_ends_the_run_with_the_command_that_repeats_it(load, monkeypatch, capsys):
    fuzz = load("tests", "fuzz")

    class Broken:
        @staticmethod
        def case(rng: np.random.Generator) -> int:
            assert rng.random() < 0.9, "drawn"
            return 1

    monkeypatch.setitem(sys.modules, "broken", Broken)
    monkeypatch.setitem(fuzz.FUZZERS, "broken", ("broken", "calls"))
    with pytest.raises(AssertionError, match="drawn"):
        fuzz.run("broken", fuzz.limit(60, None, None), 3, 0)
    again = capsys.readouterr().err.split("uv run tests/fuzz.py broken ")[1].split()
    with pytest.raises(AssertionError, match="drawn"):
        fuzz.run("broken", fuzz.limit(0, 1, None), int(again[1]), int(again[3]))


def test_a_fuzzer_runs_until_it_has_tried_so_many(load, monkeypatch):
    fuzz = load("tests", "fuzz")

    class Three:
        @staticmethod
        def case(rng: np.random.Generator) -> int:
            return 3

    monkeypatch.setitem(sys.modules, "three", Three)
    monkeypatch.setitem(fuzz.FUZZERS, "three", ("three", "calls"))
    found = fuzz.run("three", fuzz.limit(0, None, 10), 5, 7)
    assert found == {"cases": 4, "checks": 12, "unit": "calls", "seed": 5, "first": 7}


def test_counts_of_other_fuzzers_are_kept(load, tmp_path):
    fuzz, path = load("tests", "fuzz"), tmp_path / "fuzz.json"
    for name, checks in (("cache", 1), ("files", 2), ("cache", 3)):
        fuzz.store(path, {name: {"checks": checks}})
    assert json.loads(path.read_text()) == {"cache": {"checks": 3}, "files": {"checks": 2}}


@pytest.mark.slow
def test_an_unknown_fuzzer_is_refused_in_a_sentence():
    done = subprocess.run([sys.executable, "tests/fuzz.py", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected fuzzers of functions, index, index-files, cache, files, got nothing" in done.stderr
