"""What kernels/encode.cu computes, in numpy: float32, fused multiply-adds, sums in the kernel's order."""

import hashcore.reference
import numpy as np
from hashcore.quantiser import group_weights
from sparse_decode.cuda.encode import THREADS, planes_shape
from sparse_decode.cuda.encode_weights import NAMES

F32 = np.float32
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def fma(x, y, z):
    """Round x y + z once to float32: the product is exact in float64, and the sum is rounded to odd there."""
    product, z = x.astype(np.float64) * np.asarray(y, np.float64), np.asarray(z, np.float64)
    total = product + z
    part = total - product
    lost = (product - (total - part)) + (z - part)  # exactly what the rounded sum lacks
    even = (total.view(np.int64) & 1 == 0) & (lost != 0) & np.isfinite(total)
    return np.where(even, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total).astype(F32)


def exp(x):
    """exp of float32, infinite above 88."""
    inside = np.clip(x, F32(-87), F32(88))
    n = np.rint(inside * F32(1.44269504))
    r = fma(n, F32(2.12194440e-4), fma(n, F32(-0.693359375), inside))
    found = np.full_like(x, F32(EXP[0]))
    for c in EXP[1:]:
        found = fma(found, r, F32(c))
    return np.where(x > 88, F32(np.inf), np.ldexp(fma(found, r * r, r) + F32(1), n.astype(int))).astype(F32)


def add_product(x, matrix, sums):
    """sums + x @ matrix, for x [.., rows], matrix [rows, columns]: rows dealt out to `parts` sums, then added."""
    parts = 4 * THREADS // matrix.shape[1]  # a thread has four columns
    for part in range(parts):
        partial = np.zeros_like(sums)
        for row in range(part, len(matrix), parts):
            partial = fma(np.broadcast_to(x[..., row, None], sums.shape), matrix[row], partial)
        sums = sums + partial
    return sums


def numbers(x, weights):
    """f of x [B, H, T, D] with one function per head of x or more heads: float32 [B, heads, T, C]."""
    named = dict(zip(NAMES[len(weights)], (w.float().numpy() for w in weights), strict=True))
    heads = max(x.shape[1], len(weights[0]))
    rows = x.float().numpy()
    found = [
        function(
            rows[:, n * x.shape[1] // heads],
            {name: w[n * len(w) // heads] for name, w in named.items()},
            len(weights) == 4,
        )
        for n in range(heads)
    ]
    return np.stack(found, 1)


def function(x, of, residual):
    """One head's f of x [B, T, D]."""
    width = of["w2" if "w2" in of else "r"].shape[1]
    sums = np.broadcast_to(of.get("b2", F32(0)), (*x.shape[:2], width)).astype(F32)
    if "r" in of:
        sums = add_product(x, of["r"], sums)
    if "w1" not in of:
        return sums
    hidden = add_product(x, of["w1"], np.broadcast_to(of["b1"], (*x.shape[:2], of["b1"].shape[1])))
    hidden = hidden / (F32(1) + exp(-hidden))
    hidden = hidden + x if residual and hidden.shape == x.shape else hidden
    sums = add_product(hidden, of["w2"], sums)
    return sums + hidden if residual and sums.shape == hidden.shape else sums


def _spread(digits, heads):
    """coordinate, power and limit of each head."""
    return [np.repeat(x.numpy(), heads // len(x), 0) for x in digits]


def codes(x, weights, digits):
    """Words of keys x [B, H, T, D]: int32 [B, heads, T, W]."""
    found = numbers(x, weights)
    if not digits:
        return hashcore.reference.pack(found)
    coordinate, power, limit = _spread(digits, found.shape[1])
    levels = np.clip(F32(2) * np.floor(found * F32(0.5)) + F32(1), -limit[:, None], limit[:, None])
    counts = ((np.where(np.isnan(found), -limit[:, None], levels) + limit[:, None]) / 2).astype(int)
    at = np.broadcast_to(coordinate[None, :, None], (*found.shape[:3], coordinate.shape[1]))
    bits = np.take_along_axis(counts, at, -1) // power[:, None].astype(int) & 1
    return hashcore.reference.pack(bits.astype(F32))


def planes(x, weights, digits, how):
    """Planes of queries x [B, H, T, D]: int32 [B, H / group / join, T, P, join W]."""
    found = numbers(x, weights)
    found = found.reshape(len(found), -1, how.group, *found.shape[2:])
    if not how.planes:
        words = hashcore.reference.group_planes(np.moveaxis(hashcore.reference.pack(found), 2, 3))
        assert words[1] == group_weights(how.group)
        joined = words[0].reshape(len(found), -1, how.join, *words[0].shape[2:])  # [B, H, join, T, P, W]
        return np.moveaxis(joined, 2, 4).reshape(planes_shape(x, how))
    sums = np.zeros_like(found[:, :, 0])
    for g in range(how.group):
        sums = sums + found[:, :, g]
    if digits:
        coordinate, power, _ = _spread(digits, sums.shape[1])
        at = np.broadcast_to(coordinate[None, :, None], (*sums.shape[:3], coordinate.shape[1]))
        sums = np.take_along_axis(sums, at, -1) * power[:, None]
    return hashcore.reference.planes(sums, how.planes)[0]
