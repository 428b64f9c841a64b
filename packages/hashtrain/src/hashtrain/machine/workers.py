"""Run independent jobs in several processes, one thread each, so the result does not depend on their number.

Two single-threaded layers in parallel take a third less time than one after the other on two threads, and far less
where other work shares the cores: threads of one operation wait for the slowest (docs/log.md).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from hashtrain.machine.allocator import keep_freed_memory

number = 0
"""Number of this worker; 0 in the process that starts them."""
Report = Callable[..., None]
Function = Callable[..., Any]
Pipe = Any  # its class differs among systems
_PATIENCE = 10.0  # seconds
_MOST = 6  # a worker takes 0.6 GB for the demo model
# What jobs and their reports need: "hashtrain" imports lazily, so every worker would import it again.
PRELOADED = (
    *("torch", "transformers.models.llama", "hashtrain.run.job", "hashtrain.run.waves"),
    "hashtrain.training.pair_loss",  # numba
)


def default_workers() -> int:
    """Return the number of cores that this process may use, at most `_MOST`."""
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
        with one_thread():
            return [function(job, report, *more) for job in jobs]
    results: list[Any] = [None] * len(jobs)
    left, busy, processes = iter(range(len(jobs))), dict[Pipe, int](), list[BaseProcess]()

    def send(pipe: Pipe) -> None:
        busy.pop(pipe, None)
        if (number := next(left, None)) is None:
            pipe.close()  # an idle worker exits when its pipe closes
        else:
            busy[pipe] = number
            pipe.send(jobs[number])

    try:
        for _ in range(min(workers, len(jobs))):
            send(_start(function, more, processes))
        while busy:
            for pipe in connection.wait(list(busy)):
                kind, *said = _received(pipe, f"{busy[pipe] + 1} of {len(jobs)}")
                if kind == "report":
                    report(*said)
                elif kind == "failed":
                    raise said[0]
                else:
                    (results[busy[pipe]],) = said
                    send(pipe)
        for process in processes:  # their pipes are closed, so they exit and release their resources
            process.join(_PATIENCE)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    return results


def _start(function: Function, more: tuple[Any, ...], processes: list[BaseProcess]) -> Pipe:
    context = _context()
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(function, theirs, len(processes)), daemon=True)
    process.start()
    theirs.close()  # so that a worker's death closes the pipe
    processes.append(process)
    mine.send(more)
    return mine


def _received(pipe: Pipe, job: str) -> tuple[Any, ...]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        why = "perhaps for lack of memory; run again with fewer --workers"
        raise ChildProcessError(f"a worker was killed in job {job}, {why}") from None


def _answer(pipe: Pipe, answer: tuple[str, Any]) -> None:
    """Send a result or an error; an error that cannot be pickled is sent as its text."""
    try:
        pipe.send(answer)
    except OSError:
        raise
    except Exception:
        pipe.send(("failed", RuntimeError(f"{type(answer[1]).__name__}: {answer[1]}")))


def _context() -> ForkServerContext:
    """Return a start method: forking this process, which has threads, may hang; a server with torch loaded is fast."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def start_server() -> None:
    """Start the process that workers are forked from, whose imports take seconds of one core, and do not wait for it.

    Call it when workers will be needed soon; `run_jobs` starts it otherwise. It ends with this process.
    """
    _context()
    with _ignoring_interrupts():
        forkserver.ensure_running()


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


def _work(function: Function, pipe: Pipe, own_number: int) -> None:
    """Run jobs until the parent closes the pipe or dies."""
    global number
    number = own_number
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C only the parent prints
    keep_freed_memory()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        given = pipe.recv()
        while True:
            job = pipe.recv()
            try:
                answer = ("done", function(job, lambda *message: pipe.send(("report", *message)), *given))
            except Exception as error:
                answer = ("failed", error)
            _answer(pipe, answer)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread inside the block, as in a worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
