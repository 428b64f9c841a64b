"""Equations as MathML, made at build time: browsers draw it themselves, so that pages need no script and no network."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import SphinxError


def mathml(latex: str, display: str) -> str:
    """Translate one formula.

    Args:
        latex: without its dollars.
        display: `inline` or `block`.
    Raises: SphinxError if a part of it has no translation.
    """
    try:
        made = convert(latex, display=display)
    except Exception as error:  # its parser has an exception a mistake
        raise SphinxError(f"expected LaTeX that latex2mathml knows, got {latex!r} ({error!r})") from error
    if "\\" in made:
        raise SphinxError(f"expected LaTeX that latex2mathml knows, got an unknown command in {latex!r}: {made}")
    return made


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
