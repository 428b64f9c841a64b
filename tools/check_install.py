"""Install each package's wheel alone in a clean environment, check the installed packages, and run its own tests there.

    uv run --no-project tools/check_install.py                          # a part of each package's tests
    uv run --no-project tools/check_install.py --all                    # every test of every package: 11 minutes
    uv run --no-project tools/check_install.py --all --python 3.13      # the same under another Python
    uv run --no-project tools/check_install.py --python 3.13 --if-found --package hashcore
    uv run --no-project tools/check_install.py --all --lowest           # with the oldest versions that are allowed

The wheels are built and inspected here (tools/check_wheels.py). An environment gets one of them, those of ours that it
depends on, and the pinned versions of everything else, without extras. hashcore must bring only numpy and numba (with
llvmlite), no torch, and less than LIMIT bytes. --lowest ignores the pins: our direct dependencies get the lowest
version that they allow, the others any version that fits. Exit code 1 if anything is wrong.
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from typing import Any

import check_wheels

ROOT = check_wheels.ROOT
HASHCORE_BRINGS = {"hashcore", "llvmlite", "numba", "numpy"}
LIMIT = 300_000_000  # bytes, of hashcore with all its dependencies
# Tests that run without --all: files that need no model and finish within seconds.
QUICK = {
    "evals": ["test_metrics.py", "test_parquet.py"],
    "hashcore": ["test_codes.py", "test_index_file.py", "test_readme_code.py"],
    "hashtrain": ["test_loss_and_target.py", "test_hub.py"],
    "sparse_decode": ["test_budget.py", "test_positions.py"],
    "sparse_serve": ["test_settings.py", "test_batch.py"],
}
COMPILER = "cuda.core"  # compiles kernels; hashtrain brings it on Linux x86-64
RUNNERS = {"hypothesis", "pytest", "pytest-xdist"}  # always installed in their pinned versions
AWAY = ("--directory", tempfile.gettempdir())
LIST = ("--quiet", "--format", "json")


def uv(*arguments: str | pathlib.Path) -> str:
    return subprocess.run(["uv", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def run(command: list[str | pathlib.Path], folder: pathlib.Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, whose sources would otherwise be imported."""
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")}
    return subprocess.run(command, cwd=folder, env=os.environ | settings, text=True, **how)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(package: str) -> dict[str, str]:
    """Return the dependencies of a package of ours, without extras: each requirement under its normalised name."""
    texts = check_wheels.project(check_wheels.folders()[package])["dependencies"]
    return {normal(re.split(r"[^\w.-]", text)[0]): text for text in texts}


def ours(package: str) -> set[str]:
    """Return the packages of this repository that a package needs, including itself."""
    folders, found, new = check_wheels.folders(), set(), {package}
    while new:
        found |= new
        new = {other.replace("-", "_") for name in new for other in wanted(name)} & folders.keys() - found
    return found


def others(package: str) -> dict[str, set[str]]:
    """Return the direct third-party dependencies of a package and of those of ours that it needs, by name."""
    found: dict[str, set[str]] = {}
    for one in ours(package):
        for name, text in wanted(one).items():
            if name.replace("-", "_") not in check_wheels.folders():
                found.setdefault(name, set()).add(text)
    return found


@functools.cache
def pins() -> set[tuple[str, str]]:
    """Return the names and versions of requirements.txt."""
    return set(re.findall(r"^([a-z0-9-]+)==([^\s;\\]+)", (ROOT / "requirements.txt").read_text(), re.M))


