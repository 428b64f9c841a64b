"""Numbers out of logits and samples: losses, perplexity, divergence, and intervals over documents."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

_CHUNK = 256  # rows at once: temporaries stay small beside the logits of a large vocabulary
_RESAMPLES = 10_000


def token_losses(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Read off each target's negative log-probability, in nats.

    Args:
        log_probs: [R, V].
        targets: int64 [R].
    Returns: float64 [R].
    """
    return -log_probs.gather(-1, targets[:, None])[:, 0].double()


def perplexity(losses: Sequence[float], tokens: Sequence[int]) -> float:
    """Return the token-weighted perplexity of documents with these mean losses (nats) and token counts."""
    total = sum(loss * count for loss, count in zip(losses, tokens, strict=True))
    return math.exp(total / sum(tokens))


def mean_kl(reference: Tensor, other: Tensor) -> float:
    """Return the mean over rows of KL(reference || other), in nats, for log-probabilities [R, V]."""
    total = 0.0
    parts, others = (cast("tuple[Tensor, ...]", x.split(_CHUNK)) for x in (reference, other))
    for p, q in zip(parts, others, strict=True):
        # A token of probability 0 adds nothing, whatever the other says; 0 * inf would be NaN.
        gap = (p - q).masked_fill_(p == -torch.inf, 0)
        total += gap.mul_(p.exp()).sum(dtype=torch.float64).item()
    return total / len(reference)


@functools.lru_cache(maxsize=4)
def _resamples(n: int, seed: int) -> NDArray[np.float64]:
    """Draw the weight of each of n documents in each resample: [resamples, n], rows summing to 1."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=_RESAMPLES) / n


class Estimate(NamedTuple):
    """A mean over documents and its 95 % bootstrap interval; no interval from fewer than two documents."""

    mean: float
    low: float | None
    high: float | None


def bootstrap(samples: ArrayLike, seed: int) -> list[Estimate]:
    """Estimate the mean of each column by resampling rows: documents are the independent samples.

    Columns are resampled together. For a paired comparison pass each document's difference.

    Args:
        samples: [documents, columns].
        seed: the same seed draws the same resamples.
    """
    values = np.asarray(samples, dtype=np.float64)
    n = len(values)
    means = values.mean(0)
    if n < 2:
        return [Estimate(float(mean), None, None) for mean in means]
    low, high = np.percentile(resampled_means(values, seed), [2.5, 97.5], axis=0)
    return [Estimate(float(m), float(a), float(b)) for m, a, b in zip(means, low, high, strict=True)]


def resampled_means(samples: ArrayLike, seed: int) -> NDArray[np.float64]:
    """Draw the bootstrap's resamples of documents and average each column: [resamples, columns]."""
    values = np.asarray(samples, dtype=np.float64)
    # Around the first document, so that columns that never differ give exactly that value.
    return _resamples(len(values), seed) @ (values - values[0]) + values[0]
