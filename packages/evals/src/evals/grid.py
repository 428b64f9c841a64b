"""Tables as data, formatted for a terminal or as Markdown."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from evals.result import Row

HEADS = {"kv_head": "per KV head", "query_head": "per query head"}


def heads_of(config: dict[str, Any]) -> list[str]:
    """Return the kinds of heads that were measured: both, unless --heads names one."""
    return [*HEADS] if config["heads"] is None else [f"{config['heads']}_head"]


@dataclass(frozen=True)
class Grid:
    """A table: `sections` are groups of lines, each a list of cells."""

    title: str
    header: list[str]
    sections: list[list[list[str]]]
    note: str = ""
    """Text below the table."""


def to_rich(grid: Grid) -> Table:
    """Format a table for the terminal."""
    table = Table(title=grid.title, caption=grid.note or None)
    for i, name in enumerate(grid.header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for section in grid.sections:
        table.add_section()
        for line in section:
            table.add_row(*line)
    return table


def to_markdown(grid: Grid) -> str:
    """Format a table as Markdown, with its title as a paragraph above."""
    lines = [grid.header, ["---"] + ["---:"] * (len(grid.header) - 1)]
    lines += [line for section in grid.sections for line in section]
    below = ["", grid.note] if grid.note else []
    return "\n".join([f"{grid.title}", "", *("| " + " | ".join(line) + " |" for line in lines), *below])


def amount(budget: float, rule: str) -> str:
    """Format a budget: a share of tokens, or a number of them."""
    return f"{budget:g} tokens" if rule == "tokens" else percent(budget)


def percent(value: float) -> str:
    """Format a share: 0.005 is `0.5 %`."""
    return f"{100 * value:.3g} %"


def cell_of(row: Row) -> str:
    """Format a value and its interval."""
    interval = "" if row.low is None or row.high is None else f" [{row.low:.3g}, {row.high:.3g}]"
    return f"{row.value:.4g}{interval}"
