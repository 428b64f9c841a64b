"""Overlap of selections with the largest exact attention: IoU, recall and mass (eq. 12), by layer and head.

Queries and keys come from a dense forward pass and are used on the fly; methods select with the same selectors as in
decoding.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from hashtrain.data.capture import observe
from hashtrain.evaluation.metrics import Quality, quality, reading
from hashtrain.run.prepare import require_plain_attention
from hashtrain.training.target import always_read, attention, top_count
from rich.console import Console
from sparse_decode import AttendingSelector, Rows
from torch import Tensor
from transformers import PreTrainedModel

from evals.documents import TokenDocument
from evals.methods import LoadedMethod
from evals.metrics import by_place
from evals.results import Result, Row
from evals.settings import Always, MethodsCommand
from evals.setup import Ready, Sample, drawn_rows, each_document, finish, load_with_documents, mean_density, rows_of
from evals.tables import HEADS
from evals.tasks.settings import IouCommand

METRICS = (*Quality._fields, "low", "lost")
"""`low`: the 5th percentile of the rows' mass; `lost`: the share of rows that find less than half of the oracle's."""


class Cell(NamedTuple):
    """A selection to compare with the target."""

    method: str
    budget: float
    heads: str


def run(command: IouCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    ready = load_with_documents(command, "iou", console)
    require_plain_attention(ready.model.config)
    methods = [method for method in ready.methods if method.selector]
    heads_of = heads_measured(command)
    cells = [Cell(m.name, b, heads) for heads in heads_of for b in command.budgets for m in methods]

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        positions = drawn_rows(command, command.rows, number)  # the same rows for all methods
        found = measure(ready.model, document.ids, positions, methods, command.budgets, command.always, heads_of)
        step("selections")
        return {"cells": [{**cell._asdict(), **found[cell]} for cell in cells]}

    samples = each_document(command, ready, console, 1, compute)
    return finish(command, ready, list(_rows(command, ready, cells, samples)), console)


def heads_measured(command: MethodsCommand) -> tuple[str, ...]:
    """Return the kinds of heads to measure: both, or the one of --heads."""
    return tuple(HEADS) if command.heads is None else (f"{command.heads}_head",)


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    methods: list[LoadedMethod],
    budgets: tuple[float, ...],
    always: Always,
    heads_of: tuple[str, ...] = tuple(HEADS),
) -> dict[Cell, dict[str, Any]]:
    """Compare every method's selections with the target on some rows of one context.

    Args: ids: int64 [T]; positions: the rows, int64 [R]; always: the tokens that every row reads without a search.
    Returns: for each cell its `density`, and as [layer][head] `iou`, `recall` and `mass`, means over the rows, and
        `low` and `lost` (see `METRICS`).
    """
    layers: dict[Cell, list[tuple[Quality, Tensor]]] = {}
    positions = positions.to(model.device)
    interval = torch.stack([torch.zeros_like(positions), positions + 1], -1)[None]
    ends = always_read(positions, len(ids), always.sink, always.recent)

    def sink(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        q = q[:, :, positions]
        for heads in heads_of:
            p = attention(q, k, positions, scaling, "kv" if heads == "kv_head" else "query")
            for method in methods:
                selector = method.selector if heads == "kv_head" else method.query_head_selector
                assert selector is not None
                codes = selector.encode_keys(layer, k) if selector.needs_codes else None
                for budget in budgets:
                    counts = top_count(positions + 1, budget)
                    rows = Rows(layer, q, k, codes, interval, counts[None], scaling)
                    if not isinstance(selector, AttendingSelector):
                        searched = (counts - ends.sum(-1)).clamp(min=0)
                        rows = replace(rows, counts=searched[None], sink=always.sink, recent=always.recent)
                    selected = selector.select(rows)
                    selected = selected.repeat_interleave(p.shape[1] // selected.shape[1], 1)
                    found, taken = quality(p, selected, counts, ends), reading(selected, ends)
                    density = taken.sum().double() / ((positions + 1).sum() * taken.shape[1])
                    layers.setdefault(Cell(method.name, budget, heads), []).append((found, density))

    observe(model, ids, sink)
    return {cell: by_layer(found) for cell, found in layers.items()}


def by_layer(layers: list[tuple[Quality, Tensor]]) -> dict[str, Any]:
    """Return the rows' metrics as [layer][head]; the density, equal in all layers but for ties, is averaged."""
    means = {m: [getattr(q, m)[0].double().mean(-1) for q, _ in layers] for m in Quality._fields}
    mass = [found.mass[0].double() for found, _ in layers]  # [heads, rows]
    low, lost = [m.quantile(0.05, -1) for m in mass], [(m < 0.5).double().mean(-1) for m in mass]
    found = {name: torch.stack(x).tolist() for name, x in {**means, "low": low, "lost": lost}.items()}
    return {**found, "density": sum(torch.stack([density for _, density in layers]).tolist()) / len(layers)}


def _rows(command: IouCommand, ready: Ready, cells: list[Cell], samples: list[Sample]) -> Iterator[Row]:
    """Convert samples to rows: the mean over sparse layers and heads, the mean of each layer, and each head."""
    row = rows_of(command, ready, "rows", len(samples))
    for i, cell in enumerate(cells):
        at = {"budget": cell.budget, "rule": "visible", "density": mean_density(samples, i), "heads": cell.heads}
        for metric in METRICS:
            values = np.array([sample["cells"][i][metric] for sample in samples])  # [documents, layers, heads]
            most = np.inf if metric in ("mass", "low") else 1.0  # a rival may read more than its budget
            for place, estimate in by_place(values, command.always.sparse(values.shape[1]), most):
                yield row(cell.method, metric, estimate, **place, **at)
