"""Count how large the repository is, beside the limits that it sets itself: uv run tools/code_size.py

Of packages `src` counts; of documents the text of `docs` without stored results, the packages' READMEs and
CONTRIBUTING.md.
"""

import math
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENDINGS = (".py", ".cu", ".cuh", ".hpp", ".sh")
MOST = {"packages": 24_000, "tests": 16_000, "tools": 2_200, "KB of docs": 170, "stored results": 30}
LONGEST = 400  # lines of a file


def length(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def sources(*folders: str) -> list[Path]:
    """Return the sources below some folders, given as patterns."""
    files = [path for folder in folders for place in ROOT.glob(folder) for path in place.rglob("*")]
    return [path for path in files if path.suffix in ENDINGS]


def count() -> dict[str, int]:
    """Return the counts of this checkout, by name."""
    packages = sorted(path.name for path in (ROOT / "packages").iterdir())
    found = {f"lines of {name}": sum(map(length, sources(f"packages/{name}/src"))) for name in packages}
    found["packages"] = sum(found.values())
    found["tests"] = sum(map(length, sources("packages/*/tests", "tests")))
    found["tools"] = sum(map(length, sources("tools")))
    texts = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".py", ".css")]
    texts += [*ROOT.glob("packages/*/README.md"), ROOT / "CONTRIBUTING.md"]
    found["KB of docs"] = math.ceil(sum(path.stat().st_size for path in texts) / 1000)
    found["stored results"] = len(list(ROOT.glob("docs/results/*")))
    return found


if __name__ == "__main__":
    for name, number in count().items():
        verdict = f"   at most {MOST[name]:,}: {'met' if number <= MOST[name] else 'missed'}" if name in MOST else ""
        print(f"{name:24}{number:>10,}{verdict}")
    for path in sorted(sources("packages/*/src")):
        if length(path) > LONGEST:
            print(f"{length(path)} lines, more than {LONGEST}: {path.relative_to(ROOT)}")
