"""numba's cache of machine code, which also notices changes of what a kernel is made of.

numba compares the kernel's own file. A kernel inlines functions and constants of other files, some of another package:
after an upgrade of that one alone, numba would run the old code.
"""

# numba is untyped.
# pyright: reportAttributeAccessIssue=false

import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache

OURS = ("hashcore", "hashtrain", "sparse_decode", "sparse_serve", "evals")
"""Packages whose imports are followed; numba compares its own version."""
COMPILER = "hashcore.cpu.threads"
"""The module that chooses the options of the compiler."""
_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^\n#]+)|import\s+([^\n#]+))", re.MULTILINE)


class KernelCache(FunctionCache):
    """Machine code of one kernel on disk, which is discarded when `made_of(kernel)` changes."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__(kernel)
        self._cache_file._source_stamp = self._cache_file._source_stamp, made_of(kernel)


def made_of(kernel: Callable[..., Any]) -> str:
    """Return a digest of the file of a kernel and of all files of ours that it imports, directly or through others.

    That is more than what is compiled, so some changes compile a kernel again to the same code.
    """
    return hashlib.sha256(b"".join(sorted(map(_digest, files(kernel.__module__))))).hexdigest()


def files(module: str) -> set[Path]:
    """Return the files that the kernels of a module are made of, and that of the compiler's options."""
    found: set[Path] = set()
    left = {file for name in (module, COMPILER) if (file := _file(name))}
    while left:
        found |= left
        left = {file for known in left for file in _imported(known)} - found
    return found


@functools.cache
def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


@functools.cache
def _imported(file: Path) -> frozenset[Path]:
    """Return the files of our modules that a file imports, also those that only a type checker or a function imports.

    A package's own file counts only if a name of it is imported that is no module.
    """
    return frozenset(_modules(file.read_text(encoding="utf-8")))


def _modules(source: str) -> Iterator[Path]:
    for module, names, plain in _IMPORT.findall(source):
        listed = re.sub(r"#.*", "", names or plain).strip("()").split(",")
        asked = [words.split()[0] for words in listed if words.strip()]
        if plain:
            yield from (file for name in asked if _is_ours(name) and (file := _file(name)))
        elif _is_ours(module):
            inside = [_file(f"{module}.{name}") for name in asked]
            yield from filter(None, inside)
            if None in inside and (file := _file(module)):
                yield file


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in OURS


@functools.cache
def _file(name: str) -> Path | None:
    """Return the file of a module, without importing it; None if it has none, as a script or in a zip file."""
    root, *rest = name.split(".")
    spec = None if root == "__main__" else importlib.util.find_spec(root)  # a script may have no spec: an error
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *rest)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None
