"""Compiling and running the numba kernels of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import torch

_GRAIN = 1 << 22  # multiply-adds that pay for a thread: about 1 ms


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel at its first use, keeping the machine code on disk where a folder can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return numba.njit(nogil=True)(function)


def run(kernel: Callable[..., None], tasks: int, work: int, *arguments: Any) -> None:
    """Call `kernel(first, last, *arguments)` until tasks 0..tasks-1 are done.

    Large work is cut into pieces for short-lived Python threads, as many as torch may use: no barrier, and safe from
    several threads at once, which numba's own pool is not. Tasks never share outputs, so the cut changes nothing.
    """
    threads = min(torch.get_num_threads(), work // _GRAIN, tasks)
    function = compiled(kernel)
    if threads < 2:
        function(0, tasks, *arguments)
        return
    pieces = min(tasks, 4 * threads)  # a thread that a busy machine holds up takes fewer
    edges = [tasks * piece // pieces for piece in range(pieces + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first, last: function(first, last, *arguments), edges, edges[1:]))
