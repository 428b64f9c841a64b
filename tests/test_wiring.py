"""The walls between the packages, what each must carry, and what no tracked file may contain."""

import ast
import functools
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "hashcore": set(),
    "hashtrain": {"hashcore"},
    "sparse_decode": {"hashcore", "hashtrain"},
    "evals": {"hashcore", "hashtrain", "sparse_decode"},
    "sparse_serve": {"hashcore", "hashtrain", "sparse_decode"},
}
HOSTS = {"sparse_serve": {"prometheus_client", "vllm"}}
"""What is there wherever a plug-in of it runs, and nowhere else: no dependency, and no reason to install it."""
DEMO_MODEL = "packages/hashtrain/src/hashtrain/demo/model/"
MEGABYTE = 1 << 20
# Joined here so that this file does not contain what it forbids.
INDEX_HOSTS = [".".join(p) for p in (("files", "pythonhosted"), ("pypi", "org"), ("download", "pytorch"))]
MACHINE_FOLDERS = "|".join(("root", "work", "home", "Users"))
FORBIDDEN = re.compile("|".join(map(re.escape, INDEX_HOSTS)) + rf"|(?<![\w.}}/~-])/({MACHINE_FOLDERS})/", re.ASCII)

packages = pytest.mark.parametrize("package", MAY_IMPORT)


def folder(package):
    return ROOT / "packages" / package.replace("_", "-")


def project(package):
    return tomllib.loads((folder(package) / "pyproject.toml").read_text())["project"]


def names(requirements):
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def waits(node):
    """Whether importing the file leaves this block unexecuted."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@functools.cache
def sources(package):
    """The package's own modules: {dotted name: (path, tree, ids of the nodes inside blocks that wait)}."""
    found = {}
    for path in sorted((folder(package) / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(), path)
        inside = {id(node) for block in ast.walk(tree) if waits(block) for node in ast.walk(block)}
        parts = path.relative_to(folder(package) / "src").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path, tree, inside
    return found


def imported(node):
    """The dotted names an import statement asks for; the last part of one may be a name within a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@functools.cache
def late(package):
    """The package's modules that are imported, but in functions only: importing the package leaves them out."""
    modules = sources(package)
    plain, deferred = {name: set() for name in modules}, set()
    for name, (_, tree, inside) in modules.items():
        for node in ast.walk(tree):
            wanted = {module for module in imported(node) if module in modules}
            (deferred if id(node) in inside else plain[name]).update(wanted)
    ever = deferred.union(*plain.values())
    eager, reached = set(), {name for name in modules if name == package or name not in ever}
    while reached:
        eager |= reached
        parents = {name.rpartition(".")[0] for name in reached} & set(modules)
        reached = parents.union(*(plain[name] for name in reached)) - eager
    return set(modules) - eager


def imports(package, deferred):
    """Outside modules the sources import, {module: "file:line"}: where importing the package waits, or elsewhere."""
    found = {}
    for name, (path, tree, inside) in sources(package).items():
        for node in ast.walk(tree):
            if (id(node) in inside or name in late(package)) is deferred:
                for module in imported(node):
                    found.setdefault(module.partition(".")[0], f"{path.relative_to(ROOT)}:{node.lineno}")
    return {module: at for module, at in found.items() if module not in {package, *sys.stdlib_module_names}}


@functools.cache
def distributions():
    return importlib.metadata.packages_distributions()


def provided_by(module):
    """The packages an import may come from: several for a namespace such as `cuda`."""
    return {canonicalize_name(name) for name in distributions().get(module, [module])}


@functools.cache
def tracked():
    """Files git tracks or would, so that the rule is seen before the commit."""
    # A checkout may belong to another user, as in a container.
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [path for path in listed.split("\0") if (ROOT / path).is_file()]
    assert "pyproject.toml" in paths
    return paths


@packages
def test_dependencies_run_one_way(package):
    for deferred in (False, True):
        for module, at in imports(package, deferred).items():
            assert module not in MAY_IMPORT.keys() - MAY_IMPORT[package], f"{at}: {package} may not import {module}"


@packages
def test_every_import_is_declared(package):
    """What importing a package imports needs a plain dependency; what waits may come with an extra."""
    declared = project(package)
    needed = names(declared["dependencies"])
    optional = names(text for extra in declared.get("optional-dependencies", {}).values() for text in extra)
    hosts = HOSTS.get(package, set())
    for module, at in imports(package, deferred=False).items():
        assert module in hosts or provided_by(module) & needed, f"{at}: {module} is no dependency of {package}"
    for module, at in imports(package, deferred=True).items():
        assert module in hosts or provided_by(module) & (needed | optional), (
            f"{at}: {module} is in no extra of {package}"
        )


def test_only_what_a_device_needs_waits_in_hashcore():
    assert {"hashcore.torch_ops", "hashcore.cuda.tensors"} <= late("hashcore")
    assert not {"hashcore", "hashcore.ops", "hashcore.validation", "hashcore.reference"} & late("hashcore")


@packages
def test_every_dependency_is_imported(package):
    used = {name for deferred in (False, True) for m in imports(package, deferred) for name in provided_by(m)}
    members = names(
        project(other)["name"] for other in MAY_IMPORT
    )  # evals names them all, for those who install it alone
    unused = names(project(package)["dependencies"]) - members - used
    assert not unused, f"{package} imports none of {unused}; leave them out of its dependencies"


def test_hashcore_imports_without_torch_and_cuda():
    script = "import sys; sys.modules.update(torch=None, cuda=None); import hashcore"
    subprocess.run([sys.executable, "-c", script], check=True)


@packages
def test_package_is_complete(package):
    first = "0.1.0" if package == "sparse_serve" else "1.0.0"
    assert Version(project(package)["version"]) >= Version(first)
    for name in ("README.md", "CHANGELOG.md", f"src/{package}/py.typed"):
        assert (folder(package) / name).is_file(), f"{package} has no {name}"


def test_no_index_host_and_no_machine_path():
    for path in tracked():
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:  # weights and pictures
            continue
        if found := FORBIDDEN.search(text):
            line = text.count("\n", 0, found.start()) + 1
            pytest.fail(f"{path}:{line} contains {found[0]!r}; name no index host and no path of one machine")


def test_lock_is_not_tracked():
    assert "uv.lock" not in tracked()


def test_tree_stays_small():
    sizes = {path: (ROOT / path).stat().st_size for path in tracked()}
    assert sum(sizes.values()) < 60 * MEGABYTE
    large = {path for path, size in sizes.items() if size > MEGABYTE and not path.startswith(DEMO_MODEL)}
    assert not large, f"files over 1 MB outside the demo model: {large}"
