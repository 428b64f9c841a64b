"""Build the documentation site below build/docs, and check its content.

    uv run --group docs tools/build_docs.py

Sphinx warnings are errors. Links within the site must resolve; external ones are listed, not fetched. The Python of
docs/, the packages' READMEs and examples/ must compile and use existing names, and their commands must parse. Exit code
1, with a sentence per problem, if there is one.
"""

import os
import pathlib
import shutil
import sys
import time

from docs_checks import commands, links, pages, snippets
from sphinx.cmd.build import build_main

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECKED = ("docs/*.md", "docs/*/*.md", "packages/*/README.md", "examples/*.md", "[C-S]*.md")
BUILD = ROOT / "build" / "docs"
START = "docs/site/index.html"
REDIRECT = (
    f'<!doctype html><meta http-equiv="refresh" content="0; url={START}"><a href="{START}">Spotlight Attention</a>\n'
)


def blocks() -> dict[str, list[pages.Block]]:
    """Return the code blocks of every checked page."""
    paths = sorted({path for pattern in CHECKED for path in ROOT.glob(pattern)})
    return {path.relative_to(ROOT).as_posix(): pages.blocks(path.read_text(encoding="utf-8")) for path in paths}


def build(site: pathlib.Path) -> bool:
    """Build the site from scratch. Returns whether there were no warnings."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    words = ["-b", "html", "-q", "-E", "-W", "--keep-going", "-d", str(BUILD / "pages")]
    failed = build_main([*words, "-c", str(ROOT / "docs" / "site"), str(ROOT), str(site)])
    (site / "index.html").write_text(REDIRECT, encoding="utf-8")
    return not failed


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(BUILD, ignore_errors=True)
    found = blocks()
    modules = {page: text for page, of_page in found.items() if (text := pages.module(of_page))}
    checker = snippets.start(modules, BUILD / "snippets")
    problems = [] if build(BUILD / "site") else ["Sphinx warned: see above"]
    shell = [(page, block) for page, of_page in found.items() for block in of_page if block.language == "bash"]
    for page, block in shell:
        problems += [f"{page}:{block.line}: {sentence}" for sentence in commands.problems(block.code)]
    followed = links.check(BUILD / "site")
    problems += followed.problems
    external = "".join(f"{address}  ({page})\n" for address, page in sorted(followed.external.items()))
    (BUILD / "external-links.txt").write_text(external, encoding="utf-8")
    problems += snippets.problems(checker, modules)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(
        f"{'failed' if problems else 'built'}: {BUILD.relative_to(ROOT)}/site/index.html; {len(modules)} pages with "
        f"Python and {len(shell)} blocks of commands checked; {len(followed.external)} links leave the site "
        f"(external-links.txt); {time.monotonic() - began:.0f} s"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
