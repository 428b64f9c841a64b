"""The generated tables, described in `tables.toml`: Jinja fills them with stored results and the functions of `values`.

A table has a line for each of its `rows`, an expression on the values of its `file`; `sections` repeat the rows, each
as `part`. Title, header and cells are templates, of which a cell also sees `row` and, of a mapping, its keys.
`text` is a template of sentences instead of a table, and `like` takes over what another table has.
"""

import pathlib
import tomllib
from typing import Any

import jinja2
from evals.tables import Grid, to_markdown

from readme_tables.stored import stored
from readme_tables.values import functions

_DESCRIBED: dict[str, dict[str, Any]] = tomllib.loads(
    pathlib.Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
)
TABLES = {name: _DESCRIBED[own["like"]] | own if "like" in own else own for name, own in _DESCRIBED.items()}


def table(name: str, results: pathlib.Path) -> str:
    """Return a table or sentences as Markdown. Raises: ValueError if a stored result that it shows is missing."""
    described = TABLES[name]
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True)
    environment.filters["f"] = format
    environment.globals |= functions(results) | described
    known = stored(results, described["file"]) if "file" in described else {}
    try:
        if "text" in described:
            made = environment.from_string(described["text"]).render(known).strip()
        else:
            note = environment.from_string(described.get("note", "")).render(known)
            made = "\n\n".join(filter(None, (to_markdown(_grid(environment, described, known)), note)))
        return made.replace("Intel(R) Xeon(R) Processor", "Intel Xeon")
    except (jinja2.UndefinedError, LookupError, TypeError) as error:
        raise ValueError(f"the table {name} lacks a stored value ({error}); store the run again") from error


def _grid(environment: jinja2.Environment, described: dict[str, Any], known: dict[str, Any]) -> Grid:
    def evaluated(expression: str, **more: Any) -> Any:
        return environment.compile_expression(expression, undefined_to_none=False)(known | more)

    def filled(template: str, **more: Any) -> str:
        return environment.from_string(template).render(known | more)

    sections = []
    for part in evaluated(described.get("sections", "[none]")):
        rows = evaluated(described.get("rows", "[none]"), part=part)
        seen = [{"part": part, "row": row, **(row if isinstance(row, dict) else {})} for row in rows]
        sections.append([[filled(cell, **at) for cell in described["columns"].values()] for at in seen])
    header = [filled(name) for name in described["columns"]]
    return Grid(filled(described["title"]), header, sections)
