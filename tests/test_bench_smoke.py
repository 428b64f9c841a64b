"""What tools/bench_smoke.py says of its ratios; the timing itself is CI's."""

import json
import os

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
    assert ("off by more than 2: a race" in capsys.readouterr().out) is off


@pytest.mark.parametrize(("now", "before"), [({"a": 1.0, "b": 1.0}, {"a": 1.0}), ({"a": 1.0}, {"a": 1.0, "b": 1.0})])
def test_a_race_without_its_other_ratio_fails(tool, capsys, now, before):
    assert tool.report(now, before) == 1
    assert "one is missing for b" in capsys.readouterr().err


def test_ways_that_disagree_are_not_timed(tool):
    with pytest.raises(ValueError, match="they differ: a race"):
        tool.ratio("a race", tool.Race(lambda: 1, lambda: 2, lambda a, b: a == b), 1)


def test_the_slower_way_has_the_ratio_above_one(tool):
    race = tool.Race(lambda: sum(range(1000)), lambda: sum(range(100_000)), lambda a, b: True)
    assert tool.ratio("sums", race, 5) > 3


def test_every_stored_ratio_was_measured_by_the_tool(tool):
    assert tool.stored(tool.STORED)
    assert json.loads(tool.STORED.read_text())["turns"] == tool.TURNS
    assert all(ratio > 0 for ratio in tool.stored(tool.STORED).values())


def test_the_races_of_a_decode_step_agree(tool, monkeypatch):
    monkeypatch.setattr(tool, "CONTEXT", 512)
    for race in tool.decoding().values():
        assert tool.ratio("a step", race, 1) > 0
