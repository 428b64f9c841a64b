"""Numba kernel that adds a decode step's token to the remainder's sums; `RunningMoments.step` calls it.

The equations are those of `sparse_decode.remainder`.
"""

# numba is untyped.
# pyright: reportCallIssue=false

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Sums = NDArray[np.float64]


@numba.njit(fastmath={"contract", "nsz"})
def _lean(query, slope, spread, n, out):  # pragma: no cover - compiled
    """Add slope (query . spread) / n to out."""
    for d in range(len(query)):
        weight, row = np.float32(query[d] * slope / n), spread[d]
        for i in range(len(out)):
            out[i] += weight * row[i]


@numba.njit
def _add_token(
    b, h, counts, joins, k, v, key_sums, value_sums, spreads, q, slopes, new_keys, new_values, new_spreads, mean_keys,
    rest,
):  # pragma: no cover - compiled  # fmt: skip
    """Add a token of batch row b to the sums of KV head h."""
    group, dim, dim_v = q.shape[1] // k.shape[1], k.shape[2], v.shape[2]
    far_v = np.empty(dim_v, np.float32)
    one = np.float32(joins[b])
    n = max(counts[b], 1.0)
    before = max(counts[b] - one, 1.0)
    share = np.float32((counts[b] - one) / n)
    for i in range(dim_v):
        far_v[i] = one * np.float32(v[b, h, i] - value_sums[b, h, i] / before)
        new_values[b, h, i] = value_sums[b, h, i] + (v[b, h, i] if joins[b] else np.float32(0))
    for d in range(dim):
        far_k = np.float32(k[b, h, d] - key_sums[b, h, d] / before) * share
        new_keys[b, h, d] = key_sums[b, h, d] + (k[b, h, d] if joins[b] else np.float32(0))
        mean_keys[b, h, d] = np.float32(new_keys[b, h, d] / n)
        old, new = spreads[b, h, d], new_spreads[b, h, d]
        if joins[b]:
            for i in range(dim_v):
                new[i] = old[i] + far_k * far_v[i]
        else:
            new[:] = old
    for g in range(group * h, group * (h + 1)):
        for i in range(dim_v):
            rest[b, g, i] = np.float32(new_values[b, h, i] / n)
        _lean(q[b, g], slopes[g], new_spreads[b, h], np.float32(n), rest[b, g])


def tasks(
    first: int, last: int, counts: Sums, joins: NDArray[np.bool_], k: Array, v: Array, key_sums: Sums,
    value_sums: Sums, spreads: Array, q: Array, slopes: Array, new_keys: Sums, new_values: Sums, new_spreads: Array,
    mean_keys: Array, rest: Array,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Add a token of each sequence to its sums, for tasks [first, last): one task per batch row and KV head.

    Args:
        counts: number of tokens including the new one, [B]; joins: whether the row sees the new one, [B].
        k, v: the new keys [B, Hkv, D] and values [B, Hkv, Dv]; q: [B, Hq, D]; slopes: [Hq].
        key_sums to new_spreads: the sums before, and outputs for the sums after, as in `Moments`.
        mean_keys, rest: outputs [B, Hkv, D] and [B, Hq, Dv], as `RunningMoments.rows` returns them.
    """
    heads = k.shape[1]
    for task in range(first, last):
        _add_token(
            task // heads, task % heads, counts, joins, k, v, key_sums, value_sums, spreads, q, slopes, new_keys,
            new_values, new_spreads, mean_keys, rest,
        )  # fmt: skip
