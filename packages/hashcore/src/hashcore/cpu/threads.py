"""Compiled kernels and the threads that run them.

The kernels release the GIL and run on Python threads, the caller's among them, that take pieces in turn: no barrier
(8-16 ms for numba's own on a loaded machine), half the compile time, safe from several threads (numba's default layer
is not) and after a fork. The other threads are kept: to start them anew takes as long as a small kernel. Pieces never
share outputs, so the result does not depend on them.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba

GRAIN = (
    1 << 23
)  # popcounts, or 1/4 of the scores to select from, that pay for a thread, which takes up to 0.2 ms to start and end


def most() -> int:
    """Return how many threads the user allows."""
    return numba.config.NUMBA_NUM_THREADS


def count(work: int, limit: int | None = None) -> int:
    """Return how many threads this many popcounts pay for, up to a limit, by default `most`."""
    return max(1, min(work // GRAIN, most() if limit is None else limit))


def run(kernel: Callable[..., Any], tasks: int, threads: int, arguments: tuple[Any, ...]) -> list[Any]:
    """Run tasks [0, tasks) of a kernel, in one go if threads is 1; return what each piece returns."""
    if threads == 1:
        return [compiled(kernel)(0, tasks, *arguments)]
    pieces = min(tasks, 4 * threads)  # a thread that a busy machine holds up takes fewer
    edges = [tasks * piece // pieces for piece in range(pieces + 1)]
    function, found, turns = compiled(kernel), [None] * pieces, itertools.count()

    def work() -> None:
        while (piece := next(turns)) < pieces:
            found[piece] = function(edges[piece], edges[piece + 1], *arguments)

    helpers = [_helpers(os.getpid()).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            helper.cancel()  # one that is busy for somebody else is not waited for
    for helper in helpers:
        if not helper.cancelled():
            helper.result()
    return found


@functools.lru_cache(maxsize=1)
def _helpers(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process: those of its parent did not come along in a fork."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1), most()), "hashcore")


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel on its first use, keeping the machine code on disk for the next process.

    A kernel takes 1-7 s to compile and 5-20 ms to load, and the first of a process 0.4 s more for numba's own start:
    a command that scores once should not pay for a compiler each time. numba caches beside the kernels or, where that
    cannot be written, in the user's cache folder; where neither can, it refuses, and the kernel is compiled for this
    process only. All of it happens here and not at import, because choosing the folder writes to it.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return numba.njit(nogil=True)(function)
