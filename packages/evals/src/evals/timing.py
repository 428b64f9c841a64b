"""Times of steps, and the memory bandwidth to compare them with."""

import time
from collections.abc import Callable

import numpy as np
import torch

from evals.metrics import Estimate, bootstrap

_PROBE_BYTES = 1 << 28  # larger than any last-level cache of two cores
QUANTILES = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}


def timed(
    step: Callable[[], object],
    steps: int,
    warmup: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Call `step` `warmup` times, then `steps` times; return the seconds of each of the latter."""
    times: list[float] = []
    for _ in range(warmup + steps):
        began = clock()
        step()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        times.append(clock() - began)
    return times[warmup:]


def quantiles(times: list[list[float]], seed: int) -> dict[str, Estimate]:
    """Estimate the 50, 90 and 99 % quantiles of a step's milliseconds: the mean over repeats, and its interval.

    With few steps per repeat the 99 % quantile is close to the slowest step.
    """
    milliseconds = 1000 * np.array(times)
    columns = np.stack([np.percentile(milliseconds, share, axis=1) for share in QUANTILES.values()], axis=1)
    return dict(zip(QUANTILES, bootstrap(columns, seed), strict=True))


def read_bandwidth(device: str = "cpu") -> float:
    """Measure the memory read bandwidth in bytes per second: the best of five sums of 256 MiB."""
    x = torch.ones(_PROBE_BYTES // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        x.sum().item()
        best = min(best, time.perf_counter() - began)
    return _PROBE_BYTES / best
