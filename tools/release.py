"""Check that the packages can be released as they are, and tag them.

    uv run tools/release.py                     # prints problems, and what would be tagged and built
    uv run tools/release.py --check             # prints only problems: exit code 1 if there are any
    uv run tools/release.py --tag --tested ID   # creates local tags; ID is the commit whose tests passed

A version must match the topmost entry of its CHANGELOG and be no lower than earlier tags. A package's requirement on
another of ours has a lower bound and ends below the next major version (`hashcore>=1.0,<2`): the range must include the
version in this repository, and every imported name must exist in the oldest version in the range. Only names can be
compared; whether an old function still behaves the same is left to the old version's tests. Tags are annotated, such as
`hashcore-v1.0.0`, with the CHANGELOG's entry as message; nothing is pushed.
"""

import argparse
import ast
import pathlib
import re
import subprocess
import symtable
import sys
import tomllib
from collections.abc import Callable
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"^## +(.+?) *\n(.*?)(?=^## |\Z)", re.M | re.S)
SHORTEST_ID = 7

Reader = Callable[[str], str | None]  # maps a path below a package's src to its text, None if there is no such file


class Package(NamedTuple):
    """A package's metadata."""

    name: str
    folder: pathlib.Path
    version: str
    requirements: list[Requirement]
    entries: list[tuple[str, str]]  # of its CHANGELOG: heading and text

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def tag(self) -> str:
        return f"{self.name}-v{self.version}"


def read(root: pathlib.Path) -> dict[str, Package]:
    """Return the packages of a checkout, by name."""
    found = {}
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        optional = [text for extra in project.get("optional-dependencies", {}).values() for text in extra]
        needed = [Requirement(text) for text in [*project["dependencies"], *optional]]
        entries = ENTRY.findall((file.parent / "CHANGELOG.md").read_text())
        found[project["name"]] = Package(project["name"], file.parent, project["version"], needed, entries)
    return found


