"""The table of the attention output's error, from stored `output-error` runs."""

import pathlib

from evals.grid import Grid, to_markdown
from evals.methods import REMAINDER
from evals.result import Result, Row
from sparse_decode import Budget
from sparse_decode.costs.traffic import step_bytes

from readme_tables.headline import SECOND_MODEL
from readme_tables.stored import load

HEAD_DIM = 64  # of both models
RUNS = {"demo model": ("errors_demo", "errors_demo_values"), SECOND_MODEL: ("errors_smol", "errors_smol_values")}
"""Stored runs by model: plain, and with a shortlist and fewer values."""


def errors(names: dict[str, tuple[str, ...]], results: pathlib.Path) -> str:
    """Return the table of stored runs, by model."""
    found = {subject: [load(results / f"{name}.json") for name in runs] for subject, runs in names.items()}
    sections = [[[subject, *line] for run in runs for line in _lines(run)] for subject, runs in found.items()]
    counts = ", ".join(f"{runs[0].config['documents']} contexts of {subject}" for subject, runs in found.items())
    title = (
        "Relative error of the attention output, mean over layers and over rows drawn from the last three quarters "
        f"of a context, with the inputs of dense attention in every layer; {counts}; bytes as in the table above, "
        "at the end of the context"
    )
    header = [
        "model",
        "method",
        "tokens read, shortlist, values",
        "bytes",
        "error [95 % interval]",
        "largest, in layer",
    ]
    return to_markdown(Grid(title, header, sections))


def _lines(result: Result) -> list[list[str]]:
    """Return a line for each method and budget: name, settings, bytes, mean, and the worst layer."""
    config, found = result.config, [row for row in result.rows if row.metric == "error"]
    lines = []
    for whole in (row for row in found if row.layer is None):
        worst = max((row for row in found if row.layer is not None and _cell(row) == _cell(whole)), key=_value)
        coded = whole.method not in ("oracle", "recent")
        shortlist, values = (config.get("shortlist"), config.get("values", 1.0)) if coded else (None, 1.0)
        assert whole.budget is not None  # every row of this task has one
        budget = Budget(whole.budget, shortlist=shortlist, values=values)
        share = step_bytes(config["context"], budget, HEAD_DIM, whole.bits or 0, whole.method.endswith(REMAINDER)).share
        settings = f"{100 * whole.budget:g} %, {shortlist or 'none'}, {values:.3g}"
        mean = f"{whole.value:.4f} [{whole.low:.4f}, {whole.high:.4f}]"
        lines.append([whole.method, settings, f"{100 * share:.1f} %", mean, f"{worst.value:.3f}, {worst.layer}"])
    return lines


def _cell(row: Row) -> tuple[str, float | None]:
    return row.method, row.budget


def _value(row: Row) -> float:
    return row.value
