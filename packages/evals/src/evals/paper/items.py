"""Every table and figure of the paper, in order."""

from __future__ import annotations

from evals.paper import exact
from evals.paper.figures import FIGURES
from evals.paper.item import Item
from evals.paper.tables import TABLES


def _place(item: Item) -> tuple[int, int]:
    """Return the sort key of an item: tables first, then unnumbered parts of the paper, then figures."""
    kind, number, *_ = item.name.split()
    return ("table", "code", "figure").index(kind), int(number) if number.isdigit() else 0


ITEMS = tuple(sorted((*TABLES, *FIGURES, *exact.ITEMS), key=_place))
"""Every table and figure; those in the paper's own protocol follow those that suit the demo model."""
