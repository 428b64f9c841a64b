"""Codes of 16 bytes a key beside each other: what each finds of the exact attention, on the same queries and keys.

A code ranks keys in two ways: the scores of a group's query heads `added`, as deployed (one search), or the softmax of
each head's scores added `by head` (one search per head). Quantisers are fitted on contexts that are not scored.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from hashtrain import Hasher
from hashtrain.config import SINK
from hashtrain.data.capture import observe
from hashtrain.data.corpus import python_sources
from hashtrain.evaluation.metrics import best, quality, reading
from hashtrain.training.target import always_read, attention, top_count
from rich.console import Console
from sparse_decode import HashSelector
from torch import Tensor
from transformers import PreTrainedModel

from evals.base_commands import Always
from evals.codes import require_usable
from evals.codes.base import BYTES
from evals.codes.fit import EXACT, Fitted, fit
from evals.codes.scores import probabilities
from evals.commands import CodesCommand
from evals.documents import TokenDocument, load_documents
from evals.methods import LoadedMethod
from evals.metrics import Estimate, bootstrap, by_place
from evals.result import Result, Row
from evals.runner import require_numbers
from evals.setup import Ready, Sample, drawn_rows, each_document, finish, mean_density, prepare, require_cells, rows_of
from evals.tasks.iou import by_layer

ADDED, BY_HEAD = "added", "by head"
WAYS = (ADDED, BY_HEAD)
METRICS = ("iou", "mass", "low")
"""Of samples, by layer and head; `low`: the 5th percentile of the rows' mass."""
WORST = "worst"
"""Of rows: `low` of the KV head where it is least."""
OURS = "transform"


class Cell(NamedTuple):
    """A code, a budget, and how a group's heads are combined."""

    method: str
    budget: float
    where: str


