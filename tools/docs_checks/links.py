"""Check the links of a built site: internal ones must lead to an existing page and anchor; nothing may be remote."""

import html.parser
import pathlib
import posixpath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
NOT_LOADED = {"canonical", "index", "search", "next", "prev", "author"}
"""Kinds of `link` that a browser does not load."""


class Page(html.parser.HTMLParser):
    """Anchors, links and loaded files of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        for name, value in given.items():
            if (tag, name) in LOADED and given.get("rel") not in NOT_LOADED:
                self.loaded.append(value)
            elif name == "href":
                self.links.append(value)


class Found(NamedTuple):
    """Problems, a sentence each, and external addresses with the first page that has them."""

    problems: list[str]
    external: dict[str, str]


def check(site: pathlib.Path) -> Found:
    """Follow every link of every page."""
    pages = {path.relative_to(site).as_posix(): Page() for path in sorted(site.rglob("*.html"))}
    for name, page in pages.items():
        page.feed((site / name).read_text(encoding="utf-8"))
    found = Found([], {})
    for name, page in pages.items():
        found.problems.extend(f"{name}: loads {x} from a network" for x in page.loaded if _external(x))
        for link in [*page.links, *(x for x in page.loaded if not _external(x))]:
            parts = urlsplit(link)
            if _external(link):
                found.external.setdefault(link, name)
            elif parts.scheme != "data":
                place = posixpath.join(posixpath.dirname(name), unquote(parts.path)) if parts.path else name
                target = posixpath.normpath(place)
                if not (site / target).is_file():
                    found.problems.append(f"{name}: expected a page or file of the site, got the link {link}")
                elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                    found.problems.append(f"{name}: expected an anchor of {target}, got the link {link}")
    return found


def _external(link: str) -> bool:
    parts = urlsplit(link)
    return bool(parts.scheme or parts.netloc) and parts.scheme != "data"
