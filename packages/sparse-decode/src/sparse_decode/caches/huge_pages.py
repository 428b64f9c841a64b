"""Memory in pages of 2 MB, for tensors on the CPU whose rows are read in no order that hardware can predict."""

import ctypes
import functools
import sys
from typing import Any

from torch import Tensor

_SIZE = 1 << 21
_ADVICE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE and MADV_COLLAPSE of Linux


def in_huge_pages(x: Tensor, written: bool = False) -> Tensor:
    """Ask Linux to put a contiguous tensor's memory in huge pages, and return the tensor; elsewhere, do nothing.

    The rows of a selection are far apart. With pages of 4 KB nearly each of them needs another page's entry of the page
    table, which is often in none of the CPU's caches. A system that refuses keeps small pages, which are only slower.

    Args: written: also move what was written before; Linux does so from 6.1 on.
    """
    advise = _advise()
    if advise is not None and x.nbytes >= _SIZE and x.device.type == "cpu" and type(x) is Tensor:
        start, end = -(-x.data_ptr() // _SIZE) * _SIZE, (x.data_ptr() + x.nbytes) // _SIZE * _SIZE
        for advice in (_ADVICE, _COLLAPSE)[: 1 + written]:
            advise(start, max(0, end - start), advice)
    return x


@functools.cache
def _advise() -> Any:
    """Return libc's madvise on Linux, None elsewhere."""
    if sys.platform != "linux":
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
