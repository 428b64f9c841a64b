"""Tasks that compute by formula (`evals.costs`), and the rows of numbers that no document was measured for."""

from collections.abc import Sequence
from typing import Any

from hashtrain.training.target import top_count
from rich.console import Console

from evals.commands import CodesizeCommand, ComplexityCommand, ShapeCommand
from evals.costs import Cost, dense_step, kept_bytes, kv_bytes, sparse_step
from evals.methods import DENSE
from evals.result import Result, Row, versions
from evals.runner import RunFolder, environment_of
from evals.setup import store
from evals.shapes import load_config, shape_of


def formula_row(task: str, method: str, metric: str, value: float, **more: Any) -> Row:
    """Return a row of a computed number: no documents, no interval."""
    columns = {"variant": method, "bits": None, "budget": None, "rule": "visible", "density": None, "n": 0, "seed": 0}
    columns |= {"dense_layers": 0, "sink": 0, "recent": 0, "phase": "formula", "low": None, "high": None}
    return Row(task=task, method=method, metric=metric, value=float(value), versions=versions(), **columns | more)


def open_run(command: ShapeCommand, task: str, device: str = "cpu") -> dict[str, Any]:
    """Create the run's folder and return its settings. Raises: ValueError if it holds something else."""
    settings = command.settings(task)
    RunFolder(command.out, settings, device).renew()
    return settings


def store_rows(command: ShapeCommand, settings: dict[str, Any], rows: Sequence[Row], console: Console) -> Result:
    """Store rows like those of documents. A second run computes and measures all of them again."""
    return store(command.out, Result(settings, environment_of(command.out), list(rows)), console)


def codesize(command: CodesizeCommand, console: Console) -> Result:
    """Compute the bytes that each method stores per token and KV head. Raises: ValueError if there is no such shape."""
    shape = shape_of(load_config(command.shape))
    rows = []
    for method, size in kept_bytes(shape, command.bits).items():
        for metric, value in (("bytes_per_token", size), ("share_of_kv", size / kv_bytes(shape))):
            rows.append(formula_row("codesize", method, metric, value, bits=round(8 * size)))
    return store_rows(command, open_run(command, "codesize"), rows, console)


def complexity(command: ComplexityCommand, console: Console) -> Result:
    """Compute operations and bytes of a decode step of one layer. Raises: ValueError if there is no such shape."""
    shape = shape_of(load_config(command.shape))
    rows: list[Row] = []

    def add(n: int, step: str, method: str, cost: Cost, dense: Cost) -> None:
        shared = {"where": f"{n} tokens, {step}", "budget": None if method == DENSE else command.budget}
        of_dense = cost.bytes / dense.bytes
        for metric, value in (("operations", cost.operations), ("bytes", cost.bytes), ("bytes_of_dense", of_dense)):
            rows.append(formula_row("complexity", method, metric, value, **shared))

    for n in command.contexts:
        dense = dense_step(shape, n)
        steps = sparse_step(shape, n, top_count(n, command.budget), command.bits, command.planes, command.hidden)
        for step, cost in steps.items():
            add(n, step, "planes", cost, dense)
        whole = Cost(sum(c.operations for c in steps.values()), sum(c.bytes for c in steps.values()))
        add(n, "all steps", "planes", whole, dense)
        add(n, "attention", DENSE, dense, dense)
    return store_rows(command, open_run(command, "complexity"), rows, console)
