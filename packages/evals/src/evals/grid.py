"""Tables as data, formatted for a terminal or as Markdown."""

import re
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from evals.result import Row

_NUMBER = re.compile(r"[-+<]?\d")
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

    @property
    def lines(self) -> list[list[str]]:
        """The lines of all sections."""
        return [line for section in self.sections for line in section]

    @property
    def text_columns(self) -> list[bool]:
        """For each column, whether it is aligned to the left: the first, and those that hold more than numbers."""
        cells = ([line[i] for line in self.lines if i < len(line) and line[i]] for i in range(len(self.header)))
        return [not i or not all(map(_NUMBER.match, column)) for i, column in enumerate(cells)]


def to_rich(grid: Grid) -> Table:
    """Format a table for the terminal."""
    table = Table(title=grid.title, caption=grid.note or None)
    for name, is_text in zip(grid.header, grid.text_columns, strict=True):
        table.add_column(name, justify="left" if is_text else "right")
    for section in grid.sections:
        table.add_section()
        for line in section:
            table.add_row(*line)
    return table


def to_markdown(grid: Grid) -> str:
    """Format a table as Markdown, with its title as a paragraph above."""
    lines = [grid.header, ["---" if is_text else "---:" for is_text in grid.text_columns], *grid.lines]
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
