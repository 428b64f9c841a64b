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


def test_the_only_import_cycle_is_the_known_one(house):
    """`ops` imports the modules of this cycle when it is called: tensors go to torch_ops."""
    found = [cycle for modules in house.graph().values() for cycle in house.cycles(modules)]
    assert found == [{"ops", "torch_library", "torch_ops"}]


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
