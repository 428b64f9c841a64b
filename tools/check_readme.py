"""Run the commands of README.md like a newcomer: in a fresh clone, with Python 3.11 and pip and nothing else.

    uv run tools/check_readme.py                                 # exit code 1 at the first block that fails
    uv run tools/check_readme.py --blocks 2 --out docs/results/readme.json  # the first two; store what README.md shows

Every ```bash block is run as it stands, in order, from the root of the clone, each in its own shell, except those that
name something of the reader's own, `path/or/...`, or are below `<!-- not run: REASON -->`. HOME and all caches are
empty; of the environment only what reaches the package index is kept.
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
from typing import Any

from evals.machine import processor
from hashtrain.files.atomic import write_text

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?^```bash\n(.*?)^```$", re.M | re.S)
REACH = re.compile(
    r"(PIP|UV)_(DEFAULT_|EXTRA_)?(INDEX|TRUSTED_HOST|CERT|CONFIG_FILE).*|(HTTPS?|NO|ALL)_PROXY|SSL_CERT_\w+", re.I
)


def last_table(lines: list[str]) -> list[list[str]]:
    """Return the cells of the last table that rich drew in these lines, header first; none if there is no table."""
    start = max((at for at, line in enumerate(lines) if line.startswith("┏")), default=len(lines))
    rows = [line.strip() for line in lines[start:] if line[0] in "┃│"]
    return [[cell.strip() for cell in re.split("[┃│]", row[1:-1])] for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=shutil.which("python3.11") or sys.executable, help="a Python 3.11")
    parser.add_argument("--blocks", type=int, help="how many blocks to run; default: all")
    parser.add_argument("--out", type=pathlib.Path, help="file for the time of each block and the last table it prints")
    given = parser.parse_args()
    taken: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="readme-") as name:
        folder = pathlib.Path(name).resolve()
        path = f"{folder / 'python' / 'bin'}:/usr/bin:/bin"
        if found := shutil.which("uv", path=path):
            parser.error(f"expected a machine without uv, got {found}; run this where it is not in /usr/bin")
        (folder / "home").mkdir()
        # A virtual environment instead of the system's Python, so that `pip install` needs no rights.
        subprocess.run([given.python, "-m", "venv", folder / "python"], check=True)
        subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, folder / "clone"], check=True)
        kept = {name: value for name, value in os.environ.items() if REACH.fullmatch(name)}
        kept |= {"PATH": path, "HOME": str(folder / "home"), "LANG": "C.UTF-8"}
        found = BLOCK.findall((folder / "clone" / "README.md").read_text())
        blocks = [code for skipped, code in found if not skipped and "path/or/" not in code]
        for code in blocks[: given.blocks]:
            title, goes_on, _ = code.strip().partition("\n")
            began, lines, command = time.monotonic(), list[str](), ["bash", "-euo", "pipefail", "-c", code]
            how: dict[str, Any] = {"cwd": folder / "clone", "env": kept, "stdin": subprocess.DEVNULL}
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **how) as running:
                assert running.stdout is not None
                for line in running.stdout:
                    print(line, end="", flush=True)
                    lines.append(line)
            seconds = round(time.monotonic() - began, 1)
            taken.append({"title": title + " ..." * bool(goes_on), "seconds": seconds, "table": last_table(lines)})
            print(taken[-1], flush=True)
            if running.returncode:
                print(f"check_readme: `{title}` ended with exit code {running.returncode}", file=sys.stderr)
                return 1
        disk = sum(path.lstat().st_size for path in (folder / "clone" / ".venv").rglob("*"))
    if given.out is not None:
        machine = {"python": "3.11", "processor": processor(), "cores": os.cpu_count(), "disk": disk}
        record = {"date": datetime.date.today().isoformat(), **machine, "blocks": taken}
        write_text(given.out, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
