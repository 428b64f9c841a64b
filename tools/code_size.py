"""Count how large the repository is, beside the limits that it sets itself.

    uv run tools/code_size.py                   # of this checkout
    uv run tools/code_size.py --against main    # and of another commit, in the first column of numbers

Lines are physical ones of .py, .cu, .cuh and .hpp files: of packages those of `packages/*/src`; of tests those of
`packages/*/tests` and `tests`. Documents are the text of `docs` without stored results, the packages' READMEs and
CONTRIBUTING.md.
"""

import argparse
import io
import math
import subprocess
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENDINGS = (".py", ".cu", ".cuh", ".hpp")
MOST = {"packages": 24_000, "tests": 16_000, "tools": 2_200, "KB of docs": 170, "stored results": 30}
LONGEST = 400  # lines of a file


def lines(root: Path, *folders: str) -> int:
    """Count the lines of the sources below some folders, given as patterns."""
    files = [path for folder in folders for place in root.glob(folder) for path in place.rglob("*")]
    return sum(len(path.read_text("utf-8").splitlines()) for path in files if path.suffix in ENDINGS)


def count(root: Path) -> dict[str, int]:
    """Return the counts of a checkout, by name."""
    packages = sorted(path.name for path in (root / "packages").iterdir())
    found = {f"lines of {name}": lines(root, f"packages/{name}/src") for name in packages}
    found["packages"] = sum(found.values())
    found["tests"] = lines(root, "packages/*/tests", "tests")
    found["tools"] = lines(root, "tools")
    texts = [path for path in (root / "docs").rglob("*") if path.suffix in (".md", ".py", ".css")]
    texts += [*root.glob("packages/*/README.md"), root / "CONTRIBUTING.md"]
    found["KB of docs"] = math.ceil(sum(path.stat().st_size for path in texts) / 1000)
    found["stored results"] = len(list(root.glob("docs/results/*")))
    return found


def extracted(revision: str, folder: Path) -> Path:
    """Write the files of a commit to a folder. Raises: ValueError if git does not know it."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", "--format=zip", revision], capture_output=True)
    if done.returncode:
        raise ValueError(f"expected a commit, got {revision!r}: {done.stderr.decode().strip()}")
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder)
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV", help="a commit to count as well")
    given = parser.parse_args(arguments)
    counted = [count(ROOT)]
    if given.against:
        try:
            with tempfile.TemporaryDirectory() as folder:
                counted.insert(0, count(extracted(given.against, Path(folder))))
        except ValueError as error:
            parser.error(str(error))
    for name in counted[-1]:
        columns = "".join(f"{of.get(name, 0):>10,}" for of in counted)
        verdict = "met" if counted[-1][name] <= MOST.get(name, 0) else "missed"
        print(f"{name:24}{columns}" + (f"   at most {MOST[name]:,}: {verdict}" if name in MOST else ""))
    for path in sorted(path for path in ROOT.glob("packages/*/src/**/*") if path.suffix in ENDINGS):
        if (own := len(path.read_text("utf-8").splitlines())) > LONGEST:
            print(f"{own} lines, more than {LONGEST}: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
