"""Run independent jobs in several processes, one thread each, so the result does not depend on their number.

Two single-threaded layers in parallel take a third less time than one after the other on two threads, and far less
where other work shares the cores: threads of one operation wait for the slowest (docs/log.md).
"""

import contextlib
import ctypes
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, get_context, parent_process
from typing import Any

import torch

from hashtrain import device

Report = Callable[..., None]
"""Receives a status text, the steps done since the last report, and sometimes a line for metrics.jsonl."""
Function = Callable[..., Any]
_MOST = 6  # a worker takes 0.6 GB for the demo model
_POLL = 0.05  # seconds
# What jobs and their reports need: "hashtrain" imports lazily, so every worker would import it again.
PRELOADED = ("torch", "transformers.models.llama", "hashtrain.run.job", "hashtrain.run.waves")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEEP_BYTES = 1 << 30
_given: list[Any] = []
"""In a worker: what sends a report to the process that started it, and what all jobs need."""


def default_workers(device_name: str) -> int:
    """Return the number of worker processes: on CUDA one a device, else one a core of this process, at most `_MOST`."""
    if device_name != "cpu":
        return torch.cuda.device_count() if device_name == "cuda" else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST)


def run_jobs(function: Function, jobs: Sequence[Any], workers: int, report: Report, given: Any = None) -> list[Any]:
    """Run every job and return the results in the order of the jobs.

    Args:
        function: called as `function(job, report)`, or `function(job, report, given)` if there is one. It, its
            arguments and its result must be importable or picklable, because other processes call it. Its reports are
            passed to `report` in this process.
        jobs: started in order, so put the longest first.
        workers: number of processes; 1 runs the jobs in this one.
        given: what all jobs need, sent to each worker once; tensors in shared memory are not copied.
    Raises: the exception of a job; ChildProcessError if a worker died. The other workers are stopped.
    """
    more = () if given is None else (given,)
    if workers == 1 or len(jobs) <= 1:
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker
        try:
            return [function(job, report, *more) for job in jobs]
        finally:
            torch.set_num_threads(before)
    # Forking this process, which has threads, may hang; a server with torch loaded is fast.
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    with _ignoring_interrupts():
        forkserver.ensure_running()
    numbers, reports = context.SimpleQueue(), context.SimpleQueue()
    for own in range(workers):
        numbers.put(own)
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, _begin, (numbers, reports, *more))
    try:
        running = [pool.submit(_work, function, job) for job in jobs]
        left = set(running)
        while left:
            done = {future for future in left if future.done()}  # their reports were sent before
            while not reports.empty():
                report(*reports.get())
            for future in done:
                future.result()
            left -= done
            time.sleep(_POLL * (not done))
        pool.shutdown()
        return [future.result() for future in running]
    except BrokenProcessPool:
        why = "perhaps for lack of memory; run again with fewer --workers"
        raise ChildProcessError(f"a worker was killed, {why}") from None
    finally:
        for process in list((pool._processes or {}).values()):  # jobs in progress are not waited for
            process.terminate()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Let processes started in the block ignore Ctrl-C; only this process reports it."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(numbers: Any, reports: Any, *given: Any) -> None:
    """Prepare a worker, which ends when the process that started it does, however that ends."""
    device.worker = numbers.get()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    torch.set_num_threads(1)
    _given[:] = lambda *message: reports.put(message), *given


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
    os._exit(1)


def _work(function: Function, job: Any) -> Any:
    return function(job, *_given)


def keep_freed_memory() -> bool:
    """Let the process keep freed memory. Returns whether the C library supports this (glibc does).

    By default glibc returns large blocks to the system and gets them back as zeroed pages. With one worker per core
    that costs a fifth of a training step (docs/log.md). Results do not change.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _KEEP_BYTES)) & bool(mallopt(_TRIM_THRESHOLD, _KEEP_BYTES))
