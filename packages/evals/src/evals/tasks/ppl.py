"""Perplexity and divergence from dense attention, in one forward pass per method, with rows sparse from row n on: n = 0
is sparse everywhere, n = the prompt's length is token-by-token decoding after a dense prefill.

A document is one context. The logits of its scored rows are kept in the model's own type, dense and of one method at a
time; float32 log-probabilities are computed for a few rows at a time.
"""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from hashtrain import top_count
from hashtrain.run.recipes import EXACT
from rich.console import Console
from sparse_decode import Budget, attach
from sparse_decode.budget import LayerBudget
from sparse_decode.prompt import CHUNK, suits_chunks
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from evals.attending import attending
from evals.documents import TokenDocument
from evals.methods import DENSE, OURS, LoadedMethod, in_table
from evals.metrics import Estimate, mean_estimates, mean_kl, token_losses
from evals.results import Result, Row
from evals.settings import Always, Phase, Prompt
from evals.setup import Ready, Sample, each_document, finish, load_with_documents, rows_of
from evals.tasks.settings import PplCommand, scored_by_default

PAPER_MIN_TOKENS = 20
AS = "as "


class Cell(NamedTuple):
    """One forward pass to compare with dense attention.

    A rule `as NAME` takes as many tokens as that method took on the same context, at the same budget and first rule.
    """

    method: str
    rule: str
    budget: float

    @property
    def rival(self) -> str | None:
        """The method whose density is matched, if any."""
        return self.rule.removeprefix(AS) if self.rule.startswith(AS) else None


def cells_of(command: PplCommand, names: list[str]) -> list[Cell]:
    """Return every forward pass of a command; a method to match comes before those that match it."""
    own = [Cell(name, rule, budget) for budget in command.budgets for rule in command.rules for name in names]
    ours = [name for name in names if in_table(name) in OURS]
    return own + [Cell(n, AS + rival, b) for b in command.budgets for rival in command.match for n in ours]


def budget_of(rule: str, fraction: float, length: int, beside: int = 0) -> Budget:
    """Return the budget of a rule (eq. 7) for a context of `length` tokens.

    Args: beside: tokens added to the budget of the `fixed` rule, which is the same for every row of a context.
    """
    if rule == "fixed":
        count = top_count(length, min(1.0, fraction + beside / length), PAPER_MIN_TOKENS + beside)
        return LayerBudget(min_tokens=count, max_tokens=count)
    return Budget(fraction, min_tokens=1)


def run(command: PplCommand, console: Console) -> Result:
    """Run the task: see `evals.tasks`."""
    ready = load_with_documents(command, "ppl", console)
    cells = cells_of(command, [method.name for method in ready.methods if method.selector])
    methods = {method.name: method for method in ready.methods}

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        return measure(ready.model, document.ids, cells, methods, command.always, step, command.phase, command.last)

    samples = each_document(command, ready, console, 1 + len(cells), compute)
    return finish(command, ready, list(_rows(command, ready, cells, samples)), console)


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    ids: Tensor,
    cells: list[Cell],
    methods: dict[str, LoadedMethod],
    always: Always,
    step: Callable[[str], None] = lambda doing: None,
    phase: Phase = "everywhere",
    scored: int | None = None,
) -> dict[str, Any]:
    """Score the last tokens of one context by each cell and by dense attention.

    Args:
        ids: int64 [T]; scored: number of last tokens to score; None: `scored_by_default`.
        phase: which rows are sparse: all, or those after a dense prompt.
    Returns: `dense` {nll} and `cells`, in order, with nll and kl (nats per token) and density; for methods
        that sample also `empty`, the share of sampled rows and heads that drew nothing.
    """
    scored = scored_by_default(len(ids)) if scored is None else scored
    targets = ids[-scored:].to(model.device)
    prompt = None if phase == "everywhere" else len(ids) - scored - 1  # the next row predicts the first scored token
    cache = None if prompt is None else prefilled(model, ids[:prompt])
    reference = scored_logits(model, ids, scored, cache)
    dense = {"nll": _loss(reference, targets, f"the model in {model.dtype}")}
    step(DENSE)
    dense_ones = set[int]().union(*(getattr(methods[cell.method].selector, "dense_layers", ()) for cell in cells))
    if prompt is not None and always.prompt == "sparse":
        cache = prefilled(model, ids[:prompt], "sparse", always.dense | dense_ones)  # the same for every cell
    if any(cell.rival for cell in cells):  # as many tokens in all layers, too
        always = always._replace(dense_at=(*always.dense_at, *dense_ones))
    found = []
    for cell in cells:
        fraction = cell.budget
        if cell.rival:  # as much as it selected on this context, in rows of which it does not read all
            fraction = next(x["density"] for x in found if (x["method"], x["budget"]) == (cell.rival, cell.budget))
            if prompt is None:
                fraction = beyond_dense_rows(fraction, methods[cell.rival].selector, len(ids))
        budget = budget_of(cell.rule, fraction, len(ids), always.beside * (always.sink + always.recent))
        with attending(model, methods[cell.method], budget, always, prompt) as attended:
            other = scored_logits(model, ids, scored, cache)
        nll = _loss(other, targets, cell.method)
        measured = {"nll": nll, "kl": mean_kl(reference, other), "density": attended.density}
        empty = {} if attended.empty is None else {"empty": attended.empty}
        found.append({**cell._asdict(), **measured, **empty})
        step(f"{cell.method}, {100 * cell.budget:g} %, {cell.rule}")
    return {"dense": dense, "cells": found}


