"""Compiles kernels and runs them on threads.

Kernels release the GIL, and threads take pieces of the work in turn. Where torch is loaded, they are the threads of its
OpenMP runtime (`hashcore.cpu.team`), if that has as many as are asked for. Else they are Python threads, including the
caller's, which are kept, because starting them takes as long as a small kernel; they are safe after a fork. Pieces
share no outputs, or write the same values there, so the result does not depend on the split.

numba's own threading layer is not used: it is not safe to call from several threads, and doubles the time to compile.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import functools
import hashlib
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from hashcore.cpu import team

GRAIN = 1 << 23
"""Popcounts, or 1/4 of the scores to select from, that justify a thread of ours: it takes up to 0.2 ms to start."""
TEAM_GRAIN = 1 << 20
"""The same for a thread of torch's team, which starts within 0.02 ms."""


def most() -> int:
    """Return the maximal number of threads, NUMBA_NUM_THREADS."""
    return numba.config.NUMBA_NUM_THREADS


def count(work: int, limit: int | None = None) -> int:
    """Return the number of threads that this many popcounts justify, up to a limit, by default `most`."""
    if work < 2 * min(GRAIN, TEAM_GRAIN):
        return 1
    justified = max(work // GRAIN, min(work // TEAM_GRAIN, team.size()))
    return max(1, min(justified, most() if limit is None else limit))


def run(kernel: Callable[..., Any], tasks: int, threads: int, arguments: tuple[Any, ...]) -> list[Any]:
    """Run tasks [0, tasks) of a kernel on at most `threads` threads.

    Returns: the results of the calls, of which each did a part of the tasks; one number, all results combined by "or",
        if torch's threads did the work.
    Raises: what the kernel raises.
    """
    function = compiled(kernel)
    if threads == 1:
        return [function(0, tasks, *arguments)]
    if threads <= team.size() and isinstance(function, Dispatcher):
        return [team.run(function, tasks, threads, arguments)]
    pieces = min(tasks, 4 * threads)  # several per thread, for load balance
    edges = [tasks * piece // pieces for piece in range(pieces + 1)]
    found, turns = [None] * pieces, itertools.count()

    def work() -> None:
        while (piece := next(turns)) < pieces:
            found[piece] = function(edges[piece], edges[piece + 1], *arguments)

    helpers = [_helpers(os.getpid()).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        running = [helper for helper in helpers if not helper.cancel()]  # others are busy with another caller's work
        wait(running)  # even after an error: they use the caller's memory
    for helper in running:
        helper.result()
    return found


@functools.lru_cache(maxsize=1)
def _helpers(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process; a fork does not copy those of the parent."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1), most()), "hashcore")


class KernelCache(FunctionCache):
    """numba's cache of a kernel's machine code on disk, which also notices changes of what the kernel is made of.

    numba compares the kernel's own file. A kernel inlines functions and constants of other files beside it, and of this
    folder, which may be another package's: after an upgrade of that one alone, numba would run the old code.
    """

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__(kernel)
        folders = {Path(kernel.__code__.co_filename).parent, Path(__file__).parent}
        self._cache_file._source_stamp = self._cache_file._source_stamp, *sorted(map(_digest, folders))


@functools.cache
def _digest(folder: Path) -> str:
    """Return a digest of the sources of a folder: more than what is compiled, so some changes compile it in vain."""
    files = sorted(folder.glob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel on first use, caching the machine code on disk for later processes.

    A kernel takes 1-7 s to compile and 5-20 ms to load; the first in a process takes 0.4 s more to start numba. numba
    caches beside the kernels or, if that folder is not writeable, in the user's cache folder. If neither is writeable,
    numba raises an error, and the kernel is compiled for this process only. This happens on first use and not at
    import, because choosing the folder writes to it.
    """
    kernel: Any = numba.njit(nogil=True, no_cfunc_wrapper=True)(function)
    try:
        kernel._cache = KernelCache(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
    return kernel


# A fork waits until no thread compiles, because a copy of numba's lock and of LLVM's would stay locked.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)
