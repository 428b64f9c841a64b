"""What uv resolved on this machine is what the repository pins, to the file hash; and the tool that keeps the pins."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parent.parent
APART = {"kvpress", "cachetools", "fire", "termcolor"}
"""Locked, but not among the requirements: of the group `kvpress`."""
PROJECTS = [tomllib.loads(p.read_text()) for p in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]]


@pytest.fixture(scope="module")
def pinned():
    """requirements.txt as {(name, version): hashes}."""
    pins = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if pin := re.match(r"([a-z0-9-]+)==([^\s;]+)", line):
            hashes = pins.setdefault(pin.groups(), set())
        elif found := re.search(r"--hash=(\S+)", line):
            hashes.add(found[1])
    return pins


def test_resolution_is_the_pinned_one(pinned):
    if not (ROOT / "uv.lock").exists():
        pytest.skip("no uv.lock: installed from requirements.txt")
    locked = {
        (package["name"], package["version"]): {
            f["hash"] for f in [*package.get("wheels", []), package.get("sdist")] if f
        }
        for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
        if "registry" in package["source"] and package["name"] not in APART
    }
    assert locked == pinned


def test_every_pin_has_a_sha256(pinned):
    assert len(pinned) > 50
    for pin, hashes in pinned.items():
        assert hashes, f"{pin} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", h) for h in hashes), pin


def test_constraints_are_the_pins(pinned):
    constraints = map(Requirement, PROJECTS[0]["tool"]["uv"]["constraint-dependencies"])
    assert sorted((c.name, str(c.specifier)) for c in constraints) == sorted((n, f"=={v}") for n, v in pinned)


def test_the_tool_that_keeps_the_pins_uses_the_pinned_package_and_every_python(pinned, load):
    (dependency,) = re.findall(
        r'^# dependencies = \["packaging==([^"]+)"\]', (ROOT / "tools/relock.py").read_text(), re.M
    )
    assert ("packaging", dependency) in pinned
    allowed = Requirement(f"python{PROJECTS[0]['project']['requires-python']}").specifier
    everything = {f"3.{minor}.{patch}" for minor in range(30) for patch in range(16)}
    assert set(allowed.filter(everything)) == load("tools", "relock").PYTHONS


# tools/relock.py, with a script in place of uv that resolves to $RESOLVED, or fails.

EXPORT = "alpha==1.0 \\\n    --hash=sha256:aa\nbeta==2.0 ; sys_platform == 'linux' \\\n    --hash=sha256:bb\n"
UV = """#!/bin/sh
set -eu
case "$1" in
lock) [ -z "${FAIL-}" ] || { echo "no solution" >&2; exit 1; }
      echo "from $(ls packages/one)" > uv.lock ;;
export) printf '%s' "$RESOLVED" ;;
esac
"""
PROJECT = '[tool.uv]\npackage = false\nexclude-newer = "2026-01-02T00:00:00Z"\n\n[tool.uv.workspace]\nmembers = []\n'
BLOCK = 'constraint-dependencies = [\n    "alpha==1.0",\n    "beta==2.0",\n]\n'


@pytest.fixture
def relock(tmp_path):
    """A checkout with a stale lock, and a function that runs the tool in it."""
    checkout = tmp_path / "checkout"
    (checkout / "tools").mkdir(parents=True)
    (checkout / "packages" / "one").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "relock.py", checkout / "tools")
    (checkout / "packages" / "one" / "pyproject.toml").write_text("")
    (checkout / "pyproject.toml").write_text(PROJECT)
    (checkout / "requirements.txt").write_text(EXPORT)
    (checkout / "uv.lock").write_text("mine")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV)
    uv.chmod(0o755)

    def run(*arguments, **variables):
        path = f"{uv.parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "RESOLVED": EXPORT} | variables
        command = [sys.executable, "tools/relock.py", *arguments]
        return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)

    run.checkout = checkout
    return run


def contents(checkout):
    return {path.name: path.read_text() for path in checkout.iterdir() if path.is_file()}


def test_relock_writes_date_constraints_and_lock(relock):
    done = relock("2026-03-04")
    assert (done.returncode, done.stderr) == (0, "")
    dated = PROJECT.replace("2026-01-02", "2026-03-04").replace('Z"\n', 'Z"\n' + BLOCK)
    lock = "from pyproject.toml\n"
    assert contents(relock.checkout) == {"pyproject.toml": dated, "requirements.txt": EXPORT, "uv.lock": lock}
    assert relock("--check").returncode == 0
    before = contents(relock.checkout)
    assert relock().returncode == 0
    assert contents(relock.checkout) == before


@pytest.mark.parametrize("arguments", [["2026-03-04"], ["--check"]])
def test_relock_that_fails_changes_nothing(relock, arguments):
    assert relock("2026-01-02").returncode == 0
    before = contents(relock.checkout)
    done = relock(*arguments, FAIL="1")
    assert done.returncode == 1
    assert "no solution" in done.stderr
    assert contents(relock.checkout) == before


@pytest.mark.parametrize(
    "resolved",
    [
        EXPORT.replace("1.0", "1.1"),
        EXPORT.replace("aa", "ac"),
        EXPORT.partition("beta")[0],
        EXPORT.replace("'linux'", "'win32'"),
        EXPORT.replace("==", "!=").replace("!=", "==", 2),
        EXPORT.replace("'linux'", "'linux' and python_full_version >= '3.12'"),
        EXPORT.replace(" ; sys_platform == 'linux'", ""),
        EXPORT.replace("sys_platform == 'linux'", "'lin' in sys_platform"),
    ],
)
def test_check_sees_drift_of_version_hash_package_and_environment(relock, resolved):
    assert relock("2026-01-02").returncode == 0
    before = contents(relock.checkout)
    done = relock("--check", RESOLVED=resolved)
    assert done.returncode == 1
    assert done.stderr.startswith("requirements.txt does not match the resolution")
    assert contents(relock.checkout) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(m == 'a' and s == 'linux') or (m == 'b' and s == 'linux')", "(m == 'a' or m == 'b') and s == 'linux'"),
        ("s == 'linux' and v >= '3.12'", "v >= '3.12' and s == 'linux'"),
        ("v == '3.12.*'", "v >= '3.12' and v < '3.13'"),
        ("v >= '3.11.5'", "v > '3.11.4'"),
        ("s == 'linux'", "s == 'linux' and v < '3.15'"),
    ],
)
def test_check_takes_another_wording_of_a_marker(relock, one, other):
    """uv 0.13.9 writes the first of these as the second, where older ones did not."""

    def export(marker):
        for short, name in [("m ", "platform_machine "), ("s ", "sys_platform "), ("v ", "python_full_version ")]:
            marker = re.sub(rf"\b{short}", name, marker)
        return EXPORT.replace("sys_platform == 'linux'", marker)

    assert relock("2026-01-02", RESOLVED=export(one)).returncode == 0
    done = relock("--check", RESOLVED=export(other))
    assert (done.returncode, done.stderr) == (0, "the pins hold\n")


def test_check_sees_a_constraint_edited_by_hand(relock):
    assert relock("2026-01-02").returncode == 0
    project = relock.checkout / "pyproject.toml"
    project.write_text(project.read_text().replace("alpha==1.0", "alpha==1.1"))
    done = relock("--check")
    assert done.returncode == 1
    assert done.stderr.startswith("constraint-dependencies in pyproject.toml does not match")


@pytest.mark.parametrize("arguments", [["yesterday"], ["20260304"], ["2026-03-04", "--check"]])
def test_relock_refuses_other_arguments(relock, arguments):
    done = relock(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
