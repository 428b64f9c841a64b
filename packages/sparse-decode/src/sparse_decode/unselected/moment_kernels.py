"""Numba kernel that computes a decode step's means from the remainder's sums; `RunningMoments.step` calls it.

The equations are those of `remainder`. With S the spread, m and d the means of the n - T tokens in the
sums and how far they move when the last T are added:

    rest = mean v + slope / n (q S + sum over the last T of q (k - m_k) (v - m_v)) - slope (q d_k) d_v
"""

# numba is untyped.
# pyright: reportCallIssue=false

import numpy as np
from hashcore.cpu.parts import copy, inner
from numpy.typing import NDArray

Array = NDArray[np.float32]
Sums = NDArray[np.float64]


@inner
def _centre(counts, before, joins, x, sums, mean, drift, far):  # pragma: no cover - compiled
    """Write the mean of sums [D] and new tokens x [T, D], how far it moves, and the new tokens' deviations."""
    for d in range(len(sums)):
        total = sums[d]
        old = total / before
        for t in range(len(x)):
            far[t, d] = np.float32(x[t, d] - old) if joins[t] else np.float32(0)
            if joins[t]:
                total += x[t, d]
        mean[d] = np.float32(total / counts)
        drift[d] = np.float32(total / counts - old)


@inner(fastmath={"contract", "nsz"})
def _lean(q, slope, levels, scales, n, far_k, far_v, drift_k, drift_v, out):  # pragma: no cover - compiled
    """Add the terms in q of the equation above to out [Dv]."""
    along = np.float32(0)
    for d in range(len(q)):
        weight, row = np.float32(q[d] * slope / n) * scales[d], levels[d]
        along += q[d] * drift_k[d]
        for i in range(len(out)):
            out[i] += weight * np.float32(row[i])
    along *= slope
    for i in range(len(out)):
        out[i] -= along * drift_v[i]
    for t in range(len(far_k)):
        dot = np.float32(0)
        for d in range(len(q)):
            dot += q[d] * far_k[t, d]
        weight = np.float32(dot * slope / n)
        for i in range(len(out)):
            out[i] += weight * far_v[t, i]


@inner
def _lean_head(
    b, h, counts, joins, k, v, key_sums, value_sums, levels, scales, q, slopes, mean_keys, rest,
):  # pragma: no cover - compiled  # fmt: skip
    """Compute mean keys and the query heads' values of eq. 16 for batch row b and KV head h."""
    group, new, dim, dim_v = q.shape[1] // k.shape[1], k.shape[2], k.shape[3], v.shape[3]
    far_k, far_v = np.empty((new, dim), np.float32), np.empty((new, dim_v), np.float32)
    drift_k, drift_v, mean_v = np.empty(dim, np.float32), np.empty(dim_v, np.float32), np.empty(dim_v, np.float32)
    n = max(counts[b], 1.0)
    before = counts[b]
    for t in range(new):
        before -= np.float64(joins[b, t])
    before = max(before, 1.0)
    _centre(n, before, joins[b], k[b, h], key_sums[b, h], mean_keys[b, h], drift_k, far_k)
    _centre(n, before, joins[b], v[b, h], value_sums[b, h], mean_v, drift_v, far_v)
    for g in range(group * h, group * (h + 1)):
        copy(mean_v, rest[b, g])
        _lean(q[b, g], slopes[g], levels[b, h], scales[b, h], np.float32(n), far_k, far_v, drift_k, drift_v, rest[b, g])


def tasks(
    first: int, last: int, counts: Sums, joins: NDArray[np.bool_], k: Array, v: Array, key_sums: Sums,
    value_sums: Sums, levels: NDArray[np.int8], scales: Array, q: Array, slopes: Array, mean_keys: Array, rest: Array,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Compute the means of the last token's row, for tasks [first, last): one task per batch row and KV head.

    Args:
        counts: number of visible tokens, [B]; joins: which of the T tokens not in the sums are visible, [B, T].
        k, v: the keys [B, Hkv, T, D] and values [B, Hkv, T, Dv] of these; q: [B, Hq, D]; slopes: [Hq].
        key_sums, value_sums, levels, scales: of the other tokens, as in `Moments` and `Rounded`.
        mean_keys, rest: outputs [B, Hkv, D] and [B, Hq, Dv], as `RunningMoments.rows` returns them.
    """
    heads = k.shape[1]
    for task in range(first, last):
        _lean_head(
            task // heads, task % heads, counts, joins, k, v, key_sums, value_sums, levels, scales, q, slopes,
            mean_keys, rest,
        )  # fmt: skip
