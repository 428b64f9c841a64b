"""Count how large the code is.

    uv run tools/code_size.py                   # of this checkout
    uv run tools/code_size.py --against main    # and of another commit, beside it
    uv run tools/code_size.py --files           # also list the long files and functions

Lines are those of .py, .cu, .cuh and .hpp files: in `packages/*/src`, without their tests and benchmarks, and in
`tools`. Lines of code are those that are not blank, only a comment or part of a docstring. The length of a function
is its lines without its docstring.
"""

import argparse
import ast
import io
import re
import subprocess
import tempfile
import tokenize
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ENDINGS = (".py", ".cu", ".cuh", ".hpp")
MOST_LINES, MOST_OF_A_FUNCTION = 400, 40
BETWEEN = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# A string or character comes first, so that // inside of one starts no comment.
C_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/', re.S)


class CodeSize(NamedTuple):
    """The counts of one checkout."""

    lines: dict[str, tuple[int, int]]  # by package, and `tools`: physical lines and lines of code
    files: dict[str, int]  # over 400 lines, with their lines
    functions: dict[str, int]  # over 40 lines, with theirs


def is_docstring(node: ast.AST) -> bool:
    """Whether a node is a statement that is only a string: a docstring, also one below a name."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines_of(node: Any) -> range:
    """Return the numbers of the lines of a statement."""
    return range(node.lineno, node.end_lineno + 1)


def code_lines(text: str, ending: str) -> int:
    """Count the lines with code: not blank, not only a comment, not part of a docstring."""
    if ending != ".py":
        plain = C_COMMENT.sub(lambda found: found[0] if found[0][0] in "\"'" else re.sub(r"[^\n]", "", found[0]), text)
        return sum(bool(line.strip()) for line in plain.splitlines())
    strings = {number for node in ast.walk(ast.parse(text)) if is_docstring(node) for number in lines_of(node)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {n for token in tokens if token.type not in BETWEEN for n in range(token.start[0], token.end[0] + 1)}
    return len(code - strings)


def long_functions(text: str, most: int = MOST_OF_A_FUNCTION) -> dict[str, int]:
    """Return the functions that have more lines than `most` without their docstring."""
    functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = ((x.name, len(lines_of(x)) - is_docstring(x.body[0]) * len(lines_of(x.body[0]))) for x in functions)
    return {name: length for name, length in found if length > most}


def count(root: Path) -> CodeSize:
    """Count a checkout."""
    lines: dict[str, tuple[int, int]] = {}
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    packages = {path.parent.name: path for path in sorted(root.glob("packages/*/src"))}
    for name, folder in (packages | {"tools": root / "tools"}).items():
        physical = code = 0
        for path in sorted(path for path in folder.rglob("*") if path.suffix in ENDINGS):
            text, shown = path.read_text("utf-8"), str(path.relative_to(root))
            own = len(text.splitlines())
            physical, code = physical + own, code + code_lines(text, path.suffix)
            files |= {shown: own} if own > MOST_LINES else {}
            if path.suffix == ".py":
                functions |= {f"{shown}:{function}": n for function, n in long_functions(text).items()}
        lines[name] = physical, code
    return CodeSize(lines, files, functions)


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
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="a commit to count as well: the first column of numbers")
    parser.add_argument("--files", action="store_true", help="list the long files and functions")
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
        for name, lines in (size.files | size.functions).items():
            print(f"{lines} lines: {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
