"""The table of the attention output's error by layer, from stored `output-error` runs."""

import pathlib
from collections.abc import Callable

from evals.grid import Grid, to_markdown
from evals.result import Result, Row
from sparse_decode import Budget
from sparse_decode.traffic import step_bytes

from readme_tables.headline import SECOND_MODEL
from readme_tables.stored import load

HEAD_DIM = 64  # of both models
SUFFIX = "+remainder"
RUNS = {
    "demo model": ("errors_demo", "errors_demo_list", "errors_demo_values"),
    SECOND_MODEL: ("errors_smol", "errors_smol_values"),
}
"""Stored runs by model: plain, with a shortlist, and with a shortlist and fewer values."""


def errors(names: dict[str, tuple[str, ...]]) -> Callable[[pathlib.Path], str]:
    """Return a function for the table of stored runs, by model."""

    def table(results: pathlib.Path) -> str:
        sections, wide = [], 0
        for subject, runs in names.items():
            lines = [line for name in runs for line in _lines(load(results / f"{name}.json"))]
            wide = max(wide, *(len(line) for line in lines))
            sections.append([[subject, *line] for line in lines])
        for line in (line for section in sections for line in section):
            line += [""] * (wide + 1 - len(line))
        title = (
            "Relative error of the attention output, mean over rows drawn from the last three quarters of a context, "
            "with the inputs of dense attention in every layer; bytes as in the table above, at the end of the "
            "context. `*`: a layer whose remainder was dropped in training"
        )
        layers = [str(layer) for layer in range(wide - 4)]
        header = ["model", "method", "tokens read, list, values", "bytes", "all layers [95 % interval]", *layers]
        return to_markdown(Grid(title, header, sections))

    return table


def _lines(result: Result) -> list[list[str]]:
    """Return a line for each method and budget: name, settings, bytes, mean, and the error of each layer."""
    config, found = result.config, [row for row in result.rows if row.metric == "error"]
    lines = []
    for whole in (row for row in found if row.layer is None):
        own = [row for row in found if row.layer is not None and _cell(row) == _cell(whole)]
        dropped = config.get("without_remainder", {}).get(whole.method, [])
        coded = whole.method not in ("oracle", "recent")
        shortlist, values = (config.get("shortlist"), config.get("values", 1.0)) if coded else (None, 1.0)
        assert whole.budget is not None  # every row of this task has one
        budget = Budget(whole.budget, shortlist=shortlist, values=values)
        bits, remainder = whole.bits or 0, whole.method.endswith(SUFFIX)
        share = step_bytes(config["context"], budget, HEAD_DIM, bits, remainder).share
        settings = f"{100 * whole.budget:g} %, {shortlist or 'none'}, {values:.3g}"
        mean = f"{whole.value:.4f} [{whole.low:.4f}, {whole.high:.4f}]"
        layers = [f"{row.value:.3f}{'*' * (row.layer in dropped)}" for row in sorted(own, key=_layer)]
        lines.append([whole.method, settings, f"{100 * share:.1f} %", mean, *layers])
    return lines


def _cell(row: Row) -> tuple[str, float | None]:
    return row.method, row.budget


def _layer(row: Row) -> int:
    return -1 if row.layer is None else row.layer
