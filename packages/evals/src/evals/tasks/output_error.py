"""Relative error of each layer's attention output, with the inputs of dense attention in every layer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hashtrain.config import ModelShape
from hashtrain.evaluation.remainder import linear_values
from rich.console import Console
from sparse_decode import AttendingSelector, Budget, HashSelector, Rows, attend
from sparse_decode.attach import attach_rows
from sparse_decode.attention.attend_inputs import LeftOut
from sparse_decode.planning import divided
from sparse_decode.positions import with_ends
from sparse_decode.select import NoCodes
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from evals.base_commands import Always
from evals.commands import OutputErrorCommand
from evals.documents import TokenDocument
from evals.methods import LoadedMethod
from evals.metrics import by_place
from evals.result import Result, Row
from evals.runner import require_numbers
from evals.setup import Ready, Sample, drawn_rows, each_document, finish, mean_density, prepare, require_cells, rows_of
from evals.tasks.answers import Cell

METRIC = "error"


def run(command: OutputErrorCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    ready = prepare(command, "output-error", console)
    methods = [method for method in ready.methods if method.selector]
    cells = [Cell(m.name, budget) for budget in command.budgets for m in methods]
    dropped = {m.name: _dropped(m, ready.shape.num_layers) for m in methods if m.remainder}
    ready = replace(ready, settings={**ready.settings, "without_remainder": dropped})

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        positions = drawn_rows(command, command.rows, number)
        found = measure(ready.model, document.ids, positions, methods, command.budgets, command.always)
        step("layers")
        return {"cells": [{**cell._asdict(), **found[cell]} for cell in cells]}

    def check(sample: Sample) -> None:
        require_cells(sample, cells, ("density",))
        for cell in sample["cells"]:
            require_numbers(cell, (METRIC,), ready.shape.num_layers)

    samples = each_document(command, ready, console, 1, check, compute)
    return finish(command, ready, list(_rows(command, ready, cells, samples)), console)


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    methods: list[LoadedMethod],
    budgets: tuple[float, ...],
    always: Always,
) -> dict[Cell, dict[str, Any]]:
    """Compare each method's attention output with dense attention's, on some rows of one context.

    Args: ids: int64 [T]; positions: the rows, int64 [R]; always: the tokens that every row reads.
    Returns: for each cell `error`, by layer the mean over rows of |out - dense| / |dense|, norms over all heads; and
        its `density`.
    """
    shape = ModelShape.of(model.config)
    reads = {Cell(m.name, budget): _budgets(m, budget, always, shape) for budget in budgets for m in methods}
    probe = _Probe(positions.to(model.device), methods, reads, always)
    with attach_rows(model, probe, Budget(1.0), dense_layers=0, sparse_rows=0):
        model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    return {cell: probe.read(cell) for cell in probe.errors}


class _Probe(NoCodes):
    """Attends densely, and also measures what each method would have returned."""

    def __init__(
        self, positions: Tensor, methods: list[LoadedMethod], reads: dict[Cell, dict[int, Budget]], always: Always
    ):
        self.positions, self.methods, self.reads, self.always = positions, methods, reads, always
        self.errors: dict[Cell, dict[int, list[Tensor]]] = {cell: {} for cell in reads}
        none = torch.zeros(2, dtype=torch.int64, device=positions.device)
        self.counts: dict[Cell, Tensor] = dict.fromkeys(reads, none)
        """Numbers of selected and of visible tokens, on the device until the end."""

    def read(self, cell: Cell) -> dict[str, Any]:
        """Return the errors by layer, and the density."""
        selected, visible = self.counts[cell].tolist()
        layers = self.errors[cell]
        means = [torch.cat(layers[layer]).mean() for layer in sorted(layers)]
        return {METRIC: torch.stack(means).tolist(), "density": selected / visible}

    def select(self, rows: Rows) -> Tensor:
        return rows.counts.new_empty(rows.q.shape[0], rows.k.shape[1], rows.q.shape[2], 0)

    def attend(self, rows: Rows, v: Tensor, indices: Tensor) -> Tensor:
        how: Any = {"scale": rows.scaling, "enable_gqa": True}
        dense = F.scaled_dot_product_attention(rows.q, rows.k, v, rows.visible, **how).transpose(1, 2)
        assert rows.visible is not None  # one pass over the whole context, with its causal mask
        total = rows.visible[0, 0].sum(-1)
        at = torch.isin(total - 1, self.positions).nonzero()[:, 0]
        if len(at):
            self._measure(rows, v, dense[:, at], at, total[at])
        return dense.contiguous()

    def _measure(self, rows: Rows, v: Tensor, dense: Tensor, at: Tensor, total: Tensor) -> None:
        assert rows.visible is not None
        q, visible = rows.q[:, :, at], rows.visible[:, :, at]
        sink, recent, shortlist = self.always.sink, self.always.recent, self.always.shortlist
        for method in self.methods:
            selector = method.selector
            assert selector is not None
            codes = selector.encode_keys(rows.layer, rows.k) if selector.needs_codes else None
            for cell in (cell for cell in self.reads if cell.method == method.name):
                counts = self.reads[cell][rows.layer].count(total[None])
                part = Rows(rows.layer, q, rows.k, codes, visible, counts, rows.scaling, rows.softcap, rows.sinks)
                if isinstance(selector, AttendingSelector):
                    indices = selector.select(part)
                else:
                    searched = (counts - sink - recent).clamp(min=0)
                    part = replace(part, counts=searched, sink=sink, recent=recent, shortlist=shortlist)
                    indices = with_ends(selector.select(part), 0, total[None], sink, recent)
                out = _attend(method, part, v, indices, total, self.always.values)
                gap = (out.float() - dense.float()).flatten(2).norm(dim=-1) / dense.float().flatten(2).norm(dim=-1)
                self.errors[cell].setdefault(rows.layer, []).append(gap[0].double())
                counts = (indices >= 0).sum(), total.sum() * indices.shape[1]
                self.counts[cell] = self.counts[cell] + torch.stack(counts)


def _budgets(method: LoadedMethod, fraction: float, always: Always, shape: ModelShape) -> dict[int, Budget]:
    """Return what a method reads in each layer, without the tokens that are always read."""
    budget = Budget(fraction, sink=0, recent=0)
    alike = dict.fromkeys(range(shape.num_layers), budget)
    if not isinstance(method.selector, HashSelector):
        return alike
    sparse = dict.fromkeys(always.sparse(shape.num_layers), replace(budget, **always.divided))
    return alike | divided(sparse, method.selector, shape.at)


def _attend(method: LoadedMethod, rows: Rows, v: Tensor, indices: Tensor, total: Tensor, share: float) -> Tensor:
    """Attend like an attachment: [1, R, Hq, Dv]."""
    if isinstance(method.selector, AttendingSelector):
        return method.selector.attend(rows, v, indices)
    coefficients = method.selector.remainder(rows.layer) if method.remainder else None  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    left_out = None
    if coefficients is not None:  # None for layers whose remainder was dropped
        coefficients = coefficients.to(rows.q.device)  # a hasher stays where it was loaded
        mean_keys = rows.k.double().cumsum(2)[:, :, total - 1].div(total[None, None, :, None]).float()
        values = linear_values(rows.q, rows.k, v, total - 1, coefficients[:, -1] * rows.scaling)
        left_out = LeftOut(coefficients[:, :-1], mean_keys, values, total[None].expand(len(rows.q), -1))
    options: Any = {"softcap": rows.softcap, "sinks": rows.sinks, "left_out": left_out, "values": share}
    return attend(rows.q, rows.k, v, indices, rows.scaling, **options)


def _dropped(method: LoadedMethod, layers: int) -> list[int]:
    """Return the layers whose remainder training dropped, because it cost more than it gave."""
    found = method.selector.remainder  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    return [layer for layer in range(layers) if found(layer) is None]


def _rows(command: OutputErrorCommand, ready: Ready, cells: list[Cell], samples: list[Sample]) -> Iterator[Row]:
    """Yield the mean over sparse layers, and each layer."""
    row = rows_of(command, ready, "rows", len(samples))
    for i, cell in enumerate(cells):
        values = np.array([sample["cells"][i][METRIC] for sample in samples])  # [documents, layers]
        at = {"budget": cell.budget, "rule": "visible", "density": mean_density(samples, i)}
        for place, estimate in by_place(values, command.always.sparse(values.shape[1]), command.seed):
            yield row(cell.method, METRIC, estimate, **place, **at)
