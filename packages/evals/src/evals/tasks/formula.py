"""What the tasks share that compute and do not measure."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from evals.commands import ShapeCommand
from evals.result import Result, Row, versions
from evals.runner import RunFolder, environment_of
from evals.setup import store

PHASE = "formula"


def formula_row(task: str, method: str, metric: str, value: float, **more: Any) -> Row:
    """Build a row of a computed number: no documents, no interval."""
    facts = {"variant": method, "bits": None, "budget": None, "rule": "visible", "density": None}
    fixed = {"dense_layers": 0, "sink": 0, "recent": 0, "phase": PHASE, "low": None, "high": None, "n": 0, "seed": 0}
    return Row(task=task, method=method, metric=metric, value=float(value), versions=versions(), **facts | fixed | more)


def store_formula(command: ShapeCommand, task: str, rows: list[Row], console: Console) -> Result:
    """Write a computed result as a measured one is written. Raises: ValueError if the folder holds something else."""
    settings = command.settings(task)
    RunFolder(command.out, settings).renew()
    result = Result(settings, environment_of(command.out), rows)
    return store(command.out, result, console)
