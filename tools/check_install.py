"""Build each package's wheel, look into it, install it alone in a clean environment, and run its own tests there.

    uv run --no-project tools/check_install.py                        # a part of each package's tests
    uv run --no-project tools/check_install.py --all --python 3.13    # all of them, under another Python

A wheel is built from the source archive and must contain exactly what git tracks below the package's src, and the
licence. An environment gets one of them, those of ours that it depends on, and the pinned versions of everything else,
without extras. hashcore must bring only numpy and numba (with llvmlite) and less than LIMIT bytes. Exit code 1 if
anything is wrong.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
HASHCORE_BRINGS = {"hashcore", "llvmlite", "numba", "numpy"}
LIMIT = 300_000_000  # bytes, of hashcore with all its dependencies
LICENCES = ("LICENSE", "NOTICE")
QUICK = {
    "evals": ["test_metrics.py"],
    "hashcore": ["test_codes.py", "test_index_file.py", "test_readme_code.py"],
    "hashtrain": ["test_loss_and_target.py", "test_hub.py"],
    "sparse_decode": ["test_budget.py"],
    "sparse_serve": ["test_settings.py"],
}
"""Tests that run without --all: files that need no model and finish within seconds."""
RUNNERS = ("hypothesis", "pytest", "pytest-xdist")


def folders() -> dict[str, pathlib.Path]:
    """Return the folder of each package, by import name."""
    return {path.parent.name.replace("-", "_"): path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}


def ours(package: str) -> set[str]:
    """Return the packages of this repository that a package needs, including itself."""
    text = (folders()[package] / "pyproject.toml").read_text()
    needed = [re.split(r"[^\w.-]", one)[0].replace("-", "_") for one in tomllib.loads(text)["project"]["dependencies"]]
    return {package}.union(*(ours(one) for one in needed if one in folders()))


def made(wheels: pathlib.Path, package: str) -> pathlib.Path:
    """Return the only wheel of a package."""
    (found,) = wheels.glob(f"{package}-*.whl")
    return found


def looked_into(package: str, wheel: pathlib.Path) -> list[str]:
    """Return what is wrong with a wheel's content."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(name.partition("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(f"{info}/METADATA").decode()
        licences = {one: archive.read(at) for one in LICENCES if (at := f"{info}/licenses/{one}") in names}
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src"]
    listed = subprocess.run(git, cwd=folders()[package], check=True, capture_output=True, text=True).stdout
    tracked = {at[4:] for at in listed.split("\0") if at and (folders()[package] / at).is_file()}
    held = {name for name in names if not name.startswith(f"{info}/")}
    wrong = []
    if differ := sorted(held ^ tracked):
        wrong.append(f"{package}: expected in the wheel what git tracks below src, these differ: {', '.join(differ)}")
    if f"{package}/py.typed" not in held:
        wrong.append(f"{package}: expected py.typed in the wheel, found none")
    if licences != {one: (ROOT / one).read_bytes() for one in LICENCES}:
        wrong.append(f"{package}: expected the repository's own {' and '.join(LICENCES)} in the wheel")
    if "Private :: Do Not Upload" not in metadata:
        wrong.append(f"{package}: expected the classifier that forbids uploads; others own these names")
    return wrong


def uv(*arguments: str | pathlib.Path) -> str:
    return subprocess.run(["uv", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def installed(package: str, wheels: pathlib.Path, python: str, whole: bool) -> list[str]:
    """Install a package alone, and return what is wrong with it there."""
    folder = wheels / "environment"  # one path for all, so that compiled bytecode is reused
    uv("venv", "--quiet", "--no-project", "--clear", "--python", python, folder)
    inside = folder / "bin" / "python"
    constraints = ("--constraints", ROOT / "requirements.txt")
    # Our packages have no pins, so none may come from an index: each is given as a file.
    files = [made(wheels, name) for name in sorted(ours(package))]
    uv("pip", "install", "--quiet", "--python", inside, *constraints, *files)
    listed = {one["name"] for one in json.loads(uv("pip", "list", "--quiet", "--format", "json", "--python", inside))}
    if package == "hashcore" and listed != HASHCORE_BRINGS:
        return [f"hashcore: expected {sorted(HASHCORE_BRINGS)}, got {sorted(listed)}; look at its dependencies"]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if package == "hashcore" and size >= LIMIT:
        return [f"hashcore: expected less than {LIMIT / 1e6:.0f} MB, got {size / 1e6:.0f}; what does it bring?"]
    print(f"{package}: {len(listed)} packages in {size / 1e6:.0f} MB", flush=True)
    uv("pip", "install", "--quiet", "--python", inside, *constraints, *RUNNERS)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not full"] + ([] if whole else ["-n", "0"])
    place = folders()[package] / "tests"
    tests: list[Any] = [place] if whole else [place / name for name in QUICK[package]]
    # Outside the checkout, whose sources would otherwise be imported.
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(wheels / "bytecode")}
    done = subprocess.run([inside, "-m", "pytest", *options, *tests], cwd=folder, env=os.environ | own)
    return [f"{package}: expected its tests to pass with its own dependencies alone, they failed"] * bool(
        done.returncode
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run every test, not only the quick ones")
    parser.add_argument("--python", default=sys.executable, help="a version or the path of an interpreter")
    parser.add_argument("--package", action="append", choices=sorted(QUICK), help="only this one; may be repeated")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        wheels = pathlib.Path(name).resolve()
        subprocess.run(["uv", "build", "--quiet", "--all-packages", "--out-dir", wheels], cwd=ROOT, check=True)
        wrong = [line for package in folders() for line in looked_into(package, made(wheels, package))]
        for package in options.package or folders():
            wrong += installed(package, wheels, options.python, options.all)
    for line in wrong:
        print(f"check_install: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
