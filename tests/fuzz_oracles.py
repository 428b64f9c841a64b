"""What hashcore's functions return, said again in a few lines each of plain arithmetic: no bit tricks, no siblings.

hashcore.reference is written to be read beside docs/algorithm.md. These go other ways on purpose: matrix products for
scores, sorting for selections, integers for codes.
"""

import math

import numpy as np

PLACES = 2 ** np.arange(32)


def pack(x):
    """Words of the signs of [..., 32 W] numbers (eq. 1)."""
    bits = (x > 0).reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    return (bits @ PLACES).astype(np.uint32).view(np.int32)


def unpack(codes):
    """Bits of words (eq. 1)."""
    bits = (codes.astype(np.int64)[..., None] & PLACES) > 0
    return bits.reshape(*codes.shape[:-1], 32 * codes.shape[-1])


def quantise(w, planes):
    """Odd levels and scales of rows (eq. 5): each step in float64, where it is exact, then rounded to float32."""
    with np.errstate(over="ignore"):
        w = w.astype(np.float32).astype(np.float64)
    nan, most, top = np.isnan(w), float(np.finfo(np.float32).max), 2**planes - 1
    w = np.clip(np.where(nan, 0, w), -most, most)
    peak = np.float32(float(np.float32(0.8 if planes < 6 else 1)) * abs(w).max(-1, keepdims=True))
    scale = np.maximum(np.float32(peak.astype(np.float64) / top), np.float32(2.0**-126))
    levels = 2 * np.floor(np.float32(w / scale) / 2.0) + 1
    levels = np.where(nan, -1, np.clip(levels, -top, top))
    return levels.astype(np.int8 if planes < 8 else np.int16), scale


def planes(w, count):
    """Binary digits of the levels, counted from the lowest one, as codes (eq. 5)."""
    steps = (quantise(w, count)[0].astype(np.int64) + 2**count - 1) // 2
    return np.stack([pack(steps // 2**p % 2) for p in range(count)], -2), tuple(2**p for p in range(count))


def group_planes(codes):
    """Planes whose weighted sum says how many codes of a group have each bit (eq. 3)."""
    group, counts = codes.shape[-2], unpack(codes).sum(-2)
    most = math.ceil(math.log2(group + 1)) - 1  # planes of weights 1, 2, 4, ...
    last = group - (2**most - 1)
    carried = counts > 2**most - 1
    rest = counts - last * carried
    return np.stack([*(pack(rest // 2**p % 2) for p in range(most)), pack(carried)], -2), (
        *(2**p for p in range(most)),
        last,
    )


def score(query, keys, weights=None):
    """Matching bits, from inner products of signs (eq. 2, eq. 4)."""
    q, k = (2.0 * unpack(x) - 1 for x in (query, keys))
    matches = (q @ k.swapaxes(-1, -2) + q.shape[-1]) / 2
    if weights is not None:
        matches = (matches * np.array(weights, np.float64)[:, None]).sum(-2)
    return matches.astype(np.int32)


def topk(scores, k, lengths=None, starts=None, sink=0, recent=0, order="index"):
    """The best k positions of [start + sink, length - recent) of each row, ties to the lowest (eq. 6, eq. 13)."""
    rows, n = scores.shape[:-1], scores.shape[-1]
    sizes, ends, begins = (
        np.broadcast_to(x, rows) for x in (k, n if lengths is None else lengths, 0 if starts is None else starts)
    )
    width = k if isinstance(k, int) else int(sizes.max(initial=0))
    values, indices = np.zeros((*rows, width), scores.dtype.newbyteorder("=")), np.full((*rows, width), -1, np.int64)
    for row in np.ndindex(rows):
        seen = range(int(begins[row]) + sink, int(ends[row]) - recent)
        numbers = scores[row].tolist()
        best = sorted(seen, key=lambda i: (-numbers[i], i))[: sizes[row]]
        for slot, i in enumerate(best if order == "best" else sorted(best)):
            values[row][slot], indices[row][slot] = numbers[i], i
    return values, indices


def search(query, keys, k, weights=None, order="best", **bounds):
    """The best keys of each row."""
    return topk(score(query, keys, weights), k, order=order, **bounds)
