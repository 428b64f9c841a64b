"""The fuzzers of tests/fuzz.py for a few seconds each, always on the same cases."""

import sys

import pytest

CASES = {"functions": 500, "index": 60, "index-files": 1000, "cache": 8, "files": 250}


@pytest.mark.parametrize("name", CASES)
def test_no_law_is_broken(load, name, monkeypatch):
    fuzz = load("tests", "fuzz")
    assert set(fuzz.FUZZERS) == set(CASES)
    monkeypatch.setattr(sys, "path", [*map(str, fuzz.FOLDERS), *sys.path])
    assert fuzz.run(name, fuzz.limit(0, CASES[name], None), 20, 0)["checks"] >= CASES[name]


def test_a_broken_law_ends_the_run_with_the_command_that_repeats_it(load, monkeypatch, capsys):
    fuzz = load("tests", "fuzz")

    class Broken:
        @staticmethod
        def case(rng):
            assert rng.random() < 0.9, "drawn"
            return 1

    monkeypatch.setitem(sys.modules, "broken", Broken)
    monkeypatch.setitem(fuzz.FUZZERS, "broken", ("broken", "calls"))
    with pytest.raises(AssertionError, match="drawn"):
        fuzz.run("broken", fuzz.limit(60, None, None), 3, 0)
    again = capsys.readouterr().err.split("uv run tests/fuzz.py broken ")[1].split()
    with pytest.raises(AssertionError, match="drawn"):
        fuzz.run("broken", fuzz.limit(0, 1, None), int(again[1]), int(again[3]))