def run(command: CodesCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    ready = prepare(command, "codes", console)
    hashers = hashers_of(ready.methods)
    training = load_documents(
        command.training_text, ready.tokenizer, command.context, command.training_contexts, command.seed, python_sources
    )
    require_apart(training, ready.documents)
    head_dims = {ready.shape.at(layer).head_dim for layer in range(ready.shape.num_layers)}
    keys = len(training) * min(command.training_keys, command.context - SINK)
    require_usable(command.codes, sorted(head_dims), keys)
    named = (EXACT, *hashers, *command.codes)
    ready = replace(
        ready,
        methods=[*ready.methods, *(LoadedMethod(name, name, 8 * BYTES, name, None, None) for name in command.codes)],
        settings={**ready.settings, "training": [document.digest for document in training]},
    )
    cells = [Cell(name, budget, way) for budget in command.budgets for way in WAYS for name in named]

    @functools.cache
    def fitted() -> dict[str, Fitted]:  # not before a sample is missing
        contexts = [document.ids for document in training]
        console.print(f"fitting codes on {len(contexts)} contexts", highlight=False)
        return fit(ready.model, contexts, command.training_keys, command.codes, hashers, command.seed)

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        positions = drawn_rows(command, command.rows, number)
        found = measure(ready.model, document.ids, positions, fitted(), command.budgets, command.always)
        step("selections")
        return {"cells": [{**cell._asdict(), **found[cell]} for cell in cells]}

    def check(sample: Sample) -> None:
        require_cells(sample, cells, ("density",), "codes or budgets")
        for cell in sample["cells"]:
            require_numbers(cell, METRICS, ready.shape.num_layers, ready.shape.num_kv_heads)

    samples = each_document(command, ready, console, 1, check, compute)
    return finish(command, ready, list(_rows(command, ready, cells, samples)), console)


def hashers_of(methods: list[LoadedMethod]) -> dict[str, Hasher]:
    """Return the hashers of methods. Raises: ValueError if one does not store 16 bytes a key."""
    found: dict[str, Hasher] = {}
    for method in methods:
        selector = method.selector
        assert isinstance(selector, HashSelector)
        assert isinstance(selector.hasher, Hasher)
        if method.bits != 8 * BYTES:
            raise ValueError(
                f"codes compares {BYTES} bytes a key, {method.name} stores {method.bits} bits; leave it out of "
                f"--methods, or train it with --bits {8 * BYTES}"
            )
        found[method.name] = selector.hasher
    return found


def require_apart(training: list[TokenDocument], scored: Any) -> None:
    """Raise ValueError if a context is both fitted on and scored."""
    if both := {document.digest for document in training} & {document.digest for document in scored}:
        names = ", ".join(document.name for document in training if document.digest in both)
        raise ValueError(f"--training-text must hold no scored text, got {names} in both; give other text")


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    fitted: Mapping[str, Fitted],
    budgets: tuple[float, ...],
    always: Always,
) -> dict[Cell, dict[str, Any]]:
    """Compare what every code finds with the target, per KV head, on some rows of one context.

    Args: ids: int64 [T]; positions: the rows, int64 [R]; always: the tokens that every row reads.
    Returns: for each cell its `density`, and `METRICS` as [layer][head], means over the rows.
    """
    layers: dict[Cell, list[tuple[Any, Tensor]]] = {}
    positions = positions.to(model.device)
    ends = always_read(positions, len(ids), always.sink, always.recent)
    seen = torch.arange(len(ids), device=model.device) <= positions[:, None]

    def sink(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
        q = q[:, :, positions]
        p = attention(q, k, positions, scaling)
        for name, of in fitted.items():
            added, single = of.layers[layer](q, k)
            ways = {ADDED: added, BY_HEAD: probabilities(single, of.factors[layer].to(q.device), seen)}
            for budget in budgets:
                counts = top_count(positions + 1, budget)
                for way, scores in ways.items():
                    selected = best(scores, ~seen | ends, (counts - ends.sum(-1)).clamp(min=0))
                    density = reading(selected, ends).sum().double() / (seen.sum() * p.shape[1])
                    found = quality(p, selected, counts, ends), density
                    layers.setdefault(Cell(name, budget, way), []).append(found)

    observe(model, ids, sink)
    return {cell: by_layer(found) for cell, found in layers.items()}


def _rows(command: CodesCommand, ready: Ready, cells: list[Cell], samples: list[Sample]) -> Iterator[Row]:
    """Yield the mean over sparse layers and each layer, and the difference of ours and each other code, paired."""
    row = rows_of(command, ready, "rows", len(samples))
    sparse = command.always.sparse(ready.shape.num_layers)
    means: dict[Cell, dict[str, np.ndarray]] = {}
    for i, cell in enumerate(cells):
        at = {"budget": cell.budget, "rule": "visible", "where": cell.where, "heads": "kv_head"}
        at["density"] = mean_density(samples, i)
        values = {m: np.array([sample["cells"][i][m] for sample in samples]) for m in METRICS}  # [documents, L, H]
        means[cell] = {metric: values[metric][:, sparse].mean((1, 2)) for metric in ("iou", "mass")}
        for metric in ("iou", "mass"):
            for place, estimate in by_place(values[metric].mean(2), sparse, command.seed):
                yield row(cell.method, metric, estimate, **place, **at)
        for layer, among in ((None, sparse), *((n, [n]) for n in range(ready.shape.num_layers))):
            yield row(cell.method, WORST, worst(values["low"][:, among], command.seed), layer=layer, **at)
    for cell, found in means.items():
        ours = means.get(cell._replace(method=OURS))
        if ours is None or cell.method == OURS:
            continue
        at = {"budget": cell.budget, "rule": "visible", "density": None, "where": cell.where, "heads": "kv_head"}
        for metric, values in found.items():
            (estimate,) = bootstrap((ours[metric] - values)[:, None], command.seed)
            yield row(OURS, metric, estimate, against=cell.method, **at)


def worst(low: np.ndarray, seed: int) -> Estimate:
    """Return the least mean of a head over documents, of low [documents, layers, heads], and its interval."""
    heads = low.reshape(len(low), -1)
    return bootstrap(heads[:, [heads.mean(0).argmin()]], seed)[0]
