"""Runs the numba kernels of this package on the threads of hashcore."""

from collections.abc import Callable
from typing import Any

import torch
from hashcore.cpu import threads


def run(kernel: Callable[..., None], tasks: int, work: int, *arguments: Any) -> None:
    """Call `kernel(first, last, *arguments)` until tasks 0..tasks-1 are done.

    Large work is split over up to torch's number of threads. Tasks never share outputs, so the result does not depend
    on the split. work: number of multiply-adds; one takes as long as two popcounts.
    """
    threads.run(kernel, tasks, threads.count(2 * work, min(torch.get_num_threads(), tasks)), arguments)
