"""Report how many lines of each package the tests ran, and the files with the most lines that did not run.

    uv run pytest --cov --cov-report=
    uv run tools/coverage_report.py

pyproject.toml (tool.coverage) sets what counts: functions compiled by numba are left out, because their lines are not
traced. Exit code 1 if a package has less than its share in LEAST.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEAST = {"evals": None, "hashcore": 90, "hashtrain": 90, "sparse_decode": 90, "sparse_serve": None}
"""Per cent of lines; None: reported only, because the tests need results, or an engine that is not installed here."""
SHOWN = 3  # files per package, those with the most lines that did not run


class File(NamedTuple):
    """A file's number of counted lines, and of those that ran."""

    path: str
    lines: int
    ran: int


def measured(root: pathlib.Path) -> dict[str, File]:
    """Return the last measurement, by path below the checkout."""
    with tempfile.TemporaryDirectory() as name:
        out = pathlib.Path(name) / "coverage.json"
        command = [sys.executable, "-m", "coverage", "json", "-q", "-o", str(out)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise SystemExit(f"expected coverage's data, got {said}; run `uv run pytest --cov --cov-report=` first")
        files = json.loads(out.read_text())["files"]
    return {p: File(p, f["summary"]["num_statements"], f["summary"]["covered_lines"]) for p, f in files.items()}


def by_package(files: dict[str, File]) -> dict[str, list[File]]:
    """Return the files of each package, those with the most lines that did not run first."""
    found: dict[str, list[File]] = {package: [] for package in LEAST}
    for file in sorted(files.values(), key=lambda file: file.ran - file.lines):
        for package in LEAST:
            if file.path.replace("\\", "/").startswith(f"packages/{package.replace('_', '-')}/src/"):
                found[package].append(file)
    return found


def share(files: list[File]) -> float:
    """Return the per cent of lines that ran."""
    return 100 * sum(file.ran for file in files) / max(1, sum(file.lines for file in files))


def table(packages: dict[str, list[File]]) -> str:
    rows = [f"{'package':15}{'lines':>7}{'ran':>9}  most lines that did not run"]
    for package, files in packages.items():
        worst = [f for f in files[:SHOWN] if f.ran < f.lines]
        said = ", ".join(f"{pathlib.PurePath(f.path).name} {f.lines - f.ran} of {f.lines}" for f in worst)
        rows.append(f"{package:15}{sum(f.lines for f in files):7}{share(files):8.1f}%  {said}")
    return "\n".join(rows)


def complaints(packages: dict[str, list[File]]) -> list[str]:
    wrong = []
    for package, files in packages.items():
        least = LEAST[package]
        if not files:
            wrong.append(f"{package}: expected its lines to be measured, got none; run the tests from the checkout")
        elif least is not None and share(files) < least:
            wrong.append(
                f"{package}: expected the tests to run {least} % of its lines, got {share(files):.2f}; add tests"
            )
    return wrong


def main(root: pathlib.Path = ROOT) -> int:
    packages = by_package(measured(root))
    print(table(packages))
    wrong = complaints(packages)
    for line in wrong:
        print(f"coverage_report: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
