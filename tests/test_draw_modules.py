"""Imports between packages and modules, and the figure that shows them."""

import ast

import pytest

TOOL = "draw_modules"


def test_no_package_imports_one_that_depends_on_it(tool):
    for package, modules in tool.graph().items():
        above = tool.ORDER[tool.ORDER.index(package) :]
        assert not [name for used in modules.values() for name in used if name.split(".")[0] in above and "." in name]


def test_no_modules_import_one_another(tool):
    assert not [cycle for modules in tool.graph().values() for cycle in tool.cycles(modules)]


@pytest.mark.parametrize("package", ["evals", "hashcore", "hashtrain", "sparse_decode", "sparse_serve"])
def test_no_files_import_one_another_even_for_types(tool, package):
    (folder,) = tool.ROOT.glob(f"packages/*/src/{package}")
    files = {path: path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py")}
    names = {".".join(name.parts).removesuffix(".__init__"): path for path, name in files.items()}
    found = {}
    for name, path in names.items():
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        asked = {(node.module, alias.name) for node in froms for alias in node.names}
        found[name] = {f"{m}.{part}" if f"{m}.{part}" in names else m for m, part in asked} - {name}
    assert not tool.cycles(found)


def test_a_level_imports_only_levels_above_it(tool):
    modules = {"a": set(), "b": {"a", "c"}, "c": {"b"}, "d": {"c"}, "e": {"a"}}
    assert tool.cycles(modules) == [{"b", "c"}]
    assert tool.levels(modules) == [["a"], ["b", "c", "e"], ["d"]]


def test_imports_for_types_alone_do_not_count(tool):
    text = "import a.b\nif TYPE_CHECKING:\n    import c.d\ndef f():\n    from e.f import g\n"
    assert list(tool.imports(ast.parse(text))) == ["a.b", "e.f.g"]


def test_the_figure_shows_these_imports(tool, load, monkeypatch):
    found, stored = tool.graph(), load("tools", "stored_figure")
    assert stored.drawn_from(tool.OUT) == tool.digest(found), "run `uv run tools/draw_modules.py`"
    found["hashcore"]["ops"].add("hashtrain.artefact.hasher")
    assert tool.digest(found) != tool.digest(tool.graph())
    monkeypatch.setattr("sys.argv", ["tools/draw_modules.py", "--check"])
    stored.run("", tool.OUT, lambda: tool.digest(tool.graph()), lambda: pytest.fail("drawn"))
    with pytest.raises(SystemExit, match=r"modules.png is stale.*run `uv run tools/draw_modules.py`"):
        stored.run("", tool.OUT, lambda: tool.digest(found), lambda: pytest.fail("drawn"))
