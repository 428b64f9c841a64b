"""What tests share: scripts, which are installed by no package, and a folder; puts their helpers on the path."""

import importlib
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # which importing tests by file leaves off it
ROOT = pathlib.Path(__file__).resolve().parent.parent


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
def folder(tmp_path_factory):
    """A folder for what the tests of one file read."""
    return tmp_path_factory.mktemp("folder")
