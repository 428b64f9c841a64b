"""Run the commands of README.md like a newcomer: in a fresh clone, with Python 3.11 and pip and nothing else.

    uv run tools/check_readme.py                  # exit code 1 at the first block that fails
    uv run tools/check_readme.py --list           # list the blocks that would run; run nothing
    uv run tools/check_readme.py --cache          # with this user's package caches: faster, unfair times
    uv run tools/check_readme.py --blocks 1 2 4   # only these
    uv run tools/check_readme.py --out docs/results/readme.json  # store the times: a table of README.md

Every ```bash block is run as it stands, in the order of the file, from the root of the clone, each in its own shell.
A block is not run if
  - it names something of the reader's own, which is always written `path/or/...`;
  - it is directly below a line `<!-- not run: REASON -->`.
The clone contains what is committed. HOME, the folder around it and all caches are empty; of the environment variables
only those for reaching the package index (REACH) are kept. From the start of the first block to the end of the first
with `uv run`, at most 480 seconds may pass: from install to first result.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from evals.machine import processor
from hashtrain.files.atomic import write_text

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 480.0  # seconds from install to first result
PATIENCE = 3600.0  # seconds for one block
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\n\Z")
READERS_OWN = re.compile(r"\bpath/or/")
REACH = re.compile(
    r"(PIP|UV)_(DEFAULT_|EXTRA_)?(INDEX|TRUSTED_HOST|CERT|CONFIG_FILE).*|(HTTPS?|NO|ALL)_PROXY|SSL_CERT_\w+", re.I
)


class Block(NamedTuple):
    """One fenced block of a Markdown text: `line` is that of its first line of code, `skipped` why it is not run."""

    language: str
    code: str
    line: int
    skipped: str = ""

    @property
    def title(self) -> str:
        """Its first line, shortened; " ..." marks further lines."""
        first, goes_on, _ = self.code.strip().partition("\n")
        first += " ..." if goes_on else ""
        return first if len(first) <= 80 else first[:76] + " ..."


def blocks(text: str, language: str | None = None) -> list[Block]:
    """Return the fenced blocks of a Markdown text, of one language or all, in order."""
    found = []
    for fence in FENCE.finditer(text):
        mark = NOT_RUN.search(text, 0, fence.start())
        named = READERS_OWN.search(fence[2])
        why = mark[1] if mark else "names the reader's own, path/or/..." if named else ""
        found.append(Block(fence[1], fence[2], text.count("\n", 0, fence.start(2)) + 1, why))
    return [block for block in found if language in (None, block.language)]


def environment(folder: pathlib.Path, given: Mapping[str, str], cache: bool) -> dict[str, str]:
    """Return the environment of a newcomer's shell: PATH, an empty HOME, and access to the package index."""
    kept = {name: value for name, value in given.items() if REACH.fullmatch(name)}
    if cache and "HOME" in given:
        for tool in ("uv", "pip"):
            variable = f"{tool.upper()}_CACHE_DIR"
            kept[variable] = given.get(variable, f"{given['HOME']}/.cache/{tool}")
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    path = f"{folder / 'python' / 'bin'}:/usr/bin:/bin"
    return {**kept, "PATH": path, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "LANG": "C.UTF-8"}


def prepare(folder: pathlib.Path, python: str, cache: bool) -> dict[str, str]:
    """Clone, and create a virtual environment. Returns: the environment variables.

    Raises: ValueError if the Python is not 3.11, or uv is already installed.
    """
    if not (version := version_of(python)).startswith("3.11."):
        raise ValueError(f"expected Python 3.11, got {version or 'none'} at {python}; give --python")
    clean = environment(folder, os.environ, cache)
    if found := shutil.which("uv", path=clean["PATH"]):
        raise ValueError(f"expected a machine without uv, got {found}; run this where it is not in /usr/bin")
    # A virtual environment instead of the system's Python, so that `pip install` needs no rights.
    subprocess.run([python, "-m", "venv", folder / "python"], check=True)
    subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, folder / "clone"], check=True)
    return clean


