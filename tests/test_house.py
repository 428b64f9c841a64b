"""Imports between packages and modules, and the figure that shows them."""

import ast

import pytest


@pytest.fixture
def house(load):
    return load("tools", "draw_house")


def test_no_package_imports_one_that_depends_on_it(house):
    for package, modules in house.graph().items():
        above = house.ORDER[house.ORDER.index(package) :]
        assert not [name for used in modules.values() for name in used if name.split(".")[0] in above and "." in name]


def test_no_modules_import_one_another(house):
    assert not [cycle for modules in house.graph().values() for cycle in house.cycles(modules)]


@pytest.mark.parametrize("package", ["evals", "hashcore", "hashtrain", "sparse_decode", "sparse_serve"])
def test_no_files_import_one_another_even_for_types(house, package):
    (folder,) = house.ROOT.glob(f"packages/*/src/{package}")
    files = {path: path.relative_to(folder.parent).with_suffix("") for path in folder.rglob("*.py")}
    names = {".".join(name.parts).removesuffix(".__init__"): path for path, name in files.items()}
    found = {}
    for name, path in names.items():
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        asked = {(node.module, alias.name) for node in froms for alias in node.names}
        found[name] = {f"{m}.{part}" if f"{m}.{part}" in names else m for m, part in asked} - {name}
    assert not house.cycles(found)


def test_a_level_imports_only_levels_above_it(house):
    modules = {"a": set(), "b": {"a", "c"}, "c": {"b"}, "d": {"c"}, "e": {"a"}}
    assert house.cycles(modules) == [{"b", "c"}]
    assert house.levels(modules) == [["a"], ["b", "c", "e"], ["d"]]


def test_imports_for_types_alone_do_not_count(house):
    text = "import a.b\nif TYPE_CHECKING:\n    import c.d\ndef f():\n    from e.f import g\n"
    assert list(house.imports(ast.parse(text))) == ["a.b", "e.f.g"]


def test_the_figure_shows_these_imports(house, load, monkeypatch):
    found, stored = house.graph(), load("tools", "stored_figure")
    assert stored.drawn_from(house.OUT) == house.digest(found), "run `uv run tools/draw_house.py`"
    found["hashcore"]["ops"].add("hashtrain.artefact.hasher")
    assert house.digest(found) != house.digest(house.graph())
    monkeypatch.setattr("sys.argv", ["tools/draw_house.py", "--check"])
    stored.run("", house.OUT, lambda: house.digest(house.graph()), lambda: pytest.fail("drawn"))
    with pytest.raises(SystemExit, match=r"house.png is stale.*run `uv run tools/draw_house.py`"):
        stored.run("", house.OUT, lambda: house.digest(found), lambda: pytest.fail("drawn"))
