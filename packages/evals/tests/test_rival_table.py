"""The table of rivals: its entries, and that no other module contains a rival's name or parameters."""

import pytest
from evals.methods import load_methods
from evals.rivals import MagicPigSelector, QuestSelector

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