def version_of(python: str) -> str:
    command = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def run_blocks(
    chosen: Sequence[tuple[int, Block]],
    folder: pathlib.Path,
    clean: Mapping[str, str],
    times: list[float] | None = None,
) -> float | None:
    """Run blocks, printing one line each, until one fails.

    Args:
        times: receives the seconds of each block.
    Returns: seconds from the start to the end of the first block with `uv run`; None if there is none.
    Raises: ValueError with the end of its output if a block fails or takes longer than PATIENCE.
    """
    begun, first = time.monotonic(), None
    for number, block in chosen:
        started = time.monotonic()
        log = folder / f"block-{number}.txt"
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        with log.open("w") as out:
            settings = {"cwd": folder / "clone", "env": dict(clean), "stdout": out, "stderr": subprocess.STDOUT}
            try:
                code = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PATIENCE, **settings).returncode
            except subprocess.TimeoutExpired:
                code = None
        taken = time.monotonic() - started
        print(f"{number:3} {taken:8.1f} s  {block.title}", flush=True)
        if times is not None:
            times.append(taken)
        if code != 0:
            how = f"exit code {code}" if code is not None else f"a timeout after {PATIENCE:.0f} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise ValueError(f"expected block {number} (line {block.line}) to succeed, got {how} after:\n{tail}")
        if first is None and "uv run" in block.code:
            first = time.monotonic() - begun
    return first


def store(
    out: pathlib.Path, chosen: Sequence[Block], times: Sequence[float], installed: pathlib.Path, python: str
) -> None:
    """Write the time of each block and the machine's description as JSON."""
    record = {
        "date": datetime.date.today().isoformat(),
        "python": version_of(python),
        "processor": processor(),
        "cores": os.cpu_count(),
        "disk": sum(path.lstat().st_size for path in installed.rglob("*")),
        "blocks": [{"title": b.title, "seconds": round(t, 1)} for b, t in zip(chosen, times, strict=True)],
    }
    write_text(out, json.dumps(record, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """List or run the blocks. Returns: 1, after a sentence, if one fails or the first result comes too late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the blocks and run nothing")
    parser.add_argument("--cache", action="store_true", help="use this user's caches of pip and uv")
    parser.add_argument("--blocks", type=int, nargs="+", help="numbers as printed by --list")
    parser.add_argument("--python", default=shutil.which("python3.11") or sys.executable, help="a Python 3.11")
    parser.add_argument("--out", type=pathlib.Path, help="file for the time of each block")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds from install to first result")
    given = parser.parse_args(arguments)
    numbered = list(enumerate(blocks((ROOT / "README.md").read_text(), "bash"), 1))
    if given.list:
        for number, block in numbered:
            skipped = f"  [not run: {block.skipped}]" if block.skipped else ""
            print(f"{number:3} line {block.line:4}  {block.title}{skipped}")
        return 0
    if strangers := set(given.blocks or ()) - {number for number, block in numbered if not block.skipped}:
        parser.error(f"--blocks must be numbers of blocks that are run, got {sorted(strangers)}; see --list")
    try:
        with tempfile.TemporaryDirectory(prefix="readme-") as name:
            folder = pathlib.Path(name).resolve()
            clean = prepare(folder, given.python, given.cache)
            cloned = list(enumerate(blocks((folder / "clone" / "README.md").read_text(), "bash"), 1))
            chosen = [(n, b) for n, b in cloned if not b.skipped and n in (given.blocks or range(1, len(cloned) + 1))]
            times: list[float] = []
            first = run_blocks(chosen, folder, clean, times)
            if given.out is not None:
                store(given.out, [block for _, block in chosen], times, folder / "clone" / ".venv", given.python)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"check_readme: {error}", file=sys.stderr)
        return 1
    if first is None:
        return 0
    print(f"install to first result: {first:.0f} s (limit {given.limit:.0f})")
    if first > given.limit:
        print(f"check_readme: expected a first result within {given.limit:.0f} s, got {first:.0f}", file=sys.stderr)
    return int(first > given.limit)


if __name__ == "__main__":
    raise SystemExit(main())
