"""Check the Python of the documentation: it compiles, and a type checker resolves all names and arguments."""

import json
import pathlib
import re
import subprocess
import sys

SETTINGS = {
    "typeCheckingMode": "standard",
    "include": ["."],
    "extraPaths": [str(pathlib.Path(__file__).parents[2] / "packages" / "hashcore" / "tests")],  # hostsim
    # The blocks of a page form one module, so later ones may redefine names.
    "reportRedeclaration": False,
}
# transformers declares `generate` for a protocol that its own model classes do not meet.
NOT_OURS = 'Could not bind method "generate" because'

CANARY = "canary"
WRONG = "import hashcore\nimport no_such_module\nhashcore.no_such_name\nhashcore.pack([], no_such_argument=1)\n"
"""Checked with the modules: a checker that cannot see the installed packages would find no error here, or anywhere."""


def start(modules: dict[str, str], folder: pathlib.Path) -> subprocess.Popen[str]:
    """Start the type checker on the modules of all pages, written below `folder`, which must be empty.

    Args:
        modules: Python code by page.
    """
    folder.mkdir(parents=True)
    (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    for page, text in {**modules, CANARY: WRONG}.items():
        (folder / file_of(page)).write_text(text, encoding="utf-8")
    # Run with `python -m`, so that the checker sees the packages installed here.
    words = [sys.executable, "-m", "basedpyright", "--project", str(folder), "--outputjson"]
    words += ["--pythonpath", sys.executable]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def file_of(page: str) -> str:
    """Return the file name of a page's module."""
    return re.sub(r"\W", "_", page) + ".py"


def problems(running: subprocess.Popen[str], modules: dict[str, str]) -> list[str]:
    """Wait for the type checker and return its findings, a sentence each.

    Raises: RuntimeError with its output if it did not check all modules, or cannot see the installed packages.
    """
    out, complaint = running.communicate()
    try:
        found = json.loads(out)
    except json.JSONDecodeError as error:
        raise RuntimeError(f"expected a report of basedpyright, got {out}{complaint}") from error
    if found["summary"]["filesAnalyzed"] != len(modules) + 1:
        raise RuntimeError(f"expected {len(modules) + 1} files checked, got {found['summary']}")
    page_of = {file_of(page): page for page in [*modules, CANARY]}
    wrong = [
        (page_of[pathlib.Path(item["file"]).name], item["range"]["start"]["line"] + 1, item["message"])
        for item in found["generalDiagnostics"]
        if item["severity"] == "error" and NOT_OURS not in item["message"]
    ]
    if [line for page, line, _ in wrong if page == CANARY] != [2, 3, 4]:
        raise RuntimeError(f"expected basedpyright to find three mistakes in {WRONG!r}, got {wrong}")
    return [f"{page}:{line}: {message}" for page, line, message in wrong if page != CANARY]
