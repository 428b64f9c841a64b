"""One pivot of a result's rows: tables as data, and their forms for a terminal and as Markdown."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hashtrain.config import RECENT, SINK
from rich.table import Table

from evals.methods import DENSE
from evals.results import Result, Row

SHOWN = {"ppl": ("perplexity", "perplexity_ratio", "kl"), "iou": ("iou", "recall", "mass", "low", "lost")}
"""By task, the metrics of its tables and figure; of other tasks, all."""
BY_LAYER = ("iou", "mass")
"""Metrics that a table shows layer by layer."""
HEADS = {"kv_head": "per KV head", "query_head": "per query head"}
PHASES = {"everywhere": "sparse everywhere", "decode": "after a dense prompt, the scored rows sparse"}
_NUMBER = re.compile(r"[-+<]?\d")


@dataclass(frozen=True)
class Grid:
    """A table: `sections` are groups of lines, each a list of cells."""

    title: str
    header: list[str]
    sections: list[list[list[str]]]

    @property
    def lines(self) -> list[list[str]]:
        """The lines of all sections."""
        return [line for section in self.sections for line in section]

    @property
    def text_columns(self) -> list[bool]:
        """For each column, whether it is aligned to the left: the first, and those that hold more than numbers."""
        cells = ([line[i] for line in self.lines if i < len(line) and line[i]] for i in range(len(self.header)))
        return [not i or not all(map(_NUMBER.match, column)) for i, column in enumerate(cells)]


def pivot(
    rows: Iterable[Row],
    section: Callable[[Row], Any],
    line: Callable[[Row], str],
    column: Callable[[Row], str],
    cell: Callable[[Row], str],
) -> tuple[list[str], list[list[list[str]]]]:
    """Arrange rows in sections, lines and columns, each in the order in which it first occurs.

    Returns: the names of the columns, and the sections of a `Grid`: labels, then cells, blank where there is no row.
    """
    found: dict[Any, dict[str, dict[str, str]]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        columns.setdefault(column(row))
        found.setdefault(section(row), {}).setdefault(line(row), {})[column(row)] = cell(row)
    names = list(columns)
    return names, [
        [[label, *(cells.get(name, "") for name in names)] for label, cells in of.items()] for of in found.values()
    ]


def grids(result: Result) -> list[Grid]:
    """Return the tables of a result: each method's numbers, differences between methods, and numbers by layer."""
    shown = SHOWN.get(result.config["task"])
    rows = [row for row in result.rows if row.head is None]
    whole = [r for r in rows if r.layer is None and r.against is None and (shown is None or r.metric in shown)]
    found = [_whole(result, whole)] if whole else []
    if paired := [row for row in rows if row.against is not None and row.low is not None]:
        names, sections = pivot(paired, _case, _label_of_pair, lambda row: row.metric, signed)
        title = f"Differences in nats, paired over documents; below 0 the first is closer to dense{_subject(result)}"
        found.append(Grid(title, ["case", *names], sections))
    layers = [row for row in rows if row.layer is not None and (shown is None or row.metric in BY_LAYER)]
    for key in dict.fromkeys((row.metric, *_case(row)) for row in layers):
        own = [row for row in layers if (row.metric, *_case(row)) == key]
        names, sections = pivot(own, lambda row: 0, lambda row: str(row.layer), lambda row: row.method, cell_of)
        title = ", ".join(part for part in (own[0].metric, _words(own[0])) if part) + _subject(result)
        found.append(Grid(title, ["layer", *names], sections))
    return found


def _whole(result: Result, rows: list[Row]) -> Grid:
    names, sections = pivot(rows, _case, _label, lambda row: row.metric, cell_of)
    _, density = pivot(rows, _case, _label, lambda row: "density", lambda row: percent(row.density or 0.0))
    for section, densities in zip(sections, density, strict=True):
        for line, (_, share) in zip(section, densities, strict=True):
            line.append(share)
    return Grid(f"`{result.config['task']}`{_subject(result)}", ["case", *names, "density"], sections)


