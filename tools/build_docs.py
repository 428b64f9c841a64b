"""Build the documentation site below build/docs, and check its commands and its Python.

    uv run --group docs tools/build_docs.py

Sphinx warnings are errors, links that lead nowhere among them. The Python of docs/, the packages' READMEs and examples/
must compile and use existing names; the commands of ours must parse by their own parsers, and scripts must exist. Exit
code 1, with a sentence per problem, if there is one.
"""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from evals.cli import COMMANDS
from hashtrain import cli as hashtrain_cli
from hashtrain.command_line import parse, parse_settings
from hashtrain.usage import UsageError
from markdown_it import MarkdownIt
from sparse_decode.settings import GenerateCommand
from sphinx.cmd.build import build_main

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECKED = ("docs/*.md", "docs/*/*.md", "packages/*/README.md", "examples/*.md", "[C-S]*.md")
BUILD = ROOT / "build" / "docs"
START = "docs/site/index.html"
REDIRECT = f'<!doctype html><meta http-equiv="refresh" content="0; url={START}"><a href="{START}">Spotlight</a>\n'
PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "evals": lambda words: parse("evals", words, COMMANDS),
    "hashtrain": hashtrain_cli.parse,
    "sparse-decode": lambda words: parse_settings("sparse-decode", words, GenerateCommand),
}
SETTINGS = {
    "typeCheckingMode": "standard",
    "include": ["."],
    "extraPaths": [str(ROOT / "packages" / "hashcore" / "tests")],  # hostsim
    "reportRedeclaration": False,  # the blocks of a page form one module
}
# transformers declares `generate` for a protocol that its own model classes do not meet.
NOT_OURS = 'Could not bind method "generate" because'
WRONG = "import hashcore\nimport no_such_module\nhashcore.no_such_name\nhashcore.pack([], no_such_argument=1)\n"
"""Checked with the pages: a checker that cannot see the installed packages would find no error here, or anywhere."""


def blocks(language: str) -> Iterator[tuple[str, int, str]]:
    """Yield page, line and text of every block of a language."""
    for path in sorted({path for pattern in CHECKED for path in ROOT.glob(pattern)}):
        for token in MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8")):
            if token.type == "fence" and token.map is not None and token.info.strip() == language:
                yield path.relative_to(ROOT).as_posix(), token.map[0] + 2, textwrap.dedent(token.content)


def wrong_commands() -> Iterator[str]:
    """Yield a sentence for each command that its parser refuses, or whose script does not exist."""
    for page, line, code in blocks("bash"):
        for command in re.sub(r"\\\n", " ", code).splitlines():
            words = shlex.split(command, comments=True)
            program = next((at for at, word in enumerate(words) if word in PARSERS), None)
            scripts = [word for word in words if word.endswith((".py", ".sh")) and not word.startswith(("/", "runs/"))]
            missing = [name for name in scripts if "/" in name and not (ROOT / name).exists()]
            yield from (f"{page}:{line}: expected a script of this repository, got {name}" for name in missing)
            if program is not None and not missing and words[0] in ("uv", words[program]) and "|" not in words:
                said = io.StringIO()
                try:
                    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                        PARSERS[words[program]](words[program + 1 :])
                except (SystemExit, UsageError, ValueError) as error:
                    yield f"{page}:{line}: `{command}`: {error} {said.getvalue()}"


def start_checker(folder: pathlib.Path) -> subprocess.Popen[str]:
    """Write the Python of each page as a module, each line at its place, and start the type checker on all of them."""
    pages: dict[str, list[str]] = {"canary": [*WRONG.splitlines()]}
    for page, line, code in blocks("python"):
        lines = pages.setdefault(re.sub(r"\W", "_", page), [])
        lines += [""] * (line - 1 - len(lines)) + code.splitlines()
    folder.mkdir(parents=True)
    (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    for name, lines in pages.items():
        (folder / f"{name}.py").write_text("\n".join([*lines, ""]), encoding="utf-8")
    # Run with `python -m`, so that the checker sees the packages installed here.
    words = [sys.executable, "-m", "basedpyright", "--project", str(folder), "--outputjson"]
    return subprocess.Popen([*words, "--pythonpath", sys.executable], stdout=subprocess.PIPE, text=True)


def wrong_python(checker: subprocess.Popen[str]) -> list[str]:
    """Wait for the type checker; return a sentence for each mistake. Raises: RuntimeError if it did not see ours."""
    found = [
        (pathlib.Path(item["file"]).stem, item["range"]["start"]["line"] + 1, item["message"])
        for item in json.loads(checker.communicate()[0])["generalDiagnostics"]
        if item["severity"] == "error" and NOT_OURS not in item["message"]
    ]
    if [line for page, line, _ in found if page == "canary"] != [2, 3, 4]:
        raise RuntimeError(f"expected basedpyright to find three mistakes in {WRONG!r}, got {found}")
    return [f"{page}:{line}: {message}" for page, line, message in found if page != "canary"]


def main() -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    checker = start_checker(BUILD / "snippets")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    words = ["-b", "html", "-q", "-E", "-W", "--keep-going", "-d", str(BUILD / "pages")]
    warned = build_main([*words, "-c", str(ROOT / "docs" / "site"), str(ROOT), str(BUILD / "site")])
    (BUILD / "site" / "index.html").write_text(REDIRECT, encoding="utf-8")
    problems = ["Sphinx warned: see above"] * bool(warned) + [*wrong_commands(), *wrong_python(checker)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{'failed' if problems else 'built'}: {BUILD.relative_to(ROOT)}/site/index.html")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
