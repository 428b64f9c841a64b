"""Runs the numba kernels of this package on the threads of hashcore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hashcore.cpu import threads

_GRAIN = 1 << 22  # multiply-adds that justify a thread: about 1 ms


def run(kernel: Callable[..., None], tasks: int, work: int, *arguments: Any) -> None:
    """Call `kernel(first, last, *arguments)` until tasks 0..tasks-1 are done.

    Large work is split over up to torch's number of threads. Tasks never share outputs, so the result does not depend
    on the split.
    """
    threads.run(kernel, tasks, max(1, min(torch.get_num_threads(), work // _GRAIN, tasks)), arguments)
