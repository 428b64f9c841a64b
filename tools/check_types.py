"""Check that every exported name of the packages has a known type, as seen by a user's type checker.

    uv run tools/check_types.py

Runs basedpyright's `--verifytypes` once for each package, over all of its modules; untyped names of other packages are
ignored. Takes about 90 s. Exit code 1, with a list of the unknown types, if a package is not at 100 %.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("hashcore", "hashtrain", "sparse_decode", "evals", "sparse_serve")


def report(package: str) -> dict[str, Any]:
    """Return basedpyright's report on a package's types."""
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--ignoreexternal", "--verifytypes", package]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1 means that there are diagnostics
        raise SystemExit(f"check_types: basedpyright could not read {package}: {done.stderr or done.stdout}")
    return json.loads(done.stdout)


def complaints(package: str, found: dict[str, Any]) -> list[str]:
    """Return what is wrong with a package's types."""
    completeness = found.get("typeCompleteness")
    if completeness is None or not completeness["exportedSymbolCounts"]["withKnownType"]:
        said = "; ".join(line["message"] for line in found["generalDiagnostics"])
        return [f"{package}: expected a package with a file py.typed and names of known type, got none: {said}"]
    return [
        f"{symbol['name']}: {line['message']}"
        for symbol in completeness["symbols"]
        if symbol["isExported"] and (symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"])
        for line in symbol["diagnostics"] or [{"message": "its type is not known"}]
    ]


def main() -> int:
    wrong: list[str] = []
    for package in PACKAGES:
        found = report(package)
        said = complaints(package, found)
        wrong += said
        if completeness := found.get("typeCompleteness"):
            counts = completeness["exportedSymbolCounts"]
            known, others = counts["withKnownType"], counts["withAmbiguousType"] + counts["withUnknownType"]
            score = 100 * completeness["completenessScore"]
            print(f"{package}: {known} of {known + others} names have a known type ({score:.1f} %)", flush=True)
    for line in wrong:
        print(f"check_types: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
