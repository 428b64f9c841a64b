"""Convert a folder of HTML pages to one text file: `uv run examples/html_text.py FOLDER OUT.txt [--match PATTERN]`.

Linux distributions package manuals as HTML, a source of long English text for training and evaluation. Headings,
paragraphs, lists and code keep their line breaks; navigation, scripts and styles are left out.
"""

import argparse
import re
from html.parser import HTMLParser
from pathlib import Path

SKIPPED = {"script", "style", "nav", "head", "header", "footer", "form", "button", "svg"}
BLOCKS = {"p", "div", "li", "dt", "dd", "tr", "table", "ul", "ol", "dl", "section", "article", "blockquote", "br"}
BLOCKS |= {"h1", "h2", "h3", "h4", "h5", "h6", "pre", "figure", "figcaption"}
VOID = {"br", "img", "hr", "meta", "link", "input", "col", "wbr", "area", "base", "embed", "source", "track"}


class PageText(HTMLParser):
    """Collects the text of one page, one line per block."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipping: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        role = dict(attrs).get("role") or ""
        if (tag in SKIPPED or role == "navigation" or self._skipping) and tag not in VOID:
            self._skipping.append(tag)
            return
        self._pre += tag == "pre"
        if tag in BLOCKS and not self._skipping:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            if tag in self._skipping:  # also closes unclosed tags inside
                while self._skipping.pop() != tag:
                    pass
            return
        self._pre -= tag == "pre" and self._pre > 0
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def page_text(html: str) -> str:
    """Return the text of one page: each block on its own line, with at most one empty line in between."""
    page = PageText()
    page.feed(html)
    page.close()
    lines = [line.rstrip() for line in "".join(page.parts).replace("\xa0", " ").split("\n")]
    lines = [line if line.startswith("  ") else line.lstrip() for line in lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in names by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.as_posix())]


def pages(folder: Path, match: str) -> list[Path]:
    return sorted((path for path in folder.rglob(match) if path.is_file()), key=natural)


def main() -> int:
    """Write the text file and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of HTML pages")
    parser.add_argument("out", type=Path, help="the text file to write")
    parser.add_argument("--match", default="*.html", help="pattern of the pages' names, such as '*.en.html'")
    given = parser.parse_args()
    found = pages(given.folder, given.match)
    texts = [page_text(path.read_text(encoding="utf-8", errors="replace")) for path in found]
    whole = "\n\n".join(text for text in texts if text)
    if not whole:
        parser.error(f"expected pages {given.match} with text in {given.folder}, found {len(found)}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(whole + "\n", encoding="utf-8")
    print(f"{given.out}: {len(found)} pages, {len(whole):,} characters")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
