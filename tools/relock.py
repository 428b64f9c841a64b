"""Resolve the workspace and keep its pins: requirements.txt and the constraints in pyproject.toml.

    uv run --no-project tools/relock.py 2026-11-15    # upgrade to versions published before that day
    uv run --no-project tools/relock.py               # same day: after a change of dependencies
    uv run --no-project tools/relock.py --check       # change nothing; exit 1 if the pins have drifted

uv.lock names the index in every entry, so it is not committed (docs/adr/0001-host-free-pins.md). Every resolution
here runs in a temporary copy of the pyproject files: a failure or a kill leaves the checkout unchanged.
"""

import argparse
import collections
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
RELOCK = "uv run --no-project tools/relock.py"
# kvpress declares a conflict with our version of transformers, which pip enforces.
EXPORT = (
    "export --frozen -q --all-packages --all-groups --no-group kvpress --all-extras --no-emit-workspace --no-header "
    "--no-annotate"
)

CUTOFF = re.compile(r'^exclude-newer = "(\d{4}-\d\d-\d\d)T00:00:00Z"\n', re.M)
CONSTRAINTS = re.compile(r"^constraint-dependencies = \[\n(?:    .*\n)*\]\n", re.M)
PIN = re.compile(r"^([a-z0-9-]+)==([^\s;\\]+)(?: ; ([^\\\n]+?))? ?\\?$")
HASH = re.compile(r"--hash=(\S+)")


class Pin(NamedTuple):
    """One requirement of the hashed export."""

    name: str
    version: str
    marker: str
    hashes: frozenset[str]


def parse(requirements: str) -> list[Pin]:
    """Parse the pins of an export, in its order."""
    pins = []
    for line in requirements.splitlines():
        if found := PIN.match(line):
            pins.append(Pin(found[1], found[2], found[3] or "", frozenset()))
        elif found := HASH.search(line):
            pins[-1] = pins[-1]._replace(hashes=pins[-1].hashes | {found[1]})
        elif line.strip():
            raise SystemExit(f"expected `name==version` and hashes in the requirements, got {line!r}; run {RELOCK}")
    return pins


def constraint_block(pins: list[Pin]) -> str:
    """Return the pins as constraints, with markers only where a package has two versions."""
    count = collections.Counter(pin.name for pin in pins)
    lines = [f"{p.name}=={p.version}" + (f" ; {p.marker}" if count[p.name] > 1 else "") for p in pins]
    return "constraint-dependencies = [\n" + "".join(f'    "{line}",\n' for line in lines) + "]\n"


def drifted(pinned: list[Pin], resolved: list[Pin]) -> list[str]:
    """Return the names of packages that differ in version or file hashes; how uv writes markers may change."""
    old, new = ({(pin.name, pin.version, pin.hashes) for pin in pins} for pins in (pinned, resolved))
    return sorted({name for name, *_ in old ^ new})


def resolve(project: str) -> tuple[str, str]:
    """Resolve with this text as the root pyproject.toml; return (requirements, uv.lock)."""
    with tempfile.TemporaryDirectory(prefix="relock-") as name:
        copy = pathlib.Path(name)
        (copy / "pyproject.toml").write_text(project)
        for member in ROOT.glob("packages/*/pyproject.toml"):
            target = copy / member.relative_to(ROOT)
            target.parent.mkdir(parents=True)
            shutil.copy(member, target)
        uv("lock --quiet", copy)
        return uv(EXPORT, copy), (copy / "uv.lock").read_text()


def uv(command: str, directory: pathlib.Path) -> str:
    try:
        done = subprocess.run(["uv", *command.split()], cwd=directory, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit("expected `uv` on PATH, found none; `pip install uv` installs it") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"`uv {command.split()[0]}` failed, nothing was changed:\n{error.stderr.strip()}") from None
    return done.stdout


def check() -> str | None:
    """Return a sentence about what has drifted, or None."""
    project, pinned = (ROOT / "pyproject.toml").read_text(), parse((ROOT / "requirements.txt").read_text())
    if constraint_block(pinned) not in project:
        return f"constraint-dependencies in pyproject.toml does not match requirements.txt; run {RELOCK}"
    if drift := drifted(pinned, parse(resolve(project)[0])):
        return f"requirements.txt does not match the resolution, {', '.join(drift)} differ; run {RELOCK}"
    return None


def relock(date: datetime.date | None) -> None:
    """Resolve without constraints, check that the pins reproduce the same resolution, and write them."""
    project = CONSTRAINTS.sub("", (ROOT / "pyproject.toml").read_text())
    cutoff = CUTOFF.search(project)
    if cutoff is None:
        raise SystemExit('expected a line `exclude-newer = "YYYY-MM-DDT00:00:00Z"` in pyproject.toml, found none')
    date_line = f'exclude-newer = "{date or cutoff[1]}T00:00:00Z"\n'
    requirements, _ = resolve(CUTOFF.sub(date_line, project))
    pinned = CUTOFF.sub(lambda _: date_line + constraint_block(parse(requirements)), project)
    again, lock = resolve(pinned)
    if again != requirements:
        raise SystemExit("the constraints do not reproduce the resolution they came from; nothing was changed")
    for name, text in (("requirements.txt", requirements), ("pyproject.toml", pinned), ("uv.lock", lock)):
        (ROOT / f".{name}").write_text(text)
        os.replace(ROOT / f".{name}", ROOT / name)  # the whole file or none of it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("date", nargs="?", type=datetime.date.fromisoformat, help="versions published before that day")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the pins have drifted")
    given = parser.parse_args()
    if not given.check:
        relock(given.date)
        return 0
    drift = check()
    print(drift or "the pins hold", file=sys.stderr)
    return int(drift is not None)


if __name__ == "__main__":
    sys.exit(main())
