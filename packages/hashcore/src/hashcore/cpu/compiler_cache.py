"""numba's cache of machine code, which also notices changes of what a kernel is made of.

numba compares the size and time of the kernel's own file. A kernel inlines functions and constants of other files, some
of another package: after an upgrade of that one alone, numba would run the old code.
"""

# numba is untyped.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numba.core import types as kinds
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.extending import _Intrinsic as Intrinsic

OTHERS = ("builtins", "llvmlite", "numba", "numpy")
"""Packages whose functions are not followed: numba compares its own version."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype, kinds.Type)


class KernelCache(FunctionCache):
    """Machine code of one kernel on disk, which is discarded when `made_of(kernel)` changes."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__(kernel)
        self._cache_file._source_stamp = self._cache_file._source_stamp, made_of(kernel)


def made_of(kernel: Callable[..., Any]) -> str:
    """Return a digest of the bytecode of a kernel and of all that it calls, and of the constants that they read."""
    found = hashlib.sha256()
    for piece in _pieces(kernel, set()):
        found.update(piece.encode() + b"\0")
    return found.hexdigest()


def _pieces(value: Any, seen: set[int]) -> Iterator[str]:
    """Describe a value that compiled code depends on; `seen`: addresses of functions that are described already."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _pieces(each, seen)
    elif isinstance(value, frozenset):
        yield from sorted(map(repr, value))
    elif isinstance(value, Dispatcher):
        yield repr(sorted((name, repr(option)) for name, option in value.targetoptions.items()))
        yield from _class(value._compiler.pipeline_class, seen)
        yield from _pieces(value.py_func, seen)
    elif isinstance(value, Intrinsic):
        yield from _pieces(value._defn, seen)
    elif isinstance(value, types.FunctionType):
        yield from _function(value, seen)


def _function(function: types.FunctionType, seen: set[int]) -> Iterator[str]:
    if id(function) in seen or function.__module__.partition(".")[0] in OTHERS:
        return
    seen.add(id(function))
    yield function.__qualname__
    yield from _pieces(function.__defaults__, seen)
    yield from _code(function.__code__, function.__globals__, seen)
    for cell in function.__closure__ or ():
        yield from _pieces(cell.cell_contents, seen)


def _code(code: types.CodeType, names: dict[str, Any], seen: set[int]) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        yield from _code(constant, names, seen) if isinstance(constant, types.CodeType) else _pieces(constant, seen)
    for name in code.co_names:
        value = names.get(name)
        if isinstance(value, types.ModuleType):  # what is read of it is among the names, too
            for attribute in code.co_names:
                yield from _pieces(vars(value).get(attribute), seen)
        else:
            yield from _pieces(value, seen)


def _class(owner: type, seen: set[int]) -> Iterator[str]:
    """Describe a class that compiles functions, and those that it derives from."""
    for kind in owner.__mro__:
        if kind.__module__.partition(".")[0] not in OTHERS:
            for name, value in sorted(vars(kind).items()):
                yield name
                yield from _class(value, seen) if isinstance(value, type) else _pieces(value, seen)
