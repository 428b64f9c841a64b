"""numba's cache of machine code, which also notices changes of what a kernel is made of.

numba compares the kernel's own file. A kernel inlines functions and constants of other files beside it, and of this
folder, which may be another package's: after an upgrade of that one alone, numba would run the old code.
"""

# numba is untyped.
# pyright: reportAttributeAccessIssue=false

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache


class KernelCache(FunctionCache):
    """Machine code of one kernel on disk, which is discarded when a file of its folder, or of this one, changes."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__(kernel)
        folders = {Path(kernel.__code__.co_filename).parent, Path(__file__).parent}
        self._cache_file._source_stamp = self._cache_file._source_stamp, *sorted(map(_digest, folders))


@functools.cache
def _digest(folder: Path) -> str:
    """Return a digest of the sources of a folder: more than what is compiled, so some changes compile it in vain."""
    files = sorted(folder.glob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
