"""Operations and bytes of one decode step of one layer, by formula (`evals.costs`)."""

from __future__ import annotations

from hashtrain.training.target import top_count
from rich.console import Console

from evals.commands import ComplexityCommand
from evals.costs import Cost, dense_step, sparse_step
from evals.methods import DENSE
from evals.result import Result, Row
from evals.shapes import load_config, shape_of
from evals.tasks.formula import formula_row, store_formula


def run(command: ComplexityCommand, console: Console) -> Result:
    """Compute the costs and store them below `command.out`. Raises: ValueError if there is no such shape."""
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
    return store_formula(command, "complexity", rows, console)
