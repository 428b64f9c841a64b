"""Packages whose names are imported on first use, so that `--help` does not wait for torch and transformers."""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def export(package: str, homes: Mapping[str, tuple[str, ...]]) -> None:
    """Export names from a package's modules, importing each module on first use.

    Args:
        package: its `__name__`, passed while it is being imported.
        homes: for each module, the names that the package exports from it.
    """
    home_of = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in home_of:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            value = getattr(import_module(home_of[name]), name)
            super().__setattr__(name, value)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            # Importing a submodule binds its name here; a function of that name must win.
            if not (isinstance(value, ModuleType) and name in home_of):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *home_of})

    sys.modules[package].__class__ = Package
