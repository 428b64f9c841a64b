"""What uv resolved on this machine is what the repository pins, to the file hash; and the tool that keeps the pins."""

import pathlib
import re
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
