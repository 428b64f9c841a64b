"""What the tests of scripts share: tools, examples and extensions of the site are installed by no package."""

import importlib
import pathlib

import pytest

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
