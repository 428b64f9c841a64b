"""How much of the paper has a stored result: by part, and by numbered table and figure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from evals.paper.item import Item


@dataclass(frozen=True)
class Shares:
    """Counts over the parts and numbers that have something to store."""

    parts: int
    stored_parts: int
    numbers: int
    stored_numbers: int
    """Tables and figures of which at least one part has a stored result."""
    whole_numbers: int
    """Those of which every part has one."""
    nothing_to_store: int
    """Drawings, listings and quotations, which the other counts leave out."""

    def lines(self) -> list[str]:
        """Format the counts for printing."""
        return [
            f"{self.stored_parts} of {self.parts} parts have a stored result "
            f"({_percent(self.stored_parts, self.parts)})",
            f"{self.stored_numbers} of {self.numbers} tables and figures have one "
            f"({_percent(self.stored_numbers, self.numbers)}), {self.whole_numbers} of them for every part",
            f"{self.nothing_to_store} more are drawings, listings or quotations: nothing to store",
        ]


def shares(items: Sequence[Item], stored: Collection[str]) -> Shares:
    """Count items with a stored result.

    Args:
        stored: names of those that have one.
    """
    counted = [item for item in items if not item.nothing_to_store]
    parts: dict[str, list[bool]] = {}
    for item in (item for item in counted if item.name.startswith(("table", "figure"))):
        parts.setdefault(item.number, []).append(item.name in stored)
    return Shares(
        len(counted),
        sum(item.name in stored for item in counted),
        len(parts),
        sum(map(any, parts.values())),
        sum(map(all, parts.values())),
        len(items) - len(counted),
    )


def _percent(some: int, all_of_them: int) -> str:
    return f"{100 * some / max(1, all_of_them):.0f} %"
