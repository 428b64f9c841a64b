"""Signs as words (eq. 1), and real or grouped queries as weighted bit planes (eq. 5 and 3), in numpy.

Packing uses numpy's packbits, which needs no compilation.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

TINY = np.finfo(np.float32).tiny  # scale of a row of zeros: positive and not subnormal
FLOAT16_INFINITY = 0x7C00  # its bits
HUGE = np.finfo(np.float32).max  # value that replaces infinities
REVERSED = np.packbits(np.unpackbits(np.arange(256, dtype=np.uint8)), bitorder="little")  # bytes with reversed bits


def pack(x: NDArray[Any]) -> NDArray[np.int32]:
    """Pack the signs of [..., 32 W] numbers into [..., W] words (eq. 1)."""
    if x.dtype == np.float16:  # numpy compares float16 one by one; positive floats order like their bits
        x = x.view(np.int16)
        positive = (x > 0) & (x <= FLOAT16_INFINITY)
    else:
        positive = x > 0
    words = np.packbits(positive, axis=-1, bitorder="little")
    return np.ascontiguousarray(words).view("<i4").astype(np.int32, copy=False)


def unpack(codes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Unpack [..., W] words into [..., 32 W] bits."""
    octets = np.ascontiguousarray(codes, dtype="<i4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little").view(np.bool_)


def from_bytes(octets: NDArray[Any]) -> NDArray[np.int32]:
    """Convert codes that `numpy.packbits` made, [..., B], to words [..., ceil(B / 4)], padded with 0.

    Octets are uint8, or int8 that stand for the number 128 higher, as sentence-transformers stores them. The first
    number of a vector is the highest bit of the first octet, and the lowest bit of the first word.
    """
    count = octets.shape[-1]
    octets = octets if octets.dtype == np.uint8 else octets.view(np.uint8) ^ np.uint8(128)
    padded = np.zeros((*octets.shape[:-1], -(-count // 4) * 4), np.uint8)
    padded[..., :count] = REVERSED[octets]
    return padded.view("<i4").astype(np.int32, copy=False)


def clip(planes: int) -> np.float32:
    """Return the share of a row's largest weight at which levels end (eq. 5).

    With few planes, clipping the largest weights gives the smallest error. With 6 or more, levels are fine enough for
    all weights, and clipping would be the larger error: the weights of `transform` reach 8 times their RMS.
    """
    return np.float32(0.8 if planes < 6 else 1)


def quantise(w: NDArray[Any], planes: int, check: bool = True) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Quantise rows of real weights to odd integer levels and one scale per row (eq. 5), in float32.

    Non-finite weights raise ValueError; without the check, eq. 5 defines their levels.
    """
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf
        w = w.astype(np.float32, copy=False)
    nan = None
    if not check:
        nan = np.isnan(w)
        w = np.where(nan, np.float32(0), np.clip(w, -HUGE, HUGE))
    top = np.float32(2**planes - 1)
    peak = np.abs(w).max(axis=-1, keepdims=True)
    if not np.isfinite(peak).all():
        bad = peak[~np.isfinite(peak)][0]
        raise ValueError(f"w must be finite in float32, got {bad} in a row; look for an overflow upstream")
    scale = np.maximum(clip(planes) * peak / top, TINY)
    levels = w / scale
    levels *= np.float32(0.5)  # not w / (2 s): 2 s overflows for P = 1 and weights near the float32 limit
    np.floor(levels, out=levels)
    levels *= np.float32(2)
    levels += np.float32(1)
    np.clip(levels, -top, top, out=levels)
    if nan is not None:
        levels[nan] = -1
    return levels.astype(np.int8 if planes < 8 else np.int16), scale


def planes(w: NDArray[Any], count: int, check: bool = True) -> NDArray[np.int32]:
    """Pack the binary digits of (level + m) / 2 of [..., 32 W] weights as [..., P, W] (eq. 5)."""
    levels, _ = quantise(w, count, check)
    digits = ((levels.astype(np.int16) + (2**count - 1)) >> 1).astype(np.uint8)
    return np.stack([pack(digits & np.uint8(1 << p)) for p in range(count)], axis=-2)


def group_weights(group: int) -> tuple[int, ...]:
    """Return the P = ceil(log2(G + 1)) weights 1, 2, ..., 2^(P-2), and a last one that makes their sum G (eq. 3)."""
    small = 2 ** (group.bit_length() - 1) - 1  # sum of the weights 1, 2, ..., 2^(P-2)
    return (*(1 << p for p in range(small.bit_length())), group - small)


def group_planes(codes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Convert codes [..., G, W] to the P = ceil(log2(G + 1)) planes of their per-bit counts (eq. 3)."""
    weights = group_weights(codes.shape[-2])
    small, last = sum(weights[:-1]), weights[-1]
    counts = unpack(codes).sum(axis=-2, dtype=np.int32)
    # The last weight is irregular, so a count may have two representations. Its bit is set only if the other planes
    # cannot represent the count. The rest is in 0..small, because last <= small + 1 and group - last = small.
    carry = counts > small
    counts -= last * carry
    digits = [(counts >> p) & 1 for p in range(small.bit_length())]
    return np.stack([pack(digit) for digit in [*digits, carry]], axis=-2)
