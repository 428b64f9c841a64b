"""Strict types: which modules are public, and that each of them is checked strictly."""

import ast
import functools
import json
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = {
    path.parent.name: path.parent.parent for path in ROOT.glob("packages/*/src/*/__init__.py")
}  # import name: the folder src
STRICT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]["strict"]
# What a strict file may set off for all of itself: packages and methods of others that have no types. What is made of
# what they return is checked all the same.
MAY_BE_OFF = {"reportMissingTypeStubs", "reportUnknownMemberType"}
# What no comment may set off in a strict file, not even in one line: these are about our own code.
NEVER_OFF = re.compile(
    "|".join(
        (
            "reportMissing(Parameter|TypeArgument)",
            "reportUnknown(Parameter|Lambda)",
            "reportUntyped",
            "reportPrivateUsage",
            "reportUnused",
            "reportUnnecessary",
        )
    )
)
DOCUMENTS = sorted(
    path
    for pattern in ("README.md", "docs/**/*.md", "packages/*/README.md", "examples/*")
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".ipynb")
)


def file_of(module):
    """Return the file of one of our modules by its dotted name, or None."""
    package = module.partition(".")[0]
    if package not in PACKAGES:
        return None
    path = PACKAGES[package].joinpath(*module.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def sources(module, name):
    """Return the files that a name goes through, from the module that gives it to the one that defines it."""
    path = file_of(module)
    if path is None:
        return set()
    found = {path}
    body = tree_of(path).body
    for block in [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]:
        body = body + block.body  # where a package tells its lazy names (hashtrain.lazy)
    made = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    calls = [value for value in made if isinstance(value, ast.Call)]  # name = wrapper(module.name)
    through = [part for call in calls for part in call.args if isinstance(part, ast.Attribute)]
    names = {name} | {ast.unparse(part.value) for part in through}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module != module:
            for alias in node.names:
                if (alias.asname or alias.name) in names:
                    found |= sources(node.module, alias.name)
    submodule = file_of(f"{module}.{name}")
    return found if submodule is None else found | {submodule}


def exported(package):
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree_of(file_of(package)).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return names


def python_of(path):
    """Return the Python in a document: code blocks, cells of a notebook, or a file itself."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [text]
    if path.suffix == ".ipynb":
        return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shown(path):
    """Return the files that a reader of a document imports from."""
    found = set()
    for text in python_of(path):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {file for alias in node.names for file in sources(node.module, alias.name)}
            elif isinstance(node, ast.Import):
                found |= {file for alias in node.names if (file := file_of(alias.name))}
    return found


@functools.cache
def public():
    files = {file for package in PACKAGES for name in exported(package) for file in sources(package, name)}
    return {str(path.relative_to(ROOT)) for path in files.union(*map(shown, DOCUMENTS))}


def test_every_public_module_is_checked_strictly_and_no_path_matches_nothing():
    assert sorted(STRICT) == STRICT
    assert set(STRICT) == public(), "[tool.basedpyright] strict must list the public modules, one by one"


def test_public_is_what_is_exported_and_what_documents_show():
    assert len(PACKAGES) == 5
    assert {f"packages/{f.parent.name}/src/{n}/__init__.py" for n, f in PACKAGES.items()} <= public()
    assert "packages/hashcore/src/hashcore/index/bit_index.py" in public()  # through index/__init__.py
    assert "packages/hashcore/src/hashcore/reference.py" in public()  # exported as a module
    assert "packages/hashcore/src/hashcore/cuda/source.py" in public()  # shown in docs/how-to/kernel.md
    assert "packages/hashcore/src/hashcore/cpu/search_kernels.py" not in public()


@pytest.mark.parametrize("path", STRICT)
def test_a_strict_file_sets_off_only_what_others_lack(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    for comment in re.findall(r"# *(?:pyright|type|basedpyright) *: *(.*)", text):
        assert re.match(r"ignore\[|report\w+=false", comment), f"{path}: {comment}"
        assert not NEVER_OFF.search(comment), f"{path}: {comment}"
        if not comment.startswith("ignore["):
            assert set(re.findall(r"(\w+)=\w+", comment)) <= MAY_BE_OFF, f"{path}: {comment}"
            assert "basic" not in comment, f"{path}: {comment}"
