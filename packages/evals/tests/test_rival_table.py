"""The table of rivals: its entries, and that no other module contains a rival's name or parameters."""

import importlib.util
import sys
from dataclasses import dataclass

import pytest
from evals import settings
from evals.methods import RIVAL_NAMES, load_methods
from evals.rivals import RIVALS, MagicPigSelector, QuestSelector, Rival
from evals.tasks import ppl_settings, tune, tune_settings
from evals.tasks.tune_settings import TuneCommand
from sparse_decode.select import NoCodes

PUBLISHED = {
    "quest": (QuestSelector(False, 16), None, "page16", "page4"),
    "quest-heads": (QuestSelector(True, 16), None, "page16", "page4"),
    "magicpig": (MagicPigSelector(15, 100), 1500, "bits15-tables100-4-64", "bits8-tables50-4-64"),
    "magicpig-sink": (MagicPigSelector(15, 100, 4, 0), 1500, "bits15-tables100-4-0", "bits8-tables50-4-0"),
    "magicpig-local": (MagicPigSelector(15, 100, 0, 64), 1500, "bits15-tables100-0-64", "bits8-tables50-0-64"),
    "magicpig-bare": (MagicPigSelector(15, 100, 0, 0), 1500, "bits15-tables100-0-0", "bits8-tables50-0-0"),
    "magicpig-10x150": (MagicPigSelector(10, 150), 1500, "bits10-tables150-4-64", "bits8-tables50-4-64"),
}
"""Selector, bits and identity as published, and the identity with other parameters: see `identity_of`."""


def identity_of(name, settings):
    """An identity: MagicPIG's ends with the rows that it leaves dense, and its seed."""
    return f"{name}-{settings}" + "-1024-0" * name.startswith("magicpig")


@dataclass
class Mine(NoCodes):
    """A rival whose parameters have the same names as those of two others; it selects nothing."""

    page: int
    bits: int
    other: int
    window: int = 7

    def select(self, rows):
        raise NotImplementedError


@pytest.fixture
def mine(monkeypatch):
    """A sixth entry, and everything derived from the table computed again with it."""
    entry = Rival(
        "mine",
        "a test's",
        Mine,
        ({"page": 4, "bits": 2, "other": 3},),
        lambda parameters, head_dim: parameters["other"] * head_dim,
        {"page": "pages", "bits": (2, 5), "other": (3,)},
        identity_settings=("window",),
    )
    monkeypatch.setitem(RIVALS, "mine", entry)
    methods = derived(monkeypatch)
    for module in (settings, ppl_settings, tune_settings):
        for name in {"NAMES", "RIVAL_NAMES", "SPARSE_NAMES", "SELECTION_NAMES"} & vars(module).keys():
            monkeypatch.setattr(module, name, getattr(methods, name))
    return methods


def derived(monkeypatch):
    """Import the module of methods again, from the current table."""
    spec = importlib.util.spec_from_file_location("methods_with_mine", sys.modules["evals.methods"].__file__)
    assert spec is not None
    assert spec.loader is not None
    methods = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, methods)
    spec.loader.exec_module(methods)
    return methods


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms(name):
    selector, bits, settings, _ = PUBLISHED[name]
    (found,) = load_methods([name], None, None)
    assert (type(found.selector), vars(found.selector)) == (type(selector), vars(selector))
    assert (found.variant, found.bits, found.identity) == (
        "magicpig" if bits else name,
        bits,
        identity_of(name, settings),
    )
    heads = {"quest": vars(QuestSelector(True, 16))}.get(name)
    assert (found.query_head_selector and vars(found.query_head_selector)) == heads


def test_an_entry_is_a_method_that_runs_only_when_named(mine):
    assert (*RIVAL_NAMES, "mine") == mine.RIVAL_NAMES
    assert mine.NAMES[-1] == "mine"
    assert "mine" not in (*mine.DEFAULT_NAMES, *mine.SELECTION_NAMES)
    (found,) = mine.load_methods(["mine"], None, None)
    assert found.selector == Mine(4, 2, 3)
    facts = found.name, found.variant, found.bits, found.identity, found.query_head_selector
    assert facts == ("mine", "mine", None, "mine-bits2-other3-page4-7", None)


def test_an_entry_is_tuned_over_its_own_grid(mine):
    found = tune.grid(TuneCommand(methods=("mine", "quest"), pages=(4, 6)))
    points = [(4, 2, 3), (4, 5, 3), (6, 2, 3), (6, 5, 3)]
    assert [tuple(s.parameters.values()) for s in found if s.name == "mine"] == points
    assert [s.label for s in found if s.published] == ["mine, page 4, bits 2, other 3", "quest, page 16"]
    assert [s.parameters["page"] for s in found if s.name == "quest"] == [4, 6, 16]