def _loss(logits: Tensor, targets: Tensor, whose: str) -> float:
    """Return the mean loss. Raises: ValueError if it is not finite."""
    found = token_losses(logits, targets).mean().item()
    if not math.isfinite(found):
        raise ValueError(f"{whose} gives a loss of {found}, expected a number; try --dtype float32")
    return found


def beyond_dense_rows(density: float, selector: Any, tokens: int) -> float:
    """Return what a method reads in the rows after its dense first ones, as a share of the tokens visible there.

    Args: density: over all rows of a context; selector: its `dense_rows`, if it has them, see all; tokens: its length.
    """
    whole = min(getattr(selector, "dense_rows", 0), tokens)
    dense = whole * (whole + 1) / (tokens * (tokens + 1))
    return (density - dense) / (1 - dense) if dense < 1 else 1.0


def prefilled(model: PreTrainedModel, prompt: Tensor, how: Prompt = "exact", dense: Collection[int] = ()) -> Cache:
    """Prefill a prompt, int64 [T], as an attached model does, and return the cache.

    Args: dense: layers that stay exact in a sparse prompt.
    """
    cache = DynamicCache(config=model.config)
    size = CHUNK if suits_chunks(model, cache) else max(1, len(prompt))
    with attach(model, prompt=how, dense_layers=dense):
        for chunk in prompt.to(model.device)[None].split(size, 1):
            model(chunk, past_key_values=cache, logits_to_keep=1)
    if not getattr(cache, "is_croppable", True):  # since transformers 5.19
        raise ValueError(f"{type(model).__name__} has a state that methods cannot share; leave out --phase decode")
    cache.activate_past_recording()  # so that sliding windows can be cropped
    return cache


def scored_logits(model: PreTrainedModel, ids: Tensor, scored: int, cache: Cache | None = None) -> Tensor:
    """Return the logits of the rows that predict the last `scored` tokens, [scored, V], in the model's type.

    Args: cache: of the tokens before the first of these rows, which are then not recomputed; it is left unchanged.
    """
    rows = scored + 1
    given = (ids if cache is None else ids[-rows:])[None].to(model.device)
    out = model(given, past_key_values=cache, use_cache=cache is not None, logits_to_keep=rows)
    if cache is not None:
        cache.crop(-rows)
    return out.logits[0, -rows:-1]


def _rows(command: PplCommand, ready: Ready, cells: list[Cell], samples: list[Sample]) -> Iterator[Row]:
    """Convert samples to rows: each method's own numbers, then the paired differences."""
    build = rows_of(command, ready, command.phase, len(samples))
    dense = [sample["dense"]["nll"] for sample in samples]
    of = {cell: [sample["cells"][i] for sample in samples] for i, cell in enumerate(cells)}
    n = len(samples)

    def row(cell: Cell, metric: str, estimate: Estimate, **more: Any) -> Row:
        if cell in of:
            density = sum(sample["density"] for sample in of[cell]) / n
            more |= {"budget": cell.budget, "rule": cell.rule, "density": density}
        return build(cell.method, metric, estimate, **more)

    def single(cell: Cell, nll: list[float], kl: list[float]) -> Iterator[Row]:
        excess = [a - b for a, b in zip(nll, dense, strict=True)]
        loss, divergence, over = mean_estimates(list(zip(nll, kl, excess, strict=True)), (-math.inf, 0, -math.inf))
        yield row(cell, "nll", loss)
        yield row(cell, "kl", divergence)
        yield row(cell, "perplexity", _exp(loss))  # all contexts have the same number of scored tokens
        yield row(cell, "perplexity_ratio", _exp(over))

    yield from single(Cell(DENSE, "visible", 1.0), dense, [0.0] * n)
    for cell, found in of.items():
        yield from single(cell, *([s[name] for s in found] for name in ("nll", "kl")))
        if "empty" in found[0]:
            yield row(cell, "empty", *mean_estimates([[s["empty"]] for s in found], 0, 1))
    for cell, other in _pairs(cells):
        differences = [[a["kl"] - b["kl"], a["nll"] - b["nll"]] for a, b in zip(of[cell], of[other], strict=True)]
        for metric, estimate in zip(("kl", "nll"), mean_estimates(differences), strict=True):
            yield row(cell, metric, estimate, against=other.method)


def _exp(estimate: Estimate) -> Estimate:
    return Estimate(*(None if end is None else math.exp(end) for end in estimate))  # pyright: ignore[reportArgumentType]


def _pairs(cells: list[Cell]) -> Iterator[tuple[Cell, Cell]]:
    """Pair each of our methods with every other, at the same rule and budget.

    If there is none: each hasher of the paper's exact setup; if there is none either, the last method.
    """
    names = {cell.method for cell in cells}
    exact = {recipe.name for recipe in EXACT}
    ours = {name for name in names if in_table(name) in OURS} or {name for name in names if in_table(name) in exact}
    ours = ours or {cell.method for cell in cells[-1:]}
    for cell in (cell for cell in cells if cell.method in ours):
        for other in (other for other in cells if other.method != cell.method):
            matched = (c for c in cells if c.method == other.method and c.budget == cell.budget)
            if other == next(matched) if cell.rival == other.method else other[1:] == cell[1:]:
                yield cell, other
