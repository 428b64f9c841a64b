"""The directive `public-names PACKAGE`: the reference of all that is in the package's `__all__`, from its docstrings.

Our docstrings are plain text with `code` in backticks and sections such as `Args:`; here they become reStructuredText,
and what they say of equations becomes links to docs/algorithm.md.
"""

import importlib
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

ROOT = Path(__file__).resolve().parents[3]
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Source):(?: (.*))?$")
NAMED = re.compile(r"^( {4})(\*{0,2}\w+(?:, \w+)*): (.*)$")
EQUATIONS = re.compile(r"\b([Ee]q\.|equations) ((?:\d+)(?:(?:, | and | or | to )\d+)*)")
HEADING = re.compile(r"^#+ (Eq\. (\d+)\b.*)$", re.M)


def slug(heading: str) -> str:
    """Return the anchor that forges give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def equations() -> dict[str, str]:
    """Return the address of each equation, by its number, from a page two folders below docs/."""
    text = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    return {number: f"../../algorithm.html#{slug(heading)}" for heading, number in HEADING.findall(text)}


def to_rst(lines: list[str], addresses: dict[str, str]) -> list[str]:
    """Translate a docstring.

    Args:
        lines: the docstring, its indentation taken off.
        addresses: as `equations` returns them.
    Raises: ValueError if it cites an equation that does not exist.
    """
    found, section = [], False
    for line in lines:
        if start := SECTION.match(line):
            section = True
            found += ["", f":{start[1]}: {start[2] or ''}".rstrip()]
        elif section and (item := NAMED.match(line)):
            found += ["", f"    * **{item[2].replace('*', chr(92) + '*')}**: {_inline(item[3])}"]
            continue
        elif section and line and not line.startswith(" "):
            section = False
            found += ["", line]
        elif section and line.startswith(" " * 8):
            found.append("      " + line.strip())
        else:
            found.append(line)
        found[-1] = _inline(found[-1])
    return _linked("\n".join(found), addresses).split("\n")


def _inline(line: str) -> str:
    """Escape what reStructuredText would read as markup, outside of backticks."""
    parts = re.split(r"(`[^`]*`)", line)
    parts[::2] = [re.sub(r"([*|_])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def _linked(text: str, addresses: dict[str, str]) -> str:
    def link(found: re.Match[str]) -> str:
        if found[0] not in addresses:
            raise ValueError(f"expected an equation of docs/algorithm.md, {', '.join(addresses)}, got {found[0]}")
        return f"`{found[0]} <{addresses[found[0]]}>`__"

    return EQUATIONS.sub(lambda found: f"{found[1]} {re.sub('[0-9]+', link, found[2])}", text)


def entry(package: str, name: str) -> list[str]:
    """Return the autodoc directive of one public name of a package or module."""
    value = getattr(importlib.import_module(package), name)
    if isinstance(value, types.ModuleType):
        return [f".. automodule:: {package}.{name}", "   :members:", ""]
    if inspect.isclass(value):
        return [f".. autoclass:: {package}.{name}", "   :members:", ""]
    if callable(value):
        return [f".. autofunction:: {package}.{name}", ""]
    return [f".. py:data:: {package}.{name}", "", *(f"   {line}" for line in value_docstring(package, name)), ""]


def value_docstring(package: str, name: str) -> list[str]:
    """Find the docstring below a value, in the module of the package that makes it.

    Raises: LookupError if it has none.
    """
    for module in [module for module in sys.modules if f"{module}.".startswith(f"{package}.")]:
        found = ModuleAnalyzer.for_module(module).find_attr_docs()
        if ("", name) in found:
            return to_rst(found["", name], equations())
    raise LookupError(f"expected a docstring below {name}, in a module of {package}, found none; write one")


class PublicNames(SphinxDirective):
    """`public-names PACKAGE`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        module = importlib.import_module(package)
        lines = [line for name in module.__all__ for line in entry(package, name)]
        made = nodes.section(document=self.state.document)
        nested_parse_with_titles(self.state, StringList(lines, source=self.name), made)
        return made.children


def _docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines, equations())


def _signature(app: Sphinx, what: str, name: str, value: Any, options: Any, given: str, result: str) -> Any:
    """Write a default that is made anew for each instance as `...`: Sphinx cannot read `<factory>`."""
    return None if given is None else (given.replace("<factory>", "..."), result)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
