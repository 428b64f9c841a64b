"""Tables with a line for each row of a stored file, described as data in `described.toml`.

A title, a header or a cell is a format string, filled with the values of the file, or of the row: `{ms[dense]:,.1f}`.
Before the format may stand a factor: `{share:*100|.0f} %`, `{bytes:/1e9|.1f} GB`. `rows` names the list in the file;
without it, the file is the one row. Each entry of `sections` repeats all rows and gives words for `$name` in cells. A
cell is filled twice, so that one field may name another: `{{times[{fastest}]:.1f}}`.
"""

import pathlib
import string
import tomllib
from collections.abc import Mapping
from functools import partial
from typing import Any

from evals.tables import Grid, to_markdown

from readme_tables.stored import stored


class Filled(string.Formatter):
    """Format strings in which a number may be multiplied or divided."""

    def format_field(self, value: Any, format_spec: str) -> str:
        factor, bar, plain = format_spec.partition("|")
        if bar:
            number = float(factor[1:])
            value = value * number if factor[0] == "*" else value / number
        return super().format_field(value, plain if bar else format_spec)


def fill(text: str, values: Mapping[str, Any]) -> str:
    return Filled().vformat(text, (), values)


def cell(text: str, values: Mapping[str, Any], replaced: dict[str, str]) -> str:
    return fill(fill(string.Template(text).substitute(replaced), values), values)


def table(described: dict[str, Any], results: pathlib.Path) -> str:
    """Return a described table as Markdown. Raises: ValueError if its file, or a value that it shows, is missing."""
    try:
        return to_markdown(grid(described, stored(results, described["file"])))
    except LookupError as error:
        raise ValueError(f"{described['file']}.json has no {error}, which a table shows; store the run again") from None


def grid(described: dict[str, Any], found: dict[str, Any]) -> Grid:
    """Fill a described table with what its file holds."""
    rows = Filled().get_field(described["rows"], (), found)[0] if "rows" in described else [found]
    columns: dict[str, str] = described["columns"]
    parts = described.get("sections", [{}])
    sections = [[[cell(text, row, part) for text in columns.values()] for row in rows] for part in parts]
    return Grid(fill(described["title"], found), [fill(name, found) for name in columns], sections)


_TEXT = pathlib.Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
DESCRIBED = {name: partial(table, described) for name, described in tomllib.loads(_TEXT).items()}
"""By name, the functions that return the tables."""
