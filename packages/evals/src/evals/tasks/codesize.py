"""Bytes that each method stores per token and KV head."""

from __future__ import annotations

from rich.console import Console

from evals.commands import CodesizeCommand
from evals.costs import kept_bytes, kv_bytes
from evals.result import Result
from evals.shapes import load_config, shape_of
from evals.tasks.formula import formula_row, store_formula


def run(command: CodesizeCommand, console: Console) -> Result:
    """Compute the sizes and store them below `command.out`. Raises: ValueError if there is no such shape."""
    shape = shape_of(load_config(command.shape))
    rows = []
    for method, size in kept_bytes(shape, command.bits).items():
        bits = round(8 * size)
        rows.append(formula_row("codesize", method, "bytes_per_token", size, bits=bits))
        rows.append(formula_row("codesize", method, "share_of_kv", size / kv_bytes(shape), bits=bits))
    return store_formula(command, "codesize", rows, console)
