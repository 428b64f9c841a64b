"""What tools/coverage_report.py says of the lines that ran: each rule is broken once."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("evals", "hashcore", "hashtrain", "sparse_decode", "sparse_serve")


@pytest.fixture(scope="module")
def tool(load):
    return load("tools", "coverage_report")


def files(tool, **ran):
    """A file of 100 lines in each package, of which so many ran."""
    paths = {package: f"packages/{package.replace('_', '-')}/src/{package}/a.py" for package in PACKAGES}
    return {path: tool.File(path, 100, ran.get(package, 90)) for package, path in paths.items()}


def test_enough_is_enough(tool):
    assert tool.complaints(tool.by_package(files(tool))) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_line_less_is_a_complaint_where_there_is_a_least(tool, package):
    said = tool.complaints(tool.by_package(files(tool, **{package: 89})))
    assert [line.partition(":")[0] for line in said] == ([] if tool.LEAST[package] is None else [package])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_was_not_measured_is_a_complaint(tool, package):
    left = {path: file for path, file in files(tool).items() if f"/{package}/" not in path}
    (said,) = tool.complaints(tool.by_package(left))
    assert said.startswith(f"{package}: expected its lines to be measured")


def test_lines_are_added_up_and_the_worst_file_comes_first(tool):
    more = {name: tool.File(name, 100, ran) for name, ran in (("packages/evals/src/evals/b.py", 10), ("tests/c.py", 0))}
    packages = tool.by_package(files(tool) | more)
    assert tool.share(packages["evals"]) == 50
    assert "b.py 90 of 100, a.py 10 of 100" in tool.table(packages)


def test_without_data_it_says_what_to_run(tool, tmp_path):
    with pytest.raises(SystemExit, match="pytest --cov"):
        tool.measured(tmp_path)


MODULE = """
import numba

@numba.njit(cache=True)
def compiled(x):
    y = x
    return y

def plain():
    return 1

if __name__ == "__main__":
    import subprocess, sys
    if len(sys.argv) == 1:
        subprocess.run([sys.executable, __file__, "inner"], check=True)
    else:
        plain()
"""


def test_what_counts_is_set_as_it_says(tool, tmp_path):
    """Lines that a process of a process runs count, lines of compiled functions do not."""
    (tmp_path / "one.py").write_text(MODULE)
    settings = (ROOT / "pyproject.toml").read_text()
    start = settings.index("[tool.coverage.run]")
    part = settings[start : settings.index("[tool.pytest", start)].replace("source_pkgs", "disable_warnings")
    (tmp_path / "pyproject.toml").write_text(part)
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "run", "--include=one.py", "one.py"], cwd=tmp_path, check=True)
    subprocess.run([*coverage, "combine", "-q"], cwd=tmp_path, check=True)
    found = tool.measured(tmp_path)["one.py"]
    assert found.lines == found.ran == 8


def test_what_is_left_out_is_what_numba_compiles():
    left_out = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]["omit"]
    for pattern in left_out:
        paths = list(ROOT.glob(f"packages/*/src/{pattern.removeprefix('*/')}"))
        assert paths
        assert all("numba" in path.read_text() for path in paths)