def _case(row: Row) -> tuple[Any, ...]:
    return row.where, row.heads, row.rule, row.budget


def _words(row: Row) -> str:
    """Name a case: what else the numbers depend on, the budget and its rule."""
    rule = "" if row.rule in ("visible", "tokens", DENSE) else row.rule
    budget = "" if row.budget is None else amount(row.budget, row.rule)
    return ", ".join(part for part in (row.where, HEADS.get(row.heads or ""), budget, rule) if part)


def _label(row: Row) -> str:
    return ", ".join(part for part in (_words(row), row.method) if part)


def _label_of_pair(row: Row) -> str:
    return f"{_label(row)} - {row.against}"


def _subject(result: Result) -> str:
    """Return what a table's title says of the run."""
    config, counts = result.config, {row.n for row in result.rows if row.n}
    over = f", mean of {counts.pop()} [95 % interval]" if len(counts) == 1 else " [95 % interval]" * bool(counts)
    length = f", contexts of {config['context']} tokens" if config.get("context") else ""
    phase = f", {PHASES[config['phase']]}" if config.get("phase") in PHASES else ""
    code = f", {config['bits']}-bit codes, queries in {config['planes']} planes" if "planes" in config else ""
    said = f", {protocol(config)}" if "sink" in config else ""
    return f"{over}, model `{config['model']}`{length}{phase}{code}{said}"


def protocol(config: dict[str, Any]) -> str:
    """Return a phrase on the tokens that every row of a run reads, and the layers that its settings keep dense."""
    ends = (("first", config.get("sink", SINK)), ("last", config.get("recent", RECENT)))
    named = " and ".join(f"the {which} {_counted(count, 'token')}" for which, count in ends if count)
    how = "read beside the budget" if config.get("ends") == "beside" else "always read"
    first, at = config.get("dense_layers", 0), config.get("dense_at") or []
    layers = [f"the first {_counted(first, 'layer')}"] * bool(first)
    layers += [f"layers {', '.join(map(str, at))}"] * bool(at)
    read = f"{named} {how}" if named else "no token read without a search"
    return f"{read}, {' and '.join(layers)} dense" if layers else f"{read}, no layer set to dense"


def _counted(count: int, what: str) -> str:
    return what if count == 1 else f"{count} {what}s"


def amount(budget: float, rule: str) -> str:
    """Format a budget: a share of tokens, or a number of them."""
    return f"{budget:g} tokens" if rule == "tokens" else percent(budget)


def percent(value: float) -> str:
    """Format a share: 0.005 is `0.5 %`."""
    return f"{100 * value:.3g} %"


def signed_percent(ratio: float) -> str:
    """Format the change that a ratio means: 1.125 is `+12.5 %`."""
    return f"{100 * (ratio - 1):+.1f} %"


def cell_of(row: Row) -> str:
    """Format a value and its interval."""
    interval = "" if row.low is None or row.high is None else f" [{row.low:.3g}, {row.high:.3g}]"
    return f"{row.value:.4g}{interval}"


def signed(row: Row) -> str:
    """Format a difference and its interval."""
    return f"{row.value:+.4f}" + ("" if row.low is None else f" [{row.low:+.4f}, {row.high:+.4f}]")


def to_rich(grid: Grid) -> Table:
    """Format a table for the terminal; sections are a blank line apart."""
    table = Table(title=grid.title, title_justify="left", box=None, pad_edge=False)
    for name, is_text in zip(grid.header, grid.text_columns, strict=True):
        table.add_column(name, justify="left" if is_text else "right")
    for number, section in enumerate(grid.sections):
        for line in [[]] * bool(number) + section:
            table.add_row(*line)
    return table


def to_markdown(grid: Grid) -> str:
    """Format a table as Markdown, with its title as a paragraph above."""
    lines = [grid.header, ["---" if is_text else "---:" for is_text in grid.text_columns], *grid.lines]
    return "\n".join([f"{grid.title}", "", *("| " + " | ".join(line) + " |" for line in lines)])
