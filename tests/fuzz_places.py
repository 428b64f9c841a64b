"""Where a case runs: here, in a thread, in a forked or in a spawned process; what holds here must hold there."""

import functools
import importlib
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np

LONG = 120  # seconds after which a case counts as hanging


def somewhere(work: Callable[..., Any]) -> Callable[[np.random.Generator], Any]:
    """Let one case in ten run in one of the other places."""

    @functools.wraps(work)
    def case(rng: np.random.Generator) -> Any:
        place = str(rng.choice(["here", "thread", "fork", "spawn"], p=[0.9, 0.04, 0.03, 0.03]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            if place == "here":
                return work(rng)
            if place == "spawn":
                return _spawned().submit(_call, work.__module__, rng).result(LONG)
            fork = multiprocessing.get_context("fork")
            alone = getattr(sys.modules.get("torch"), "set_num_threads", None)  # a fork would wait for torch's threads
            with ThreadPoolExecutor(1) if place == "thread" else ProcessPoolExecutor(1, fork, alone, (1,)) as pool:
                return pool.submit(_call, work.__module__, rng).result(LONG)

    return case


@functools.cache
def _spawned() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _call(module: str, rng: np.random.Generator) -> Any:
    """Run the case of a module: a process is told its name, and a spawned one has to import it."""
    return importlib.import_module(module).case.__wrapped__(rng)
