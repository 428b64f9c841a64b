"""Install hashcore alone in a clean environment, look at what that brings, and run its own tests there.

    uv run --no-project tools/check_install.py

It must bring numpy and numba (with its llvmlite), no torch, and less than LIMIT bytes. Exit code 1 if not.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "hashcore"
BRINGS = {"hashcore", "llvmlite", "numba", "numpy"}
LIMIT = 300_000_000


def uv(*arguments: str | pathlib.Path) -> str:
    return subprocess.run(["uv", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def environment(folder: pathlib.Path) -> pathlib.Path:
    """Make an environment with the package, and return its interpreter."""
    uv("venv", "--quiet", "--python", sys.executable, folder)
    python = next(path for path in (folder / "bin" / "python", folder / "Scripts" / "python.exe") if path.exists())
    uv("pip", "install", "--quiet", "--python", python, PACKAGE)
    return python


def complaints(python: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Print what was installed, and return what is wrong with it."""
    listed = json.loads(uv("pip", "list", "--quiet", "--python", python, "--format", "json"))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    print(", ".join(f"{one['name']} {one['version']}" for one in listed), f"in {size / 1e6:.0f} MB")
    wrong = []
    if (names := {one["name"] for one in listed}) != BRINGS:
        wrong.append(f"expected it to bring {sorted(BRINGS)}, got {sorted(names)}; look at its dependencies")
    if size >= LIMIT:
        wrong.append(f"expected less than {LIMIT / 1e6:.0f} MB, got {size / 1e6:.0f} MB; look at its dependencies")
    return wrong


def tests(python: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Run the package's tests on what is installed, and return what is wrong."""
    uv("pip", "install", "--quiet", "--python", python, "pytest", "hypothesis")
    # Away from the checkout, whose sources would otherwise be imported.
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={ROOT}",
        "-c",
        ROOT / "pyproject.toml",
        "-o",
        "addopts=--import-mode=importlib",  # the workspace's own needs pytest-xdist
    ]
    where = subprocess.run(
        [python, "-c", "import hashcore; print(hashcore.__file__)"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    if not pathlib.Path(where).is_relative_to(folder):
        return [f"expected to test what is installed, got {where}; unset PYTHONPATH"]
    if subprocess.run([*command, PACKAGE / "tests"], cwd=folder).returncode:
        return ["expected its tests to pass without the other packages, they failed"]
    return []


def main() -> int:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        python = environment(folder)
        wrong = complaints(python, folder) or tests(python, folder)
    for line in wrong:
        print(f"check_install: {line}", file=sys.stderr)
    print(f"{time.monotonic() - begun:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
