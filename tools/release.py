"""Check that the packages can be released as they are: exit code 1 after a sentence for each problem.

    uv run tools/release.py --check

A version must match the topmost entry of its CHANGELOG. A package's requirement on another of ours has a lower bound
and ends below the next major version (`hashcore>=1.0,<2`), and includes the version in this repository.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"^## +(.+?) *\n(.*?)(?=^## |\Z)", re.M | re.S)


def check_version(project: dict[str, Any], changes: str) -> list[str]:
    """Return what is wrong with a package's version: its form, or its CHANGELOG."""
    name, version = project["name"], project["version"]
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", version):
        return [f"{name}: expected a version of the form 1.2.3, got {version!r}"]
    top, text = next(iter(ENTRY.findall(changes)), ("no entry", ""))
    if top != version or not text.strip():
        return [f"{name}: expected `## {version}` at the top of its CHANGELOG.md, and changes below, got {top!r}"]
    return []


def check_range(user: str, requirement: Requirement, version: Version) -> list[str]:
    """Return what is wrong with the range of versions that `user` allows of another package of ours."""
    wrong, needs = [], f"{user} needs {requirement}"
    if {one.operator for one in requirement.specifier} != {">=", "<"}:
        return [f"{needs}: expected a lower and an upper bound, such as {requirement.name}>=1.0,<2"]
    if not requirement.specifier.contains(version, prereleases=True):
        wrong.append(f"{needs}: expected a range that includes {version}, the version in this repository")
    if requirement.specifier.contains(f"{version.major + 1}.0.0"):
        wrong.append(f"{needs}: expected it to end below the next major version, {version.major + 1}")
    return wrong


def complaints(root: Path) -> list[str]:
    """Return all problems that prevent a release."""
    files = sorted(root.glob("packages/*/pyproject.toml"))
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    changes = [(file.parent / "CHANGELOG.md").read_text() for file in files]
    wrong = [line for one, text in zip(projects, changes, strict=True) for line in check_version(one, text)]
    if wrong:  # the other checks compare versions
        return wrong
    versions = {project["name"]: Version(project["version"]) for project in projects}
    whole = tomllib.loads((root / "pyproject.toml").read_text())["project"] | {"optional-dependencies": {}}
    for project in [*projects, whole]:
        optional = [text for extra in project.get("optional-dependencies", {}).values() for text in extra]
        for requirement in map(Requirement, [*project["dependencies"], *optional]):
            name = canonicalize_name(requirement.name)
            if name in versions and name != project["name"]:
                wrong += check_range(project["name"], requirement, versions[name])
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", required=True, help="look for problems; nothing is changed")
    parser.parse_args()
    wrong = complaints(ROOT)
    for line in wrong:
        print(f"release: {line}", file=sys.stderr)
    print(f"{len(wrong)} problems")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
