"""What tests share: scripts, which are installed by no package, and a folder; puts their helpers on the path."""

import importlib
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # which importing tests by file leaves off it
ROOT = pathlib.Path(__file__).resolve().parent.parent
MEASURED = {"test_command_lines.py", "test_end_to_end.py", "test_model_folders.py"}
"""Files that run lines of the packages that no package's own tests run. The others check tools and texts, or draw many
examples of one thing: measuring them takes half as long again and finds nothing."""


def pytest_collection_modifyitems(items):
    """Switch coverage off in most tests of this folder."""
    for item in items:
        if item.path.parent == ROOT / "tests" and item.path.name not in MEASURED:
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture(autouse=True)
def processes_without_coverage(request, monkeypatch):
    """Do not measure what such a test starts, either: coverage finds its settings in a variable."""
    if request.node.get_closest_marker("no_cover"):
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture(scope="session")
def load():
    """Return a function that imports a module of a folder of this repository, which finds its siblings there."""

    def imported(folder, name):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / folder)
            module = importlib.import_module(name)
        assert pathlib.Path(str(module.__file__)).is_relative_to(ROOT / folder), f"another {name} was imported before"
        return module

    return imported


@pytest.fixture(scope="module")
def tool(request, load):
    """The module of tools/ that a test file names in TOOL."""
    return load("tools", request.module.TOOL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for what the tests of one file read."""
    return tmp_path_factory.mktemp("folder")
