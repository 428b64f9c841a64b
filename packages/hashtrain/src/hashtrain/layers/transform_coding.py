"""Transform coding of keys for inner products with queries (docs/algorithm.md, eq. 18): the start of `transform`.

Keys are mapped to uncorrelated coordinates whose errors count equally, and each bit of the code goes to the coordinate
where it removes the most error: the textbook way to spend a fixed number of bits on a vector.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hashtrain.config import MAX_DIGITS, SINK

# Optimal uniform quantisers of a standard normal number with 1 to 8 bits (J. Max, "Quantizing for minimum distortion",
# IRE Transactions on Information Theory, 1960; a test computes them): the step width, and the mean squared error.
STEPS = (1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.05687, 0.03076)
DISTORTIONS = (0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001040, 0.0003043, 0.00008769)
WIDER = 1.1
"""Keys have heavier tails than normal numbers: steps wider by this factor find more (docs/log.md, 2026-11-21)."""
_SMALLEST = 1e-6  # of the largest eigenvalue: smallest allowed one, to avoid division by zero


class Start(NamedTuple):
    """Maps of one layer, per KV head: z = k key + bias, u = q query; sum over a key's levels in z times u is q . k.

    Coordinates are in descending order of variance; those without a digit come last.
    """

    key: Tensor
    """float32 [Hkv, D, C]: scaled so that half a quantiser step is 1."""
    bias: Tensor
    """float32 [Hkv, 1, C]: keys are centred."""
    query: Tensor
    """float32 [Hkv, D, C]: the inverse; 0 where a coordinate has no digit."""
    digits: Tensor
    """float32 [Hkv, C]: integers from 0 to `MAX_DIGITS` that sum to the bits of a code."""


class Moments(NamedTuple):
    """The statistics that determine a start, float64 on the CPU."""

    query: Tensor
    """Second moment of the queries, summed over each group: [Hkv, D, D]."""
    key: Tensor
    """Covariance of the keys, [Hkv, D, D]."""
    mean: Tensor
    """Mean key, [Hkv, D]."""


def moments(captured: Iterator[tuple[Tensor, Tensor]]) -> Moments:
    """Measure queries and keys of some contexts.

    Args:
        captured: queries [1, Hq, T, D] and keys [1, Hkv, T, D] of each context.
    The first tokens of a context are always read, so no bits are spent on them. Contexts with infinities or NaN are
    left out, as training stops at them.
    Raises: FloatingPointError if none is left.
    """
    query, key, mean, count = 0.0, 0.0, 0.0, 0
    for q, k in captured:
        grouped = q[0].float().unflatten(0, (k.shape[1], -1)).sum(1)
        keys = k[0, :, SINK:].float()
        if not (grouped.isfinite().all() and keys.isfinite().all()):
            continue
        query = query + (grouped.mT @ grouped).double().cpu() / grouped.shape[1]
        key = key + (keys.mT @ keys).double().cpu() / keys.shape[1]
        mean = mean + keys.double().mean(1).cpu()
        count += 1
    if not count:
        raise FloatingPointError(
            "expected a context with finite queries and keys to start from, got none; check the model's outputs"
        )
    query, key, mean = (torch.as_tensor(x) / count for x in (query, key, mean))
    return Moments(query, key - mean[:, :, None] * mean[:, None, :], mean)


def start(found: Moments, bits: int, coordinates: int, most: int = MAX_DIGITS) -> Start:
    """Compute the maps and the digits of each coordinate.

    Args:
        bits: of a code, at most `MAX_DIGITS` per coordinate; coordinates: at most D.
        most: digits per coordinate; exceeded only if all coordinates have as many and bits are left.
    Source: docs/algorithm.md, eq. 18.
    """
    heads = [_head(*parts, bits, coordinates, most) for parts in zip(*found, strict=True)]
    return Start(*(torch.stack(parts).float() for parts in zip(*heads, strict=True)))


def _head(query: Tensor, key: Tensor, mean: Tensor, bits: int, coordinates: int, most: int) -> tuple[Tensor, ...]:
    root, inverse = _roots(query)
    variances, vectors = torch.linalg.eigh(root @ key @ root)
    variances, vectors = variances.flip(0)[:coordinates], vectors.flip(1)[:, :coordinates]
    variances = variances.clamp(min=_SMALLEST**2 * variances.max().clamp(min=1e-30))
    digits = allocate(variances, bits, most)
    half = torch.tensor([STEPS[max(int(n), 1) - 1] for n in digits], dtype=torch.float64) * variances.sqrt() * WIDER / 2
    to_key = root @ vectors / half
    return to_key, -(mean @ to_key)[None], inverse @ vectors * half * (digits > 0), digits


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symmetric square root of a second moment, and its inverse."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=_SMALLEST * values.max().clamp(min=1e-30))
    return vectors * values.sqrt() @ vectors.mT, vectors * values.rsqrt() @ vectors.mT


def allocate(variances: Tensor, bits: int, most: int = MAX_DIGITS) -> Tensor:
    """Assign bits one by one, each to the coordinate where it removes the most error.

    Args:
        variances: float64 [C]; bits: at most `MAX_DIGITS` per coordinate.
        most: bits per coordinate; raised if they would not have room for all bits.
    Returns: float64 [C], integers that sum to `bits`.
    Raises: ValueError if there are more than `MAX_DIGITS` bits per coordinate.
    """
    if bits > MAX_DIGITS * len(variances):
        raise ValueError(
            f"{len(variances)} coordinates hold at most {MAX_DIGITS * len(variances)} bits, got {bits}; use fewer bits"
        )
    most = max(most, math.ceil(bits / len(variances)))
    left = torch.tensor((1.0, *DISTORTIONS), dtype=torch.float64)
    saved = torch.cat([left[:-1] - left[1:], torch.zeros(1, dtype=torch.float64)])  # by the next digit
    digits = torch.zeros(len(variances), dtype=torch.int64)
    for _ in range(bits):
        digits[(variances * saved[digits]).where(digits < most, -1.0).argmax()] += 1
    return digits.double()


def even(coordinates: int, bits: int) -> Tensor:
    """Distribute bits evenly: float32 [C], for a hasher that has seen no data."""
    quotient, more = divmod(bits, coordinates)
    return torch.tensor([quotient + (i < more) for i in range(coordinates)], dtype=torch.float32)
