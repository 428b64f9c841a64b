"""Render any number of finished runs as one self-contained HTML page and one Markdown text."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hashtrain.files.atomic import write_text
from hashtrain.files.untrusted import inside

from evals.grid import Grid, to_markdown
from evals.report import grids
from evals.result import Result, as_written, read_result

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto; max-width: 74rem;
  padding: 0 1.2rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
nav a { margin-right: 1rem; } .wide { overflow-x: auto; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 1.4rem; }
caption { text-align: left; padding: .3rem 0; color: #444; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #888; } tbody + tbody tr:first-child td { border-top: 1px solid #ccc; }
tbody tr:hover { background: #f4f4f4; } .details { color: #555; font-size: .85rem; }
"""


@dataclass(frozen=True)
class Section:
    """One part of a page."""

    title: str
    notes: tuple[str, ...]
    """Paragraphs above the tables."""
    tables: tuple[Grid, ...]
    figure: Path | None
    details: str
    """Settings, software and hardware: small print."""


def section_of(folder: Path, title: str | None = None, notes: Sequence[str] = ()) -> Section:
    """Read a finished run as a section. Raises: ValueError if the folder holds none."""
    result = read_result(folder)
    figure = folder / "figure.png"
    if figure.is_file():
        inside(figure)  # the page will contain its bytes
    with as_written(str(folder)):
        tables = tuple(grids(result))
    task = result.config["task"]
    named = title or (task if folder.name == task else f"{task} ({folder.name})")
    return Section(named, tuple(notes), tables, figure if figure.is_file() else None, details_of(result))


def details_of(result: Result) -> str:
    """Return a result's settings and environment as one line."""
    settings = {k: v for k, v in result.config.items() if k not in ("versions", "method_identities")}
    software = ", ".join(f"{name} {version}" for name, version in result.environment.items())
    return "; ".join(f"{name}: {value}" for name, value in settings.items()) + f". Environment: {software}."


def to_html(title: str, sections: Sequence[Section]) -> str:
    """Return the HTML page: no scripts, no other files."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1><nav>",
        *(f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(sections)),
        "</nav>",
    ]
    for i, section in enumerate(sections):
        parts.append(f'<h2 id="s{i}">{escape(section.title)}</h2>')
        parts += [f"<p>{_marked(note)}</p>" for note in section.notes]
        parts += [f'<div class="wide">{_table(grid)}</div>' for grid in section.tables]
        if section.figure is not None:
            data = base64.b64encode(section.figure.read_bytes()).decode()
            parts.append(f'<p><img alt="{escape(section.title)}" src="data:image/png;base64,{data}"></p>')
        parts.append(f'<p class="details">{escape(section.details)}</p>')
    return "\n".join([*parts, "</body></html>\n"])


def _marked(text: str) -> str:
    """Escape a text, and format text between backticks as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _table(grid: Grid) -> str:
    def line(cells: list[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    bodies = "".join(f"<tbody>{''.join(line(x, 'td') for x in body)}</tbody>" for body in grid.sections)
    table = f"<table><caption>{_marked(grid.title)}</caption><thead>{line(grid.header, 'th')}</thead>{bodies}</table>"
    return table + (f"<p>{_marked(grid.note)}</p>" if grid.note else "")


def to_page_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return the same content as Markdown, without the figures."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}", *section.notes, *map(to_markdown, section.tables), section.details]
    return "\n\n".join(parts) + "\n"


def write_page(out: Path, title: str, sections: Sequence[Section]) -> None:
    """Write `report.md` and `report.html` below a folder."""
    write_text(out / "report.html", to_html(title, sections))
    write_text(out / "report.md", to_page_markdown(title, sections))
