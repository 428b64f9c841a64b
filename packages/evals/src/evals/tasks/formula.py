"""Shared parts of the tasks that compute by formula."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from evals.commands import ShapeCommand
from evals.result import Result, Row, versions
from evals.runner import RunFolder, environment_of
from evals.setup import store

PHASE = "formula"


def formula_row(task: str, method: str, metric: str, value: float, **more: Any) -> Row:
    """Return a row of a computed number: no documents, no interval."""
    columns = {"variant": method, "bits": None, "budget": None, "rule": "visible", "density": None}
    columns |= {"dense_layers": 0, "sink": 0, "recent": 0, "phase": PHASE, "low": None, "high": None, "n": 0, "seed": 0}
    return Row(task=task, method=method, metric=metric, value=float(value), versions=versions(), **columns | more)


def store_formula(command: ShapeCommand, task: str, rows: list[Row], console: Console) -> Result:
    """Store a computed result like a measured one. Raises: ValueError if the folder holds something else."""
    settings = command.settings(task)
    RunFolder(command.out, settings).renew()
    result = Result(settings, environment_of(command.out), rows)
    return store(command.out, result, console)
