"""Run the commands of README.md like a newcomer: in a fresh clone, with Python 3.11 and pip and nothing else.

    uv run tools/check_readme.py                                 # exit code 1 at the first block that fails
    uv run tools/check_readme.py --out docs/results/readme.json  # and store times and output, for README.md

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

from evals.machine import processor
from hashtrain.files.atomic import write_text

LINES = 40  # the last ones of what a block prints, which are stored
ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- not run: .+? -->\n)?^```bash\n(.*?)^```$", re.M | re.S)
REACH = re.compile(
    r"(PIP|UV)_(DEFAULT_|EXTRA_)?(INDEX|TRUSTED_HOST|CERT|CONFIG_FILE).*|(HTTPS?|NO|ALL)_PROXY|SSL_CERT_\w+", re.I
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=shutil.which("python3.11") or sys.executable, help="a Python 3.11")
    parser.add_argument("--out", type=pathlib.Path, help="file for the time of each block")
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
        for skipped, code in BLOCK.findall((folder / "clone" / "README.md").read_text()):
            if skipped or "path/or/" in code:
                continue
            title, goes_on, _ = code.strip().partition("\n")
            began, command = time.monotonic(), ["bash", "-euo", "pipefail", "-c", code]
            how = {"cwd": folder / "clone", "env": kept, "stdin": subprocess.DEVNULL, "text": True}
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how) as process:
                printed = [print(line, end="", flush=True) or line.rstrip() for line in process.stdout or ()]
            taken.append({"title": title + " ..." * bool(goes_on), "seconds": round(time.monotonic() - began, 1)})
            print(taken[-1], flush=True)
            taken[-1]["printed"] = printed[-LINES:]
            if process.returncode:
                print(f"check_readme: `{title}` ended with exit code {process.returncode}", file=sys.stderr)
                return 1
            if given.out is not None:
                disk = sum(path.lstat().st_size for path in (folder / "clone" / ".venv").rglob("*"))
                machine = {"python": "3.11", "processor": processor(), "cores": os.cpu_count(), "disk": disk}
                record = {"date": datetime.date.today().isoformat(), **machine, "blocks": taken}
                write_text(given.out, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