def interpreter(asked: str) -> str | None:
    """Find a Python by version or path: with uv, in pyenv's folder, or by letting uv download it."""
    if os.sep in asked:
        return asked
    find = ["uv", "python", "find", "--no-project", asked]
    found = subprocess.run(find, capture_output=True, text=True)
    if found.returncode == 0:
        return found.stdout.strip()
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    if kept := sorted(pyenv.glob(f"versions/{asked}*/bin/python")):
        return str(kept[-1])
    subprocess.run(["uv", "python", "install", "--quiet", asked], capture_output=True)
    found = subprocess.run(find, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None


def versions(package: str, lowest: bool) -> list[str | pathlib.Path]:
    """Return uv's options that decide the versions of third-party packages."""
    if not lowest:
        return ["--constraints", ROOT / "requirements.txt"]
    day = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-newer"]
    # Outside the workspace, whose settings include the pins. For uv the requirements of a wheel are not direct ones.
    named = sorted(text for texts in others(package).values() for text in texts)
    return [*AWAY, "--resolution", "lowest-direct", "--exclude-newer", day, *named]


def environment(package: str, wheels: pathlib.Path, folder: pathlib.Path, python: str, lowest: bool) -> pathlib.Path:
    """Create an environment with the package's wheel and its dependencies, and return its interpreter."""
    uv("venv", "--quiet", "--no-project", "--clear", "--python", python, folder)
    inside = next(path for path in (folder / "bin" / "python", folder / "Scripts" / "python.exe") if path.exists())
    files = [check_wheels.made(wheels, name, "*.whl") for name in sorted(ours(package))]
    # Our packages have no pins, so none may come from an index: each is given as a file.
    uv("pip", "install", "--quiet", "--python", inside, *versions(package, lowest), *files)
    return inside


def brought(package: str, listed: dict[str, str], size: int, lowest: bool = False) -> list[str]:
    """Return what is wrong with an environment that has these versions and this many bytes."""
    own, wrong = {normal(name) for name in ours(package)}, []
    if (got := listed.keys() & {normal(name) for name in check_wheels.folders()}) != own:
        wrong.append(f"{package}: expected {sorted(own)} of ours, got {sorted(got)}; look at its dependencies")
    loose = sorted(" ".join(one) for one in listed.items() if one[0] not in own and one not in pins())
    if loose and not lowest:
        wrong.append(f"{package}: expected what requirements.txt pins, got {', '.join(loose)}; run tools/relock.py")
    if package == "hashcore" and listed.keys() != HASHCORE_BRINGS:
        wrong.append(f"hashcore: expected {sorted(HASHCORE_BRINGS)}, got {sorted(listed)}; look at its dependencies")
    if package == "hashcore" and size >= LIMIT:
        wrong.append(f"hashcore: expected less than {LIMIT / 1e6:.0f} MB, got {size / 1e6:.0f}; what does it bring?")
    return wrong


def floors(package: str, listed: dict[str, str]) -> str:
    """Return the installed versions of the direct dependencies, as one line."""
    return ", ".join(f"{name} {listed[name]}" for name in sorted(others(package)))


def starts(package: str, python: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Import the installed package, run its commands with --help, and return what is wrong."""
    where = run([python, "-c", f"import {package}; print({package}.__file__)"], folder, capture_output=True)
    if where.returncode or not pathlib.Path(where.stdout.strip()).is_relative_to(folder):
        got = where.stdout or where.stderr
        return [f"{package}: expected to import what is installed, got {got}; unset PYTHONPATH"]
    wrong = []
    for command in check_wheels.project(check_wheels.folders()[package]).get("scripts", {}):
        done = run([python.parent / command, "--help"], folder, capture_output=True)
        if done.returncode or "usage" not in done.stdout.lower():
            wrong.append(f"{package}: expected `{command} --help` to say its usage, got {done.stderr or done.stdout!r}")
    if "hashtrain" in ours(package) and (sys.platform, platform.machine()) == ("linux", "x86_64"):
        done = run([python, "-c", f"import {COMPILER}"], folder, capture_output=True)
        if done.returncode:
            wrong.append(f"{package}: expected to import {COMPILER}, which CUDA needs, got {done.stderr.strip()!r}")
    return wrong


def tests(package: str, python: pathlib.Path, folder: pathlib.Path, whole: bool) -> list[str]:
    """Run the package's tests, or the quick ones, on the installed package; return what is wrong."""
    pinned = [f"{name}=={version}" for name, version in sorted(pins()) if name in RUNNERS]
    uv("pip", "install", "--quiet", *AWAY, "--python", python, *pinned)
    place, chosen = check_wheels.folders()[package] / "tests", None if whole else QUICK[package]
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    options += ["-m", "not full"] if whole else ["-n", "0"]  # a second process would import and compile the same again
    files = [place] if chosen is None else [place / name for name in chosen]
    if run([python, "-m", "pytest", *options, *files], folder).returncode:
        return [f"{package}: expected its tests to pass with its own dependencies alone, they failed"]
    return []


def check(package: str, wheels: pathlib.Path, python: str, whole: bool, lowest: bool) -> list[str]:
    """Check one package and return everything that is wrong."""
    folder = wheels / "environment"  # one path for all, so that compiled bytecode is reused
    inside = environment(package, wheels, folder, python, lowest)
    listed = {normal(one["name"]): one["version"] for one in json.loads(uv("pip", "list", *LIST, "--python", inside))}
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    size = size if package == "hashcore" else 0
    print(f"{package}: {len(listed)} packages" + (f" in {size / 1e6:.0f} MB" if size else ""), flush=True)
    if lowest:
        print(f"{package}: the lowest versions: {floors(package, listed)}", flush=True)
    wrong = brought(package, listed, size, lowest) or starts(package, inside, folder)
    return wrong or tests(package, inside, folder, whole)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run every test, not only the quick ones")
    parser.add_argument("--lowest", action="store_true", help="the lowest versions allowed, not the pinned ones")
    parser.add_argument("--python", default=sys.executable, help="a version or the path of an interpreter")
    parser.add_argument("--if-found", action="store_true", help="succeed if there is no such Python")
    parser.add_argument("--package", action="append", choices=sorted(QUICK), help="only this one; may be repeated")
    options, begun = parser.parse_args(arguments), time.monotonic()
    python = interpreter(options.python)
    if python is None:
        print(f"check_install: Python {options.python} is neither installed nor available here; nothing was run on it")
        return int(not options.if_found)
    with tempfile.TemporaryDirectory() as name:
        wheels = pathlib.Path(name).resolve()
        check_wheels.build(wheels)
        wrong = check_wheels.complaints(wheels)
        for package in options.package or check_wheels.folders():
            wrong += check(package, wheels, python, options.all, options.lowest)
            print(f"{package}: done after {time.monotonic() - begun:.0f} s, {python}", flush=True)
    for line in wrong:
        print(f"check_install: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
