"""Shared parts of the timing tasks: settings, rows and storing."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from evals.metrics import Estimate
from evals.result import Result, Row
from evals.runner import RunFolder, environment_of
from evals.setup import store
from evals.speed import SpeedCommand
from evals.tasks.formula import formula_row
from evals.timing import read_bandwidth


def open_run(command: SpeedCommand, task: str) -> dict[str, Any]:
    """Create the run's folder and return its settings. Raises: ValueError if it holds something else."""
    settings = command.settings(task)
    RunFolder(command.out, settings, command.device).renew()
    return settings


def bandwidth_of(command: SpeedCommand) -> float:
    """Return the memory bandwidth in bytes per second, as given or measured now."""
    return command.bandwidth * 1e9 if command.bandwidth is not None else read_bandwidth(command.device)


def timed_row(command: SpeedCommand, task: str, method: str, metric: str, found: Estimate, **more: Any) -> Row:
    """Return a row of a measured time; n is the number of repeats."""
    interval = {"low": found.low, "high": found.high, "phase": "decode", "n": command.repeats, "seed": command.seed}
    return formula_row(task, method, metric, found.mean, **interval | more)


def store_times(command: SpeedCommand, settings: dict[str, Any], rows: list[Row], console: Console) -> Result:
    """Store a timing result. A second run measures everything again: timings are not resumed."""
    return store(command.out, Result(settings, environment_of(command.out), rows), console)
