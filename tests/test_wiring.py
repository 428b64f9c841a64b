"""The walls between the packages, what each must declare, and what no tracked file may contain."""

import ast
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
HOSTS = {"sparse_serve": {"vllm"}}
"""What is there wherever a plug-in of it runs, and nowhere else: no dependency, and no reason to install it."""
# Joined here so that this file does not contain what it forbids.
INDEX_HOSTS = [".".join(p) for p in (("files", "pythonhosted"), ("pypi", "org"), ("download", "pytorch"))]
MACHINE_FOLDERS = "|".join(("root", "work", "home", "Users"))
FORBIDDEN = re.compile("|".join(map(re.escape, INDEX_HOSTS)) + rf"|(?<![\w.}}/~-])/({MACHINE_FOLDERS})/", re.ASCII)


def imports(package):
    """Outside modules that the sources import, each with one place."""
    found = {}
    for path in sorted((ROOT / "packages" / package.replace("_", "-") / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            found |= {name.partition(".")[0]: f"{path.relative_to(ROOT)}:{node.lineno}" for name in names}
    return {name: at for name, at in found.items() if name not in {package, *sys.stdlib_module_names}}


def project_of(package):
    text = (ROOT / "packages" / package.replace("_", "-") / "pyproject.toml").read_text()
    return tomllib.loads(text)["project"]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_dependencies_run_one_way_and_are_declared(package):
    """Extras count: what only they bring is imported in functions, as hashcore's test_refusals.py shows."""
    project = project_of(package)
    extras = [text for extra in project.get("optional-dependencies", {}).values() for text in extra]
    declared = {canonicalize_name(Requirement(text).name) for text in [*project["dependencies"], *extras]}
    provided_by = importlib.metadata.packages_distributions()
    for module, at in imports(package).items():
        assert module not in MAY_IMPORT.keys() - MAY_IMPORT[package], f"{at}: {package} may not import {module}"
        providers = {canonicalize_name(name) for name in provided_by.get(module, [module])}
        assert module in HOSTS.get(package, ()) or providers & declared, f"{at}: {package} does not declare {module}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_versions_are_those_of_the_changelogs_and_of_the_ranges_that_others_of_ours_allow(package):
    """A range ends below the next major version: `hashcore>=1.0,<2`."""
    project = project_of(package)
    changes = (ROOT / "packages" / package.replace("_", "-") / "CHANGELOG.md").read_text()
    top, text = re.search(r"^## +(.+?) *\n(.*?)(?=^## |\Z)", changes, re.M | re.S).groups()
    assert top == project["version"]
    assert text.strip()
    extras = [text for extra in project.get("optional-dependencies", {}).values() for text in extra]
    versions = {project_of(name)["name"]: Version(project_of(name)["version"]) for name in MAY_IMPORT}
    for one in map(Requirement, [*project["dependencies"], *extras]):
        version = versions.get(canonicalize_name(one.name))
        if version is not None and one.name != project["name"]:
            assert {bound.operator for bound in one.specifier} == {">=", "<"}, one
            assert one.specifier.contains(version, prereleases=True), one
            assert not one.specifier.contains(f"{version.major + 1}.0.0"), one


MAKERS = {"empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randn", "tensor", "zeros"}


def test_every_tensor_made_has_a_dtype():
    """Else it has torch's default one, which a caller may have set to that of a model; `arange`, if of fractions."""
    found = []
    for path in sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("examples/*.py")]):
        for node in (node for node in ast.walk(ast.parse(path.read_text(), path)) if isinstance(node, ast.Call)):
            torch, _, made = ast.unparse(node.func).rpartition(".")
            made_real = made in MAKERS or (made == "arange" and re.search(r"\d\.\d|[^/]/[^/]", ast.unparse(node)))
            if torch == "torch" and made_real and "dtype" not in {x.arg for x in node.keywords}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_no_index_host_and_no_machine_path():
    # A checkout may belong to another user, as in a container.
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    assert "pyproject.toml" in listed
    assert "uv.lock" not in listed
    for path in (path for path in listed if (ROOT / path).is_file()):
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:  # weights and pictures
            continue
        if found := FORBIDDEN.search(text):
            line = text.count("\n", 0, found.start()) + 1
            pytest.fail(f"{path}:{line} contains {found[0]!r}; name no index host and no path of one machine")
