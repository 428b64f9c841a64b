"""Check that the packages can be released as they are: exit code 1 after a sentence for each problem.

    uv run tools/release.py --check

A version must match the topmost entry of its CHANGELOG. A package's requirement on another of ours has a lower bound
and ends below the next major version (`hashcore>=1.0,<2`), and includes the version in this repository. Every name that
a package imports of another must exist there.
"""

import argparse
import ast
import re
import symtable
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"^## +(.+?) *\n(.*?)(?=^## |\Z)", re.M | re.S)


class Package(NamedTuple):
    """A package's metadata."""

    name: str
    sources: Path
    version: str
    requirements: list[Requirement]
    entries: list[tuple[str, str]]  # of its CHANGELOG: heading and text


def read(root: Path) -> dict[str, Package]:
    """Return the packages of a checkout, by name."""
    found = {}
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        optional = [text for extra in project.get("optional-dependencies", {}).values() for text in extra]
        needed = [Requirement(text) for text in [*project["dependencies"], *optional]]
        entries = ENTRY.findall((file.parent / "CHANGELOG.md").read_text())
        found[project["name"]] = Package(project["name"], file.parent / "src", project["version"], needed, entries)
    return found


def check_version(package: Package) -> list[str]:
    """Return what is wrong with a package's version: its form, or its CHANGELOG."""
    try:
        version = Version(package.version)
    except InvalidVersion:
        version = None
    if version is None or str(version) != package.version or len(version.release) != 3 or version.local:
        return [f"{package.name}: expected a version of the form 1.2.3, got {package.version!r}"]
    top, text = package.entries[0] if package.entries else ("no entry", "")
    if top != package.version:
        return [f"{package.name}: expected `## {package.version}` at the top of its CHANGELOG.md, got {top!r}"]
    return [] if text.strip() else [f"{package.name}: expected its CHANGELOG.md to describe {top}, got nothing"]


def check_range(user: str, requirement: Requirement, needed: Package) -> list[str]:
    """Return what is wrong with the range of versions that `user` allows of another package of ours."""
    needs, after = f"{user} needs {requirement}", Version(needed.version).major + 1
    if {one.operator for one in requirement.specifier} != {">=", "<"}:
        return [f"{needs}: expected a lower and an upper bound, such as {needed.name}>=1.0,<2"]
    wrong = []
    if not requirement.specifier.contains(needed.version, prereleases=True):
        wrong.append(f"{needs}: expected a range that includes {needed.version}, the version in this repository")
    if requirement.specifier.contains(f"{after}.0.0"):
        wrong.append(f"{needs}: expected it to end below the next major version, {after}")
    return wrong


def check_names(user: Package, needed: Package) -> list[str]:
    """Return a sentence for each name of `needed` that `user` imports and that is not there."""
    wrong = []
    for path in sorted(user.sources.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            ours = [name for name in names if name.partition(".")[0] == needed.name.replace("-", "_")]
            at = f"{path.relative_to(user.sources)}:{getattr(node, 'lineno', 0)}"
            wrong += [f"{user.name} imports {one} ({at}), which is not there" for one in ours if not has(needed, one)]
    return wrong


def has(package: Package, name: str) -> bool:
    """Whether a dotted name is a module of a package, or a name that one of its modules binds."""

    def text(path: str) -> str | None:
        files = (package.sources / f"{path}.py", package.sources / path / "__init__.py")
        return next((file.read_text() for file in files if file.is_file()), None)

    path = name.replace(".", "/")
    if text(path) is not None:
        return True
    parent, _, last = path.rpartition("/")
    found = text(parent)
    symbols = symtable.symtable(found, "module", "exec").get_symbols() if found is not None else []
    return any(one.get_name() == last and (one.is_assigned() or one.is_imported()) for one in symbols)


def complaints(root: Path) -> list[str]:
    """Return all problems that prevent a release."""
    packages = read(root)
    wrong = [line for package in packages.values() for line in check_version(package)]
    if wrong:  # the other checks compare versions
        return wrong
    for package in packages.values():
        for requirement in package.requirements:
            needed = packages.get(canonicalize_name(requirement.name))
            if needed is not None and needed is not package:
                wrong += check_range(package.name, requirement, needed) + check_names(package, needed)
    whole = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, whole["dependencies"]):
        wrong += check_range(whole["name"], requirement, packages[canonicalize_name(requirement.name)])
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
