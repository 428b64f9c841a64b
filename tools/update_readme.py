"""Fill the tables of README.md, of pages of docs and of the packages' READMEs, and draw figures, from docs/results.

    uv run tools/update_readme.py                                   # write tables and figures
    uv run tools/update_readme.py --from runs/ppl=demo/everywhere runs/demo=demo/training  # first store these, trimmed
    uv run tools/update_readme.py --check                           # change nothing; exit 1 if any is stale

Other results are written below docs/results by the tool or benchmark that measures them (`--out`). Tables are written
between `<!-- results:NAME -->` and `<!-- end -->`; readme_tables/tables.toml describes them.
"""

import argparse
import pathlib
import re
import sys

from hashcore.atomic import replacing
from hashtrain.files.atomic import write_text
from readme_tables import TABLES, figures, table
from readme_tables.stored import RESULTS, store

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
BLOCK = re.compile(r"(<!-- results:(\S+) -->\n)(.*?)(<!-- end -->)", re.S)


def render(text: str, results: pathlib.Path = RESULTS) -> str:
    """Return a page with every table filled. Raises: ValueError if a block or its result is unknown."""
    if text.count("<!-- results:") != len(BLOCK.findall(text)):
        raise ValueError("a results block is malformed: expected `<!-- results:NAME -->`, its lines, `<!-- end -->`")

    def fill(match: re.Match[str]) -> str:
        opening, name, _, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"unknown block results:{name}: expected one of {', '.join(TABLES)}")
        return f"{opening}\n{table(name, results)}\n\n{end}"

    return BLOCK.sub(fill, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page or figure is stale")
    parser.add_argument("--from", dest="runs", nargs="+", default=[], metavar="RUN=NAME", help="runs to store first")
    given = parser.parse_args(arguments)
    if given.check and given.runs:
        parser.error("--check changes nothing, --from stores runs: give only one of them")
    try:
        for run, _, name in (one.partition("=") for one in given.runs):
            if not name:
                raise ValueError(f"--from takes RUN=NAME, such as runs/ppl=demo/everywhere, got {run}")
            print(f"stored {store(pathlib.Path(run), name).relative_to(ROOT)}")
        texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
        fresh = {path: render(text) for path, text in texts.items()}
    except (ValueError, OSError) as error:
        print(f"update_readme: {error}", file=sys.stderr)
        return 2
    stale = [path for path in PAGES if texts[path] != fresh[path]]
    undrawn = [name for name in figures.FIGURES if figures.is_stale(name)]
    if given.check:
        for name in [*(str(path.relative_to(ROOT)) for path in stale), *undrawn]:
            print(f"{name} shows other results than those that are stored; run `uv run tools/update_readme.py`")
        return int(bool(stale or undrawn))
    for path in stale:
        write_text(path, fresh[path])
    for name in undrawn:
        with replacing(figures.path_of(name)) as temporary:
            temporary.write_bytes(figures.png(name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
