"""Build each package's wheel, look into it, install it alone in a clean environment, and run its own tests there.

    uv run --no-project tools/check_install.py                        # a part of each package's tests
    uv run --no-project tools/check_install.py --all --python 3.13    # all of them, under another Python

A wheel must contain exactly the files below the package's src, and the licence. An environment gets one of them, those
of ours that it depends on, and the pinned versions of everything else, without extras. hashcore must bring only numpy
and numba (with llvmlite) and less than LIMIT bytes. Exit code 1 if anything is wrong.
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
HASHCORE_BRINGS = {"hashcore", "llvmlite", "numba", "numpy"}
LIMIT = 300_000_000  # bytes, of hashcore with all its dependencies
QUICK = {
    "evals": ["test_metrics.py"],
    "hashcore": ["test_index_file.py", "test_readme_code.py"],
    "hashtrain": ["test_loss_and_target.py", "test_hasher.py"],
    "sparse_decode": ["test_budget.py"],
    "sparse_serve": ["test_refusals.py"],
}
"""Tests that run without --all: files that need no model and finish within seconds."""
RUNNERS = ("hypothesis", "pytest", "pytest-xdist")


def folder_of(package: str) -> pathlib.Path:
    return ROOT / "packages" / package.replace("_", "-")


def ours(package: str) -> set[str]:
    """Return the packages of this repository that a package needs, including itself."""
    text = (folder_of(package) / "pyproject.toml").read_text()
    needed = [re.split(r"[^\w.-]", one)[0].replace("-", "_") for one in tomllib.loads(text)["project"]["dependencies"]]
    return {package}.union(*(ours(one) for one in needed if one in QUICK))


def looked_into(package: str, wheel: pathlib.Path) -> list[str]:
    """Return what is wrong with a wheel's content."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        private = b"Private :: Do Not Upload" in archive.read(f"{info}/METADATA")
    source = folder_of(package) / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name} | {f"{package}/py.typed"}
    wanted |= {f"{info}/licenses/{name}" for name in ("LICENSE", "NOTICE")}
    differ = sorted({name for name in names if not name.startswith(f"{info}/") or "/licenses/" in name} ^ wanted)
    wrong = [f"{package}: expected in the wheel what is below src, these differ: {', '.join(differ)}"] * bool(differ)
    return wrong + [f"{package}: expected the classifier that forbids uploads; others own these names"] * (not private)


def uv(*arguments: str | pathlib.Path) -> str:
    return subprocess.run(["uv", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def installed(
    package: str, wheels: dict[str, pathlib.Path], place: pathlib.Path, python: str, whole: bool
) -> list[str]:
    """Install a package alone in an environment at `place`, and return what is wrong with it there."""
    uv("venv", "--quiet", "--no-project", "--clear", "--python", python, place)
    inside = place / "bin" / "python"
    install = ("pip", "install", "--quiet", "--python", inside, "--constraints", ROOT / "requirements.txt")
    # Our packages have no pins, so none may come from an index: each is given as a file.
    uv(*install, *(wheels[name] for name in sorted(ours(package))))
    listed = {one["name"] for one in json.loads(uv("pip", "list", "--quiet", "--format", "json", "--python", inside))}
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"{package}: {len(listed)} packages in {size / 1e6:.0f} MB", flush=True)
    if package == "hashcore" and (listed != HASHCORE_BRINGS or size >= LIMIT):
        return [f"hashcore: expected {sorted(HASHCORE_BRINGS)} in {LIMIT / 1e6:.0f} MB, got {sorted(listed)}"]
    uv(*install, *RUNNERS)
    options = ["-q", "-p", "no:cacheprovider", "-m", "not full"] + ([] if whole else ["-n", "0"])
    tests = folder_of(package) / "tests"
    files = [tests] if whole else [tests / name for name in QUICK[package]]
    # Outside the checkout, whose sources would otherwise be imported.
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(place.parent / "bytecode")}
    done = subprocess.run([inside, "-m", "pytest", *options, *files], cwd=place, env=os.environ | own)
    return [f"{package}: expected its tests to pass with its own dependencies alone"] * bool(done.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run every test, not only the quick ones")
    parser.add_argument("--python", default=sys.executable, help="a version or the path of an interpreter")
    parser.add_argument("--package", action="append", choices=sorted(QUICK), help="only this one; may be repeated")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        subprocess.run(["uv", "build", "--quiet", "--all-packages", "--out-dir", folder], cwd=ROOT, check=True)
        wheels = {package: next(folder.glob(f"{package}-*.whl")) for package in QUICK}
        wrong = [line for package, wheel in wheels.items() for line in looked_into(package, wheel)]
        for package in options.package or QUICK:
            wrong += installed(package, wheels, folder / "environment", options.python, options.all)
    for line in wrong:
        print(f"check_install: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
