"""What tools/bench_smoke.py says of its ratios; the timing itself is CI's."""

import json
import os
import sys

import pytest


@pytest.fixture(scope="module")
def tool(load):
    before = dict(os.environ)
    module = load("tools", "bench_smoke")
    os.environ.clear()
    os.environ.update(before)  # the tool has one thread, and says so in its environment
    return module


@pytest.mark.parametrize(("now", "off"), [(4.0, False), (1.0, False), (4.1, True), (0.9, True)])
def test_a_ratio_that_is_far_off_is_named_and_no_failure(tool, capsys, now, off):
    assert tool.report({"a race": now}, {"a race": 2.0}) == 0
    assert ("off by more than 2" in capsys.readouterr().out) is off


@pytest.mark.parametrize(("now", "before"), [({"a": 1.0, "b": 1.0}, {"a": 1.0}), ({"a": 1.0}, {"a": 1.0, "b": 1.0})])
def test_a_race_without_its_other_ratio_fails(tool, capsys, now, before):
    assert tool.report(now, before) == 1
    assert "a ratio of b is missing" in capsys.readouterr().err


def test_the_slower_way_has_the_ratio_above_one(tool):
    assert tool.ratio((lambda: sum(range(1000)), lambda: sum(range(100_000))), 5) > 3


def test_every_stored_ratio_has_a_race_that_runs(tool, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # a benchmark is imported beside its neighbours
    races = tool.decoding(512)
    assert all(tool.ratio(race, 1) > 0 for race in races.values())
    names = {*tool.retrieval(tool.np.random.default_rng(0)), *(name.replace("512", "8,192") for name in races)}
    assert names == json.loads(tool.STORED.read_text())["ratios"].keys()
