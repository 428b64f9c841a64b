"""Numba kernels of `sparse_decode.attend`: one task per (batch row, index set, query row).

Equations and layouts are those of attend.py.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from sparse_decode.intrinsics import pointer, prefetch
from sparse_decode.lanes import TOKENS, WIDTH, dot, weigh
from sparse_decode.softmax import cap, exponentials, greatest

# Digest of the files whose functions are inlined here, because numba's cache checks a kernel's own file only.
FROM_OTHERS = "b242a0ee470668cd"
TILE = 16
"""Rows of keys or values that are copied together as float32, a multiple of TOKENS: 8 KiB at 128 components. The rows
of the next tile are prefetched: they are far apart, so that hardware prefetchers do not predict them."""


@numba.njit(inline="always")
def _widen(row, kind, bits, floats):  # pragma: no cover - compiled
    """Write one row as float32; `bits` and `floats` are the same memory."""
    if kind == 0:
        for i in range(len(row)):
            bits[i] = row[i]
    elif kind == 1:  # bfloat16 is the upper half of a float32
        for i in range(len(row)):
            bits[i] = np.uint32(row[i]) << np.uint32(16)
    else:  # float16: move sign, exponent and mantissa; 2^112 corrects the exponent, subnormals included
        for i in range(len(row)):
            h = np.uint32(row[i])
            bits[i] = ((h & np.uint32(0x8000)) << np.uint32(16)) | ((h & np.uint32(0x7FFF)) << np.uint32(13))
        for i in range(len(row)):
            floats[i] *= np.float32(2.0**112)
        for i in range(len(row)):
            if np.uint32(row[i]) & np.uint32(0x7C00) == np.uint32(0x7C00):  # infinity and NaN
                bits[i] |= np.uint32(0x7F800000)


@numba.njit(inline="always")
def _fetch(line, at, count):  # pragma: no cover - compiled
    """Prefetch the cache lines of a row, 64 bytes each."""
    step = 64 // line.itemsize
    for i in range(at, at + count, step):
        prefetch(line, i)


@numba.njit(inline="always")
def _places(tokens, blocks, at, row, head):  # pragma: no cover - compiled
    """Return the offsets of tokens in a head's rows, contiguous or in the pages blocks[row]."""
    places, first = np.empty(len(tokens), np.int64), head * at[1]
    if blocks.shape[1] == 0:
        for j in range(len(tokens)):
            places[j] = first + row * at[0] + tokens[j] * at[2]
        return places
    for j in range(len(tokens)):
        places[j] = first + blocks[row, tokens[j] // at[4]] * at[0] + tokens[j] % at[4] * at[2]
    return places


@numba.njit(inline="always")
def _ask(x, places, j, count):  # pragma: no cover - compiled
    """Prefetch rows places[j : j + TILE]."""
    for t in range(j, min(j + TILE, len(places))):
        _fetch(x, places[t], count)


@numba.njit(inline="always")
def _read_tile(x, places, j, width, wide, kind, tile):  # pragma: no cover - compiled
    """Write rows places[j : j + TILE] to tile [TILE, wide] as float32; return how many there are."""
    bits, count = tile.view(np.uint32), min(TILE, len(places) - j)
    for t in range(count):
        at, to = places[j + t], t * wide
        _widen(x[at : at + width], kind, bits[to : to + width], tile[to : to + width])
    return count


@numba.njit
def _largest(x, count):  # pragma: no cover - compiled
    """Return the count-th largest of x, float32, none below 0: their order is that of their bits.

    A histogram of the upper 11 of 31 bits, then of the next 10 among those of the same upper bits, then of the last 10.
    """
    bits, found = x.view(np.int32), np.zeros(1, np.int32)
    for shift, above in ((20, 31), (10, 20), (0, 10)):
        counts = np.zeros(2048, np.int64)
        for j in range(len(bits)):
            if bits[j] >> above == found[0] >> above:
                counts[(bits[j] >> shift) & ((1 << (above - shift)) - 1)] += 1
        at = (1 << (above - shift)) - 1
        while at > 0 and counts[at] < count:
            count -= counts[at]
            at -= 1
        found[0] |= np.int32(at << shift)
    return found.view(np.float32)[0]


# fastmath without nnan and ninf: sums may be reordered to vectorise, but NaN and infinity must stay correct.
@numba.njit(fastmath={"reassoc", "contract", "nsz"})
def _drop(weights, used, keep, dropped):  # pragma: no cover - compiled
    """Return the indices, ascending, of the `keep` of `used` tokens with the largest sums of weights [heads, >= used].

    Ties go to the first tokens. Heads whose weights are NaN do not count. The weights of the other tokens are added to
    dropped [heads].
    """
    heads = len(weights)
    both, left = np.zeros(used, np.float32), np.empty(used, np.float32)
    for g in range(heads):
        line = weights[g, :used]
        if line[0] == line[0]:  # all of a softmax's weights are NaN, or none
            for j in range(used):
                both[j] += line[j]
    least, room = _largest(both, keep), keep
    for j in range(used):
        room -= both[j] > least
    kept, n = np.empty(keep + 1, np.int64), 0  # the last slot gets what is written after the last that is kept
    for j in range(used):
        equal = both[j] == least and room > 0
        room -= equal
        taken = both[j] > least or equal
        kept[n], left[j] = j, not taken
        n += taken
    for g in range(heads):
        line, total = weights[g, :used], np.float32(0)
        for j in range(used):
            total += line[j] * left[j]
        dropped[g] += total
    return kept[:keep]


@numba.njit(fastmath={"reassoc", "contract", "nsz"})
def _attend_task(
    task, q, k, k_at, v, v_at, blocks, indices, out, stats, counts, scaling, softcap, sinks, kind,
    coefficients, mean_keys, values, visible, share_of_values,
):  # pragma: no cover - compiled  # fmt: skip
    sets, n_rows = indices.shape[1:3]
    hq, dim, dim_v = q.shape[1], q.shape[3], out.shape[3]
    heads = hq // sets  # query heads that share this index set
    b, s, r = task // (sets * n_rows), task // n_rows % sets, task % n_rows
    first = s * heads
    kv = first // (hq // k_at[3])
    chosen = indices[b, s, r]
    tokens = chosen[chosen >= 0]
    used = len(tokens)
    if used == 0:
        return
    limit = k_at[4] * max(1, blocks.shape[1])
    for j in range(used):
        if tokens[j] >= limit:
            counts[b, s, r] = -1
            return
    counts[b, s, r] = used
    padded = (used + TILE - 1) // TILE * TILE
    wide, wide_v = (dim + WIDTH - 1) // WIDTH * WIDTH, (dim_v + WIDTH - 1) // WIDTH * WIDTH
    tile, queries = np.zeros(TILE * wide, np.float32), np.zeros(heads * wide, np.float32)
    logits = np.empty((heads, padded), np.float32)
    flat = logits.reshape(heads * padded)

    # 1. logits
    for g in range(heads):
        queries[g * wide : g * wide + dim] = q[b, first + g, r]
    places = _places(tokens, blocks, k_at, b, kv)
    _ask(k, places, 0, dim)
    for j in range(0, used, TILE):
        _ask(k, places, j + TILE, dim)
        _read_tile(k, places, j, dim, wide, kind, tile)
        for t in range(0, TILE, TOKENS):
            dot(queries, wide, heads, tile, t * wide, wide, wide, flat, j + t, padded)

    # 2. softmax
    spare = np.empty(padded, np.float32)
    for g in range(heads):
        line, at = logits[g, :used], g * padded
        total = np.float32(0)
        for j in range(used):
            line[j] *= scaling
        if softcap > 0:
            cap(flat, at, padded, softcap, spare)
        for j in range(used):
            total += line[j]
        stats[0, b, r, first + g] = total / np.float32(used)
        logits[g, used:] = np.float32(-np.inf)
        top = max(sinks[first + g], greatest(flat, at, padded))  # -inf without a learned sink
        total = exponentials(flat, at, padded, top) + np.float32(math.exp(sinks[first + g] - top))
        stats[1, b, r, first + g] = top + np.float32(math.log(total))
        for j in range(used):
            line[j] /= total

    # 3. weighted sum of values
    keep, dropped = math.ceil(used * share_of_values), np.zeros(heads, np.float32)
    if keep < used:
        kept = _drop(logits, used, keep, dropped)
        tokens = tokens[kept]
        for g in range(heads):
            for j in range(keep):
                logits[g, j] = logits[g, kept[j]]
    places = _places(tokens, blocks, v_at, b, kv)
    _ask(v, places, 0, dim_v)
    tile, sums = np.zeros(TILE * wide_v, np.float32), np.zeros(heads * wide_v, np.float32)
    for j in range(0, keep, TILE):
        _ask(v, places, j + TILE, dim_v)
        count = _read_tile(v, places, j, dim_v, wide_v, kind, tile)
        weigh(flat, j, padded, heads, tile, 0, wide_v, count, sums, wide_v)
    for g in range(heads):
        out[b, r, first + g] = sums[g * wide_v : g * wide_v + dim_v]

    # 4. the remainder: first the selected tokens whose values were not read, then the unselected ones
    if keep < used:
        for g in range(heads):
            line, left = out[b, r, first + g], np.float32(math.exp(sinks[first + g] - stats[1, b, r, first + g]))
            for j in range(keep):
                left += logits[g, j]
            for i in range(dim_v):
                if len(coefficients):
                    line[i] += dropped[g] * values[b, first + g, r, i]
                else:
                    line[i] = line[i] / left if left != 0 else np.float32(0)
    rest = visible[b, r] - used if len(coefficients) else 0
    if rest > 0:
        sizes = np.float32(math.log(visible[b, r])), np.float32(math.log(used)), np.float32(math.log(rest))
        for g in range(heads):
            h = first + g
            known = stats[0, b, r, h], stats[1, b, r, h]
            share = _share(coefficients[h], known, q[b, h, r], mean_keys[b, kv, r], scaling, sizes)
            line, value = out[b, r, h], values[b, h, r]
            for i in range(dim_v):
                line[i] += share * (value[i] - line[i])


@numba.njit(fastmath={"reassoc", "contract", "nsz"})
def _share(c, known, query, mean_key, scaling, sizes):  # pragma: no cover - compiled
    """Return the remainder's share of the softmax (eq. 15 and 16), given the selected weight exp(total)."""
    (mean, total), (log_visible, log_used, log_rest) = known, sizes
    product = np.float32(0)
    for i in range(len(query)):
        product += query[i] * mean_key[i]
    typical = c[0] + c[1] * mean + c[2] * (product * scaling) + c[3] * log_visible + c[4] * log_used
    weight = min(typical, total - log_used) + log_rest
    return np.float32(1) / (np.float32(1) + np.float32(math.exp(total - weight)))


def tasks(
    first: int, last: int, q: NDArray[np.float32], k_address: int, k_reach: int, k_at: tuple[int, ...],
    v_address: int, v_reach: int, v_at: tuple[int, ...], like: NDArray[Any], blocks: NDArray[np.int64],
    indices: NDArray[np.int64],
    out: NDArray[np.float32], stats: NDArray[np.float32], counts: NDArray[np.int64], scaling: np.float32,
    softcap: np.float32, sinks: NDArray[np.float32], kind: int, coefficients: NDArray[np.float32],
    mean_keys: NDArray[np.float32], values: NDArray[np.float32], visible: NDArray[np.int64], share_of_values: float,
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Attend for tasks [first, last).

    Keys and values are at k_address and v_address: k_reach and v_reach elements of like's dtype. k_at and v_at are
    (strides of batch row, head and token, number of heads, number of tokens). With blocks [B, T], the page table, they
    are (strides of page, head and token, number of heads, tokens per page). stats gets the mean and the log-sum-exp of
    the logits; counts the number of tokens used, or -1 if an index is out of range. The values of a share
    share_of_values of the tokens are read.
    """
    k = numba.carray(pointer(k_address), k_reach, like.dtype)
    v = numba.carray(pointer(v_address), v_reach, like.dtype)
    for task in range(first, last):
        _attend_task(
            task, q, k, k_at, v, v_at, blocks, indices, out, stats, counts, scaling, softcap, sinks, kind,
            coefficients, mean_keys, values, visible, share_of_values,
        )  # fmt: skip
