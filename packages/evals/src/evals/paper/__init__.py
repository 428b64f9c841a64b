"""The paper's tables and figures, measured by our tasks."""

from __future__ import annotations

from evals.paper.item import Item
from evals.paper.items import ITEMS
from evals.paper.shares import Shares, shares
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
    if item.dense_at:
        layers = shape_of(load_config(settings.model)).num_layers
        if max(item.dense_at) >= layers:
            return f"layer {max(item.dense_at)} is dense in it, and the model has {layers} layers: give another --model"
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
            found = [item for item in items if item.is_number(kind, number)]
            if not found:
                last = len({item.name.partition(" (")[0] for item in ITEMS if item.name.startswith(kind)})
                raise ValueError(f"--{kind} takes 1 to {last}, got {number}")
            # Parts that cannot run are left out; if none can, the first says why.
            return [item for item in found if why_not(item, settings) is None] or found
    return []
