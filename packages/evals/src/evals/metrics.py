"""Metrics from logits and samples: losses, divergence, and intervals over documents."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
from torch import Tensor

_CHUNK = 1 << 20  # numbers processed at once, 4 MB, so that temporaries stay small compared with the logits


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute each target's negative log-probability, in nats.

    Args:
        logits: [R, V], of any float type; log-probabilities work too.
        targets: int64 [R].
    Returns: float64 [R].
    """
    found, start = torch.empty(len(targets), dtype=torch.float64, device=logits.device), 0
    for p in _log_probs(logits):
        end = start + len(p)
        found[start:end] = -p.gather(-1, targets[start:end, None])[:, 0]
        start = end
    return found


def mean_kl(reference: Tensor, other: Tensor) -> float:
    """Return the mean over rows of KL(reference || other), in nats, for logits [R, V] of any float type."""
    total = torch.zeros((), dtype=torch.float64, device=reference.device)
    for p, q in zip(_log_probs(reference), _log_probs(other), strict=True):
        # A token of probability 0 contributes nothing, whatever the other distribution; 0 * inf would be NaN.
        gap = (p - q).masked_fill_(p == -torch.inf, 0)
        total += gap.mul_(p.exp()).sum(dtype=torch.float64)
    return total.item() / len(reference)


def _log_probs(logits: Tensor) -> Iterator[Tensor]:
    """Yield float32 log-probabilities [r, V] for consecutive rows, at most _CHUNK numbers at once."""
    for part in cast("tuple[Tensor, ...]", logits.split(max(1, _CHUNK // logits.shape[-1]))):
        yield part.float().log_softmax(-1)


class Estimate(NamedTuple):
    """A mean over documents and its 95 % interval, by Student's t; no interval for fewer than two documents."""

    mean: float
    low: float | None
    high: float | None


def normal(value: float, error: float | None) -> Estimate:
    """Return a value with the 95 % interval of its standard error; no interval without one."""
    half = None if error is None else 1.959964 * error
    return Estimate(value, None, None) if half is None else Estimate(value, value - half, value + half)


def mean_estimates(samples: ArrayLike, least: ArrayLike = -np.inf, most: ArrayLike = np.inf) -> list[Estimate]:
    """Estimate the mean of each column: documents are the independent samples.

    Percentiles of resampled means would cover 80 % at 4 documents and 90 % at 8; Student's t covers 95 % if documents
    are normally distributed.

    Args:
        samples: [documents, columns]; for a paired comparison each document's differences.
        least, most: bounds of a column's values, which no interval leaves.
    """
    values = np.asarray(samples, dtype=np.float64)
    n = len(values)
    apart = values - values[0]
    means = apart.mean(0) + values[0]  # constant columns give exactly their value, as their ends do
    if n < 2:
        return [Estimate(float(mean), None, None) for mean in means]
    half = stdtrit(n - 1, 0.975) * apart.std(0, ddof=1) / math.sqrt(n)
    low = np.minimum(means, np.maximum(means - half, least))  # a mean may leave the bounds by rounding
    high = np.maximum(means, np.minimum(means + half, most))
    return [Estimate(float(m), float(a), float(b)) for m, a, b in zip(means, low, high, strict=True)]


def by_place(
    values: NDArray[np.float64], sparse: Sequence[int], most: float = np.inf
) -> Iterator[tuple[dict[str, int | None], Estimate]]:
    """Estimate the mean over the sparse layers, then each layer, then each head where there are heads.

    Args:
        values: [documents, layers] or [documents, layers, heads], from 0 to `most`.
        sparse: the layers that the mean is over.
    Returns: each estimate with the columns of its row: `layer` and `head`, None for a mean over them.
    """
    means = values.mean(2) if values.ndim == 3 else values
    columns = [means[:, sparse].mean(1, keepdims=True), means]
    places = [None, *range(values.shape[1])]
    keys: list[dict[str, int | None]] = [{"layer": layer, "head": None} for layer in places]
    if values.ndim == 3:
        columns.append(values.reshape(len(values), -1))
        keys += [{"layer": layer, "head": head} for layer in places[1:] for head in range(values.shape[2])]
    yield from zip(keys, mean_estimates(np.concatenate(columns, axis=1), 0, most), strict=True)
