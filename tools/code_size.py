"""Count how large the code is, and how many files a call crosses.

    uv run tools/code_size.py                   # of this checkout
    uv run tools/code_size.py --against main    # and of another commit, beside it
    uv run tools/code_size.py --files           # also list the files that are counted in the last two groups

Lines are those of .py, .cu, .cuh and .hpp files: in `packages/*/src`, without their tests and benchmarks, and in
`tools`. Lines of code are those that are not blank, only a comment or part of a docstring. The length of a function
is its lines without its docstring. The files that a call crosses are found by `tools/code_paths.py`, which says what
counts.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ENDINGS = (".py", ".cu", ".cuh", ".hpp")
MOST_LINES, MOST_OF_A_FUNCTION = 400, 40
BETWEEN = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# A string or character comes first, so that // inside of one starts no comment.
C_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/', re.S)


class CodeSize(NamedTuple):
    """The counts of one checkout.

    Attributes:
        lines: by package, and `tools`: physical lines and lines of code.
        files: the files over 400 lines, with their lines.
        functions: the functions over 40 lines, with theirs.
        ways: by call, the files that it crosses, or the error that prevented counting.
    """

    lines: dict[str, tuple[int, int]]
    files: dict[str, int]
    functions: dict[str, int]
    ways: dict[str, list[str] | str]


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yield the statements that are only a string: docstrings, also those below a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of the lines of a statement."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def code_lines(text: str, ending: str) -> int:
    """Count the lines with code: not blank, not only a comment, not part of a docstring."""
    if ending != ".py":
        plain = C_COMMENT.sub(lambda found: found[0] if found[0][0] in "\"'" else re.sub(r"[^\n]", "", found[0]), text)
        return sum(bool(line.strip()) for line in plain.splitlines())
    strings = {number for node in docstrings(ast.parse(text)) for number in lines_of(node)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {n for token in tokens if token.type not in BETWEEN for n in range(token.start[0], token.end[0] + 1)}
    return len(code - strings)


def long_functions(text: str, most: int = MOST_OF_A_FUNCTION) -> dict[str, int]:
    """Return the functions that have more lines than `most` without their docstring."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            length = len(lines_of(node)) - (len(lines_of(first)) if first in set(docstrings(node)) else 0)
            if length > most:
                found[node.name] = length
    return found


def folders(root: Path) -> dict[str, Path]:
    """Return the folder of each package's sources, and tools."""
    return {path.parent.name: path for path in sorted(root.glob("packages/*/src"))} | {"tools": root / "tools"}


def count(root: Path) -> CodeSize:
    """Count a checkout."""
    lines: dict[str, tuple[int, int]] = {}
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    for name, folder in folders(root).items():
        physical = code = 0
        for path in sorted(path for path in folder.rglob("*") if path.suffix in ENDINGS):
            text, shown = path.read_text("utf-8"), str(path.relative_to(root))
            own = len(text.splitlines())
            physical, code = physical + own, code + code_lines(text, path.suffix)
            files |= {shown: own} if own > MOST_LINES else {}
            if path.suffix == ".py":
                functions |= {f"{shown}:{function}": n for function, n in long_functions(text).items()}
        lines[name] = physical, code
    return CodeSize(lines, files, functions, ways(root))


def ways(root: Path) -> dict[str, list[str] | str]:
    """Return the files that calls cross, traced in a process whose packages are those of this checkout."""
    script = [sys.executable, str(Path(__file__).with_name("code_paths.py")), str(root)]
    done = subprocess.run(script, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"code_paths.py failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def extracted(revision: str, folder: Path) -> Path:
    """Write the files of a commit to a folder. Raises: ValueError if git does not know it."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", "--format=zip", revision], capture_output=True)
    if done.returncode:
        raise ValueError(f"expected a commit, got {revision!r}: {done.stderr.decode().strip()}")
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder)
    return folder


def rows(size: CodeSize) -> dict[str, str]:
    """Return the counts as a table's rows, by name."""
    packages = [pair for name, pair in size.lines.items() if name != "tools"]
    lines = size.lines | {"packages together": tuple(map(sum, zip(*packages, strict=True)))}
    shown = {f"lines of {name} (of code)": f"{pair[0]:,} ({pair[1]:,})" for name, pair in lines.items()}
    shown[f"files over {MOST_LINES} lines"] = str(len(size.files))
    shown[f"functions over {MOST_OF_A_FUNCTION} lines"] = str(len(size.functions))
    for name, files in size.ways.items():
        shown[f"files crossed by {name}"] = files if isinstance(files, str) else str(len(files))
    return shown


def details(size: CodeSize) -> Iterator[str]:
    """Yield the names behind the counts."""
    yield from (f"{lines} lines: {name}" for part in (size.files, size.functions) for name, lines in part.items())
    for name, files in size.ways.items():
        yield f"{name}: {files if isinstance(files, str) else ', '.join(files)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="a commit to count as well: the first column of numbers")
    parser.add_argument("--files", action="store_true", help="list the long files and functions, and the files crossed")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            earlier = given.against and rows(count(extracted(given.against, Path(folder))))
    except ValueError as error:
        parser.error(str(error))
    size = count(ROOT)
    now = rows(size)
    for name in (earlier or {}) | now:
        columns = ([earlier.get(name, "-")] if earlier else []) + [now.get(name, "-")]
        print(f"{name:44}" + "".join(f"{column:>20}" for column in columns))
    if given.files:
        print(*details(size), sep="\n")
    return int(any(isinstance(files, str) for files in size.ways.values()))


if __name__ == "__main__":
    raise SystemExit(main())
