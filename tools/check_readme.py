"""Run the commands of README.md like a newcomer: in a fresh clone, with Python 3.11 and pip and nothing else.

    uv run tools/check_readme.py                                 # exit code 1 at the first block that fails
    uv run tools/check_readme.py --out docs/results/readme.json  # and store the times: a table of README.md

Every ```bash block is run as it stands, in the order of the file, from the root of the clone, each in its own shell,
but those that name something of the reader's own, `path/or/...`, or are directly below `<!-- not run: REASON -->`. HOME
and all caches are empty; of the environment only what reaches the package index is kept (REACH). From the start to the
end of the first block with `uv run`, LIMIT seconds may pass.
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
from typing import NamedTuple

from evals.machine import processor
from hashtrain.files.atomic import write_text

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 480.0
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\n\Z")
REACH = re.compile(
    r"(PIP|UV)_(DEFAULT_|EXTRA_)?(INDEX|TRUSTED_HOST|CERT|CONFIG_FILE).*|(HTTPS?|NO|ALL)_PROXY|SSL_CERT_\w+", re.I
)


class Block(NamedTuple):
    """One fenced block of a Markdown text, and whether it is left out."""

    language: str
    code: str
    skipped: bool

    @property
    def title(self) -> str:
        """Its first line; " ..." marks further lines."""
        first, goes_on, _ = self.code.strip().partition("\n")
        return first + " ..." * bool(goes_on)


def blocks(text: str, language: str | None = None) -> list[Block]:
    """Return the fenced blocks of a Markdown text, of one language or all, in order."""
    found = (
        Block(fence[1], fence[2], bool(NOT_RUN.search(text, 0, fence.start())) or "path/or/" in fence[2])
        for fence in FENCE.finditer(text)
    )
    return [block for block in found if language in (None, block.language)]


def prepare(folder: pathlib.Path, python: str) -> dict[str, str]:
    """Clone, create a virtual environment, and return the environment variables of a newcomer's shell."""
    if not (version := version_of(python)).startswith("3.11."):
        raise ValueError(f"expected Python 3.11, got {version or 'none'} at {python}; give --python")
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    path = f"{folder / 'python' / 'bin'}:/usr/bin:/bin"
    if found := shutil.which("uv", path=path):
        raise ValueError(f"expected a machine without uv, got {found}; run this where it is not in /usr/bin")
    # A virtual environment instead of the system's Python, so that `pip install` needs no rights.
    subprocess.run([python, "-m", "venv", folder / "python"], check=True)
    subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, folder / "clone"], check=True)
    kept = {name: value for name, value in os.environ.items() if REACH.fullmatch(name)}
    return {**kept, "PATH": path, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "LANG": "C.UTF-8"}


def version_of(python: str) -> str:
    command = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def run_blocks(chosen: list[Block], folder: pathlib.Path, variables: dict[str, str]) -> list[float]:
    """Run blocks and return the seconds of each. Raises: ValueError with the end of the output of one that fails."""
    times: list[float] = []
    for block in chosen:
        began = time.monotonic()
        command = ["bash", "-euo", "pipefail", "-c", block.code]
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=folder / "clone", env=variables, **how)
        times.append(time.monotonic() - began)
        print(f"{times[-1]:8.1f} s  {block.title}", flush=True)
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-25:])
            raise ValueError(f"expected `{block.title}` to succeed, got exit code {done.returncode} after:\n{tail}")
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=shutil.which("python3.11") or sys.executable, help="a Python 3.11")
    parser.add_argument("--out", type=pathlib.Path, help="file for the time of each block")
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="readme-") as name:
            folder = pathlib.Path(name).resolve()
            variables = prepare(folder, given.python)
            chosen = [b for b in blocks((folder / "clone" / "README.md").read_text(), "bash") if not b.skipped]
            times = run_blocks(chosen, folder, variables)
            disk = sum(path.lstat().st_size for path in (folder / "clone" / ".venv").rglob("*"))
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"check_readme: {error}", file=sys.stderr)
        return 1
    if given.out is not None:
        taken = [{"title": b.title, "seconds": round(t, 1)} for b, t in zip(chosen, times, strict=True)]
        machine = {"python": version_of(given.python), "processor": processor(), "cores": os.cpu_count()}
        record = {"date": datetime.date.today().isoformat(), **machine, "disk": disk, "blocks": taken}
        write_text(given.out, json.dumps(record, indent=1) + "\n")
    first = sum(times[: next(i for i, block in enumerate(chosen) if "uv run" in block.code) + 1])
    print(f"install to first result: {first:.0f} s (limit {LIMIT:.0f})")
    return int(first > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
