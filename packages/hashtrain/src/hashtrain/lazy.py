"""Packages whose names are imported when they are first used: `--help` need not wait for torch and transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def export(package: str, homes: Mapping[str, tuple[str, ...]]) -> None:
    """Give a package names that its modules define, each imported when it is first asked for.

    Args:
        package: its `__name__`, given while it is being imported.
        homes: its modules, and the names that the package takes from each.
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
            # Importing a submodule binds its name here: where a function has that name, it is the function's.
            if not (isinstance(value, ModuleType) and name in home_of):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *home_of})

    sys.modules[package].__class__ = Package
