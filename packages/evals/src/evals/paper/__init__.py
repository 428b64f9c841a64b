"""The paper's tables and figures, measured by our tasks."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from evals.paper.item import ITEMS, Item
from evals.shapes import load_config, shape_of
from evals.study import PaperCommand

__all__ = ["ITEMS", "Item", "Shares", "chosen", "shares", "why_not"]


def why_not(item: Item, settings: PaperCommand) -> str | None:
    """Return why an item cannot run with these settings; None if it can.

    Raises: ValueError or OSError if the item names layers of a model whose config cannot be read.
    """
    if item.hub:
        return "its data come from a hub: run its command, which `evals paper --list` prints"
    if item.twice and settings.other_hashers is None:
        return "it needs --other-hashers"
    if lacking := item.lacking(settings):
        return f"{settings.hashers} lacks {', '.join(lacking)}: train them with `uv run hashtrain --only all`"
    if dense_at := item.values("--dense-at"):
        last, layers = max(map(int, dense_at)), shape_of(load_config(settings.model)).num_layers
        if last >= layers:
            return f"layer {last} is dense in it, and the model has {layers} layers: give another --model"
    return None


def chosen(settings: PaperCommand) -> list[Item]:
    """Return the items that a command names, without `planes` where only that hasher is missing (`Item.fitting`).

    Raises: ValueError if the paper has no such table or figure.
    """
    items = [item.fitting(settings) for item in ITEMS]
    if settings.all:
        return [item for item in items if item.task and why_not(item, settings) is None]
    for kind, number in (("table", settings.table), ("figure", settings.figure)):
        if number is not None:
            found = [item for item in items if item.number == f"{kind} {number}"]
            if not found:
                last = len({item.number for item in ITEMS if item.name.startswith(kind)})
                raise ValueError(f"--{kind} takes 1 to {last}, got {number}")
            # Parts that cannot run are left out; if none can, the first says why.
            return [item for item in found if why_not(item, settings) is None] or found
    return []


class Shares(NamedTuple):
    """Counts of parts, and of numbered tables and figures, that have something to store."""

    parts: int
    stored_parts: int
    numbers: int
    stored_numbers: int
    """Tables and figures of which at least one part has a stored result."""
    whole_numbers: int
    """Those of which every part has one."""
    nothing_to_store: int
    """Drawings, listings and quotations, which the other counts leave out."""


def shares(items: Sequence[Item], stored: Collection[str]) -> Shares:
    """Count items with a stored result, given the names of those that have one."""
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
