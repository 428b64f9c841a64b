"""List the paper's tables and figures, with our commands and what is stored of them, and run them.

    uv run packages/evals/paper/run.py                       # list all
    uv run packages/evals/paper/run.py "table 2" "figure 4"  # run every part of these
    uv run packages/evals/paper/run.py --all --model FOLDER --hashers FOLDER --out runs/paper

`items.toml` holds the items, and says what its fields mean. Some need the hashers of `hashtrain --only all`. A run's
tables and figure are in its folder.
"""

import argparse
import json
import shlex
import string
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.cli import main as evals

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
NO_MODEL = ("throughput",)
"""Tasks that take a model's shape, and no model, hashers or documents."""


def items() -> list[dict[str, Any]]:
    """Read every item, with the words in place of their names."""
    data = tomllib.loads(Path(__file__).with_name("items.toml").read_text("utf-8"))
    words = {name: string.Template(text).safe_substitute(data["words"]) for name, text in data["words"].items()}
    for item in data["items"]:
        item["command"] = string.Template(item.get("command", "")).substitute(words)
        item["differs"] = [string.Template(text).substitute(words) for text in item["differs"]]
    return data["items"]


def words_of(item: dict[str, Any], given: argparse.Namespace) -> list[str]:
    """Return the arguments of an item's command of evals; none if another program or none shows it."""
    program, *words = shlex.split(item["command"]) or [""]
    if program != "evals":
        return []
    folder = item["name"].replace(" ", "-").translate(str.maketrans("", "", "(),"))
    words += ["--out", str(given.out / folder), "--device", given.device]
    if words[0] not in NO_MODEL:
        words += ["--dtype", given.dtype, "--model", given.model, "--hashers", str(given.hashers)]
        count = given.documents or item.get("documents")
        words += ["--documents", str(count)] if count else []
    return words


def stored(item: dict[str, Any], results: Path = RESULTS) -> list[str]:
    """Return the names of the stored results of an item that are there."""
    found = [(name, results / f"{name.partition('/')[0]}.json") for name in item.get("stored", ())]
    return [name for name, path in found if path.is_file() and name.partition("/")[2] in json.loads(path.read_text())]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", help="tables and figures to run, such as 'table 2'; default: list all")
    made.add_argument("--all", action="store_true", help="run all that need no hub")
    made.add_argument("--model", default="demo", help="folder or hub id")
    made.add_argument("--hashers", type=Path, default=Path("runs/demo"), help="folder with one folder per hasher")
    made.add_argument("--documents", type=int, help="contexts or exercises; default: few enough for two cores")
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", default="float32")
    made.add_argument("--out", type=Path, default=Path("runs/paper"), help="folder with one folder per part")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    found = items()
    if strange := [name for name in given.names if not any(_is(item, name) for item in found)]:
        print(f"run.py: the paper has no {strange[0]}; expected table 1 to 11 or figure 1 to 11", file=sys.stderr)
        return 2
    if not given.all and not given.names:
        for item in found:
            words = words_of(item, given)
            command = " ".join(["evals", *words]) if words else item["command"] or "no command"
            kept = ", ".join(stored(item)) or "nothing"
            print(f"{item['name']}: {item['title']}\n  {command}\n  stored: {kept}")
        return 0
    codes = []
    for item in found:
        words = words_of(item, given)
        if words and (any(_is(item, name) for name in given.names) or (given.all and not item.get("hub"))):
            print(f"{item['name']}: evals {shlex.join(words)}", *item["differs"], sep="\n", flush=True)
            codes.append(evals(words))
    return max(codes, default=0)


def _is(item: dict[str, Any], name: str) -> bool:
    """Whether an item is a table or figure, or a part of it."""
    return name in (item["name"], item["name"].partition(" (")[0])


if __name__ == "__main__":
    raise SystemExit(main())
