"""Run a task of lm-evaluation-harness with each method, and collect the results."""

import math
from collections.abc import Callable
from typing import Any, TypeGuard, cast

from lm_eval.evaluator import evaluate
from sparse_decode import Budget

from evals.harness.adapter import SparseLM
from evals.harness.load import BenchmarkTask, as_guest
from evals.methods import LoadedMethod
from evals.setup import Ready, Sample
from evals.tasks.benchmark_settings import BenchmarkCommand

Cell = tuple[str, float | None, str]
"""Method, budget and rule."""

_RESAMPLES = 1000
"""Resamples for the few metrics whose standard error lm-evaluation-harness bootstraps; that of a mean is exact."""
_NOT_ASKED = -1
"""Value of RULER's metrics for the lengths that an item does not have."""


def budget_of(rule: str, amount: float | None) -> Budget:
    """Return the budget of a cell: a number of tokens, or a share of the visible ones (eq. 7); dense has none."""
    if rule == "tokens":
        return Budget(min_tokens=int(amount or 0), max_tokens=int(amount or 0))
    return Budget(amount or 1.0, min_tokens=1)


def measure(
    document: BenchmarkTask,
    command: BenchmarkCommand,
    ready: Ready,
    cells: list[Cell],
    methods: dict[str, LoadedMethod],
    step: Callable[[str], None],
) -> Sample:
    """Run one task for every cell.

    Returns: `cells`, in order, with method, budget, rule, density, `results` {metric: [value, standard error or
        None]}, `values` {metric: one number per item} where available, and `texts`, the generated text.
    """
    found, items = [], None
    for method, amount, rule in cells:
        how: dict[str, Any] = {
            "always": command.always,
            "sparse_rows": command.rows,
            "batch_size": command.batch_size,
            "max_length": command.max_length,
            "truncation_side": command.truncation,
        }
        asked = {**document.items(command), "apply_chat_template": command.has_template(document.name)}
        with as_guest(command.seed):
            lm = SparseLM(ready.model, ready.tokenizer, methods[method], budget_of(rule, amount), **how)
            document.task.set_fewshot_seed(command.seed)  # the same worked examples, whatever ran before
            tasks: Any = {"tasks": {document.name: document.task}, "groups": {}, "group_map": {}}
            output = cast(Any, evaluate(cast(Any, lm), tasks, **asked, bootstrap_iters=_RESAMPLES))
        if output is None:
            raise ValueError("lm-evaluation-harness returned nothing: expected a single process, not one of several")
        if lm.method.selector is not None and not lm.attended.visible:
            raise ValueError(f"`{method}` attended in no row: expected a request")
        items = output["samples"][document.name]
        found.append(
            {
                **{"method": method, "budget": amount, "rule": rule, "task": document.name},
                "density": lm.attended.density,
                "results": _results(dict(output["results"][document.name])),
                "values": _values(items),
                "texts": _texts(items) if document.task.OUTPUT_TYPE == "generate_until" else [],
            }
        )
        step(f"{method}{'' if amount is None else f', {amount:g}'}")
    assert items is not None
    return {"items": len({item["doc_id"] for item in items}), "cells": found}


def _results(found: dict[str, Any]) -> dict[str, list[float | None]]:
    """Convert `{"acc,none": 0.5, "acc_stderr,none": 0.1}` to `{"acc": [0.5, 0.1]}`."""
    read: dict[str, list[float | None]] = {}
    for key, value in found.items():
        metric, comma, filtered = key.partition(",")
        if comma and not metric.endswith("_stderr") and value != _NOT_ASKED:
            error = found.get(f"{metric}_stderr,{filtered}")
            read[_named(metric, filtered)] = [float(value), float(error) if _is_number(error) else None]
    return read


def _values(items: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Collect each metric's values, one per item, in order; metrics of the whole task have none."""
    read: dict[str, list[float]] = {}
    for item in sorted(items, key=lambda item: item["doc_id"]):
        for metric in item["metrics"]:
            if _is_number(item[metric]) and item[metric] != _NOT_ASKED:
                read.setdefault(_named(metric, item["filter"]), []).append(float(item[metric]))
    return read


def _texts(items: list[dict[str, Any]]) -> list[str]:
    """Return the text generated for each item; the harness lists an item once for every filter of its task."""
    by_item = {item["doc_id"]: str(item["resps"][0][0]) for item in items}
    return [by_item[number] for number in sorted(by_item)]


def _named(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric} ({filtered})"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
