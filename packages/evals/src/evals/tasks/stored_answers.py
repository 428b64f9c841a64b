"""Fidelity of stored answers: compare those of each method with dense attention's, task by task.

The answers are those that `evals longbench` has stored, so no model runs (the paper's tables 4 and figure 11).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from evals.commands import FidelityCommand
from evals.methods import DENSE
from evals.metrics import bootstrap
from evals.result import Result, Row, as_written, read_json, read_result
from evals.runner import RunFolder, environment_of
from evals.setup import store
from evals.text import edit_similarity, rouge_l

METRICS = {"rouge_l": rouge_l, "edit_similarity": edit_similarity}
_NORMAL = 1.959964  # two-sided 95 %


def of_stored(command: FidelityCommand, run: Path, console: Console) -> Result:
    """Compare the answers of a finished run of a benchmark, and store the result below `command.out`.

    Raises: ValueError, before anything is written, if the folder holds no such run, or one without answers.
    """
    source = read_result(run)
    paths = sorted((run / "samples").glob("*.json"))
    with as_written(str(run)):
        found = [cell for path in paths for cell in read_json(path, "rerun the command that made it")["cells"]]
        answered = [cell for cell in found if cell["texts"]]
    if not answered:
        raise ValueError(f"{run} holds no answers: expected a run of longbench, got one of {source.config['task']}")
    with as_written(str(run)):
        rows = [*_rows(command, source, answered)]
        rows += _means(rows)
    settings = {**source.config, "task": "fidelity", "compared": source.config["task"], "seed": command.seed}
    folder = RunFolder(command.out, settings)
    folder.renew(environment_of(run))
    return store(command.out, Result(settings, source.environment, rows), console)


def _rows(command: FidelityCommand, source: Result, cells: list[dict[str, Any]]) -> Iterator[Row]:
    """Yield each metric's mean over the answers of one task, for each method and budget."""
    dense = {cell["task"]: cell["texts"] for cell in cells if cell["method"] == DENSE}
    for cell in (cell for cell in cells if cell["method"] != DENSE):
        pairs = list(zip(dense[cell["task"]], cell["texts"], strict=True))
        at = {"where": cell["task"], "method": cell["method"], "budget": cell["budget"]}
        like = next(row for row in source.rows if all(getattr(row, name) == value for name, value in at.items()))
        values = [[measure(*pair) for measure in METRICS.values()] for pair in pairs]
        errors = np.std(values, axis=0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else [None] * len(METRICS)
        for name, estimate, error in zip(METRICS, bootstrap(values, command.seed), errors, strict=True):
            shown = {"value": estimate.mean, "low": estimate.low, "high": estimate.high, "n": len(pairs)}
            yield replace(like, task="fidelity", metric=name, stderr=None if error is None else float(error), **shown)


def _means(rows: list[Row]) -> Iterator[Row]:
    """Yield plain means over tasks."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, row.budget, row.metric), []).append(row)
    for found in (group for group in groups.values() if len(group) > 1):
        mean = sum(row.value for row in found) / len(found)
        errors = [row.stderr for row in found if row.stderr is not None]
        error = math.hypot(*errors) / len(found) if len(errors) == len(found) else None
        half = None if error is None else _NORMAL * error
        more = {"low": None if half is None else mean - half, "high": None if half is None else mean + half}
        where = f"mean of {len(found)} tasks"
        density = sum(row.density or 0.0 for row in found) / len(found)
        n = sum(row.n for row in found)
        yield replace(found[0], where=where, value=mean, stderr=error, n=n, density=density, **more)
