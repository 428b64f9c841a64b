"""The means of a decode step's row from the sums before it (`sparse_decode.sums`), for the step kernel.

With S the spread, m and d the means of the tokens in the sums and how far they move when the last T are added, and n
the number of all of them:

    rest = mean v + slope / n (q S + sum over the last T of q (k - m_k) (v - m_v)) - slope (q d_k) d_v
"""

# numba is untyped.
# pyright: reportCallIssue=false

import numpy as np
from hashcore.cpu.parts import copy, inner


@inner
def _centre(n, before, x, sums, mean, drift, far):  # pragma: no cover - compiled
    """Write the mean of sums [D] and new tokens x [T, D], how far it moves, and the new tokens' deviations."""
    for d in range(len(sums)):
        total = sums[d]
        old = total / before
        for t in range(len(x)):
            far[t, d] = np.float32(x[t, d] - old)
            total += x[t, d]
        mean[d] = np.float32(total / n)
        drift[d] = np.float32(total / n - old)


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
def means(n, k, v, keys, values, levels, scales, q, slopes, mean_key, rest):  # pragma: no cover - compiled
    """Write the mean key [D] of n visible tokens and the values [G, Dv] of eq. 16 of query heads q [G, D].

    k, v: the last tokens [T, D] and [T, Dv], which are not in the sums: keys [D], values [Dv], levels [D, Dv] and
    scales [D].
    """
    far_k, far_v = np.empty(k.shape, np.float32), np.empty(v.shape, np.float32)
    drift_k, drift_v = np.empty(len(keys), np.float32), np.empty(len(values), np.float32)
    mean_v, before = np.empty(len(values), np.float32), max(float(n - len(k)), 1.0)
    _centre(float(n), before, k, keys, mean_key, drift_k, far_k)
    _centre(float(n), before, v, values, mean_v, drift_v, far_v)
    for g in range(len(q)):
        copy(mean_v, rest[g])
        _lean(q[g], slopes[g], levels, scales, np.float32(n), far_k, far_v, drift_k, drift_v, rest[g])
