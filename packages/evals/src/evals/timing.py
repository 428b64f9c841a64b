"""Comparable timings: methods take turns, after a warm-up, repeatedly."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from evals.metrics import Estimate, bootstrap

_PROBE_BYTES = 1 << 28  # larger than any last-level cache of two cores
QUANTILES = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}


class Turn(NamedTuple):
    """One method's turn: `step` is timed, `steps` times in a row; `prepare` and `finish` are not."""

    prepare: Callable[[], None]
    step: Callable[[int], object]
    finish: Callable[[], None]


def nothing() -> None:
    """Do nothing before or after a turn, or wait for nothing: the CPU runs synchronously."""


def in_turns(
    turns: Mapping[str, Turn],
    steps: int,
    warmup: int,
    repeats: int,
    sync: Callable[[], None] = nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[list[float]]]:
    """Time each method's steps, in turns, so that a busy moment affects all methods.

    Args:
        steps: timed steps per turn; warmup: untimed steps before them; repeats: turns of each method.
        sync: waits for the device.
    Returns: seconds of each step, [repeats][steps] by method.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in turns}
    for _ in range(repeats):
        for name, turn in turns.items():
            turn.prepare()
            times = []
            for i in range(warmup + steps):
                sync()
                began = clock()
                turn.step(i)
                sync()
                times.append(clock() - began)
            turn.finish()
            found[name].append(times[warmup:])
    return found


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
