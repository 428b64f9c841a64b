"""Draw the map of the packages for CONTRIBUTING.md from what their modules import.

    uv run tools/draw_modules.py           # write docs/figures/modules.png
    uv run tools/draw_modules.py --check   # change nothing; exit 1 if modules or imports have changed since

A box is a package, with its modules and subpackages by level: those of level 0 import nothing else of their package,
and all others only from lower levels. An arrow is an import of another package, with the number of modules
that have it. Imports inside functions count; those for type checkers do not.
"""

import ast
import hashlib
import json
import pathlib
import textwrap
from collections.abc import Iterator

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from stored_figure import png, run

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "figures" / "modules.png"
ORDER = ("hashcore", "hashtrain", "sparse_decode", "sparse_serve", "evals")
COLOURS: dict[str, str] = dict(zip(ORDER, ("#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00"), strict=True))
MOST = 34  # lines of a column

Graph = dict[str, dict[str, set[str]]]
"""By package and module, the imported modules of its own package (their names) and of others (package.module)."""


def sources(package: str) -> dict[str, list[pathlib.Path]]:
    """Return the files of each module of a package: a file at its top level, or a subpackage."""
    (folder,) = ROOT.glob(f"packages/*/src/{package}")
    found: dict[str, list[pathlib.Path]] = {}
    for path in sorted(folder.rglob("*.py")):
        module = path.relative_to(folder).parts[0].removesuffix(".py")
        if module not in ("__init__", "__main__"):
            found.setdefault(module, []).append(path)
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        yield from imports(node)


def graph() -> Graph:
    """Return what each module imports."""
    modules = {package: sources(package) for package in ORDER}
    found: Graph = {}
    for package, files in modules.items():
        for module, paths in files.items():
            names = {name for path in paths for name in imports(ast.parse(path.read_text()))}
            used = found.setdefault(package, {}).setdefault(module, set())
            for parts in (name.split(".") for name in names):
                if parts[0] in modules and len(parts) > 1:
                    inner = parts[1] if parts[1] in modules[parts[0]] else ""
                    used.add(inner if parts[0] == package else f"{parts[0]}.{inner}")
            used -= {module, ""}
    return found


def cycles(modules: dict[str, set[str]]) -> list[set[str]]:
    """Return the import cycles: sets of modules that import one another, directly or through others."""
    reached = {module: used & modules.keys() for module, used in modules.items()}
    for _ in modules:  # as many times as the longest path is long
        reached = {module: used.union(*(reached[name] for name in used)) for module, used in reached.items()}
    looping = [module for module in modules if module in reached[module]]
    found = [{other for other in reached[module] if module in reached[other]} for module in looping]
    return [cycle for i, cycle in enumerate(found) if cycle not in found[:i]]


def levels(modules: dict[str, set[str]]) -> list[list[str]]:
    """Assign modules to levels by their imports; modules of a cycle share one."""
    together = {module: {module} for module in modules}
    together |= {module: cycle for cycle in cycles(modules) for module in cycle}
    left, placed, found = dict(modules), set[str](), []
    while left:
        ready = sorted(
            module
            for module in left
            if all((modules[other] & modules.keys()) <= placed | together[module] for other in together[module])
        )
        found.append(ready)
        placed.update(ready)
        left = {module: used for module, used in left.items() if module not in placed}
    return found


def digest(found: Graph) -> str:
    """Return a digest of what the figure depends on."""
    plain = {package: {module: sorted(used) for module, used in modules.items()} for package, modules in found.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _column(axes: Axes, package: str, x: float, modules: dict[str, set[str]]) -> None:
    """Draw a package's modules below its name, level by level."""
    files = sources(package)
    lines = sum(len(path.read_text().splitlines()) for paths in files.values() for path in paths)
    title = {"ha": "center", "va": "center", "fontsize": 10, "weight": "bold"}
    box = {"boxstyle": "round,pad=0.5", "facecolor": COLOURS[package], "alpha": 0.85, "edgecolor": "none"}
    axes.text(x + 0.42, 0.3, f"{package}\n{len(modules)} modules, {lines:,} lines", color="white", bbox=box, **title)
    y = 2.2
    for number, level in enumerate(levels(modules)):
        axes.text(x, y, f"level {number}", fontsize=6, color="#888888", va="top")
        y += 0.7
        names = "  ".join(f"{module}/" if len(files[module]) > 1 else module for module in level)
        for line in textwrap.wrap(names, MOST, break_long_words=False):
            axes.text(x, y, line, fontsize=6.5, va="top", family="monospace")
            y += 0.62
        y += 0.25


def _arrows(axes: Axes, found: Graph) -> None:
    """Draw arrows from each package to those that it imports, above the boxes."""
    for i, package in enumerate(ORDER):
        for j, other in enumerate(ORDER[:i]):
            count = sum(any(name.startswith(f"{other}.") for name in used) for used in found[package].values())
            if not count:
                continue
            start, end = (i + 0.42, -0.55), (j + 0.42, -0.55)
            style = {"arrowstyle": "-|>", "color": COLOURS[package], "connectionstyle": "arc3,rad=0.32"}
            axes.annotate("", end, start, arrowprops=style)
            middle, height = (i + j) / 2 + 0.42, -0.75 - 1.05 * (i - j)
            axes.text(middle, height, str(count), fontsize=7, color=COLOURS[package], ha="center", va="center")


def draw() -> bytes:
    """Return the figure as PNG."""
    found = graph()
    figure, axes = plt.subplots(figsize=(12, 8), layout="constrained")
    for i, package in enumerate(ORDER):
        _column(axes, package, float(i), found[package])
    _arrows(axes, found)
    axes.set(xlim=(-0.1, len(ORDER)), ylim=(26, -6.2))
    axes.axis("off")
    return png(figure, 100, digest(found))


if __name__ == "__main__":
    run(__doc__, OUT, lambda: digest(graph()), draw)
