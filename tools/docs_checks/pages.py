"""Code blocks of a Markdown page, by language."""

import textwrap
from typing import NamedTuple

from markdown_it import MarkdownIt


class Block(NamedTuple):
    """A fenced block; `line` is the number of its first line of code, from 1."""

    language: str
    line: int
    code: str


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, including those inside lists."""
    found = []
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence" and token.map is not None:
            found.append(Block(token.info.strip(), token.map[0] + 2, token.content))
    return found


def module(found: list[Block], language: str = "python") -> str:
    """Combine the blocks of a language into one module, each line at its line number on the page."""
    lines: list[str] = []
    for block in found:
        if block.language == language:
            lines += [""] * (block.line - 1 - len(lines))
            lines += textwrap.dedent(block.code).splitlines()
    return "\n".join(lines) + "\n" if lines else ""