def git(root: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-c", f"safe.directory={root}", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def tags(root: pathlib.Path, package: Package) -> list[Version]:
    """Return the tagged versions of a package, ascending."""
    listed = git(root, "tag", "--list", f"{package.name}-v*").split()
    return sorted(Version(tag.removeprefix(f"{package.name}-v")) for tag in listed)


def check_version(package: Package, tagged: list[Version]) -> list[str]:
    """Return what is wrong with a package's version: its form, its CHANGELOG, the tags before it."""
    try:
        version = Version(package.version)
    except InvalidVersion:
        version = None
    if version is None or str(version) != package.version or len(version.release) != 3 or version.local:
        return [f"{package.name}: expected a version of the form 1.2.3, got {package.version!r}"]
    wrong = []
    top = package.entries[0][0] if package.entries else "no entry"
    if top != package.version:
        wrong.append(f"{package.name}: expected `## {package.version}` at the top of its CHANGELOG.md, got {top!r}")
    elif not package.entries[0][1].strip():
        wrong.append(f"{package.name}: expected its CHANGELOG.md to describe {package.version}, got nothing")
    if tagged and version < tagged[-1]:
        wrong.append(f"{package.name}: expected at least version {tagged[-1]}, which is tagged, got {version}")
    return wrong


def lower_bound(requirement: Requirement) -> Version | None:
    return max((Version(s.version) for s in requirement.specifier if s.operator == ">="), default=None)


def check_range(user: str, requirement: Requirement, needed: Package) -> list[str]:
    """Return what is wrong with the range of versions that `user` allows of another package of ours."""
    needs = f"{user} needs {requirement}"
    bounds = {s.operator for s in requirement.specifier}
    if bounds != {">=", "<"}:
        return [f"{needs}: expected a lower and an upper bound, such as {needed.name}>=1.0,<2"]
    wrong = []
    if not requirement.specifier.contains(needed.version, prereleases=True):
        wrong.append(f"{needs}: expected a range that includes {needed.version}, the version in this repository")
    if requirement.specifier.contains(f"{Version(needed.version).major + 1}.0.0"):
        wrong.append(f"{needs}: expected it to end below the next major version, {Version(needed.version).major + 1}")
    return wrong


def used(user: Package, needed: Package) -> dict[str, str]:
    """Return the names of `needed` that `user` imports: {dotted name: "file:line"}."""
    found = {}
    for path in sorted((user.folder / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            at = f"{path.relative_to(user.folder)}:{getattr(node, 'lineno', 0)}"
            found |= {name: at for name in names if name.partition(".")[0] == needed.module}
    return found


def has(reader: Reader, name: str) -> bool:
    """Whether a dotted name is a module of a package, or a name that one of its modules defines or imports."""
    path = name.replace(".", "/")
    if any(reader(file) is not None for file in (f"{path}.py", f"{path}/__init__.py")):
        return True
    parent, _, last = path.rpartition("/")
    text = next((t for t in map(reader, (f"{parent}.py", f"{parent}/__init__.py")) if t is not None), None)
    return text is not None and last in defined(text)


def defined(text: str) -> set[str]:
    """Return the names that running a module binds at its top level, including in branches."""
    symbols = symtable.symtable(text, "module", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def oldest(root: pathlib.Path, needed: Package, bound: Version) -> Reader | None:
    """Return a reader of the oldest version from `bound` on: of a tag, or of this repository; None if unknown."""
    sources = needed.folder / "src"
    for version in tags(root, needed):
        if version >= bound:
            tree = f"{needed.name}-v{version}:{sources.relative_to(root).as_posix()}"
            files = set(git(root, "ls-tree", "-r", "--name-only", tree).splitlines())
            return lambda path: git(root, "show", f"{tree}/{path}") if path in files else None
    if Version(needed.version) < bound:
        return None
    return lambda path: (sources / path).read_text() if (sources / path).is_file() else None


def check_names(root: pathlib.Path, user: Package, requirement: Requirement, needed: Package) -> list[str]:
    """Return the names of `needed` that `user` imports but the oldest allowed version lacks."""
    bound = lower_bound(requirement)
    reader = oldest(root, needed, bound) if bound else None
    if reader is None:  # reported by check_range
        return []
    lacking = [f"{name} ({at})" for name, at in used(user, needed).items() if not has(reader, name)]
    if not lacking:
        return []
    return [f"{user.name} needs {requirement}: the oldest version of that range lacks {', '.join(lacking)}; raise it"]


def complaints(root: pathlib.Path) -> list[str]:
    """Return all problems that prevent a release."""
    packages, wrong = read(root), []
    for package in packages.values():
        wrong += check_version(package, tags(root, package))
    if wrong:  # the other checks compare versions
        return wrong
    for package in packages.values():
        for requirement in package.requirements:
            needed = packages.get(canonicalize_name(requirement.name))
            if needed is not None and needed is not package:
                wrong += check_range(package.name, requirement, needed)
                wrong += check_names(root, package, requirement, needed)
    whole = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, whole["dependencies"]):
        wrong += check_range(whole["name"], requirement, packages[canonicalize_name(requirement.name)])
    return wrong


def has_changed(root: pathlib.Path, package: Package) -> bool:
    """Whether a package differs from the tag of its version: its next release must raise it."""
    where = [(package.folder / name).relative_to(root).as_posix() for name in ("src", "pyproject.toml")]
    return bool(git(root, "diff", "--name-only", package.tag, "--", *where))


def refusals(root: pathlib.Path, tested: str | None) -> list[str]:
    """Return what prevents tagging now."""
    wrong = []
    if dirty := git(root, "status", "--porcelain"):
        wrong.append(f"expected a clean tree, got {len(dirty.splitlines())} changed files; commit or stash them")
    head = git(root, "rev-parse", "HEAD")
    if tested is None or len(tested) < SHORTEST_ID or not head.startswith(tested):
        wrong.append(f"expected --tested {head[:12]}, the commit to tag, got {tested}; run .ci/run on it first")
    return wrong


def main(arguments: list[str], root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only print problems")
    parser.add_argument("--tag", action="store_true", help="create annotated tags; they are not pushed")
    parser.add_argument("--tested", metavar="ID", help="with --tag: the commit on which the tests passed")
    options = parser.parse_args(arguments)
    wrong = complaints(root) + (refusals(root, options.tested) if options.tag else [])
    for line in wrong:
        print(f"release: {line}", file=sys.stderr)
    if wrong or options.check:
        print(f"{len(wrong)} problems")
        return int(bool(wrong))
    packages = read(root).values()
    tagged = [package for package in packages if Version(package.version) in tags(root, package)]
    for package in tagged:
        if has_changed(root, package):
            print(f"{package.name} has changed since {package.tag}: its next release needs a higher version")
    for package in (package for package in packages if package not in tagged):
        if options.tag:
            text = f"{package.name} {package.version}\n\n{package.entries[0][1].strip()}\n"
            git(root, "tag", "--annotate", "--cleanup=verbatim", "--message", text, package.tag)
        done = "tagged" if options.tag else "would tag"
        print(f"{done} {package.tag}; build it with `uv build --package {package.name}`")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
