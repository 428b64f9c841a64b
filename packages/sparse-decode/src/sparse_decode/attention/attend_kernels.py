"""Numba kernels of `sparse_decode.attend`: one task per (batch row, index set, query row).

Equations and layouts are those of attend.py.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import math
from typing import Any

import numba
import numpy as np
from hashcore.cpu.intrinsics import pointer
from hashcore.cpu.parts import copy, hot, inner
from numpy.typing import NDArray

from sparse_decode.attention.intrinsics import prefetch
from sparse_decode.attention.lanes import TOKENS, WIDTH, dot, weigh
from sparse_decode.attention.softmax import cap, exponentials, greatest

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


# The steps of a task are inlined, so that they have its fastmath, and LLVM sees which arrays overlap.
@numba.njit(inline="always")
def _multiply(q, k, places, kind, at, wide, logits):  # pragma: no cover - compiled
    """Write the products of queries and keys to logits [heads, padded]."""
    (b, first, r), (heads, padded), dim = at, logits.shape, q.shape[3]
    tile, queries = np.zeros(TILE * wide, np.float32), np.zeros(heads * wide, np.float32)
    flat = logits.reshape(heads * padded)
    for g in range(heads):
        copy(q[b, first + g, r], queries[g * wide :])
    _ask(k, places, 0, dim)
    for j in range(0, len(places), TILE):
        _ask(k, places, j + TILE, dim)
        _read_tile(k, places, j, dim, wide, kind, tile)
        for t in range(0, TILE, TOKENS):
            dot(queries, wide, heads, tile, t * wide, wide, wide, flat, j + t, padded)


@numba.njit(inline="always")
def _soften(logits, used, scaling, softcap, sinks, at, stats):  # pragma: no cover - compiled
    """Replace products by weights of the softmax; write the mean and the log-sum-exp of the logits to stats."""
    (b, first, r), (heads, padded) = at, logits.shape
    flat, spare = logits.reshape(heads * padded), np.empty(padded, np.float32)
    for g in range(heads):
        line, start = logits[g, :used], g * padded
        total = np.float32(0)
        for j in range(used):
            line[j] *= scaling
        if softcap > 0:
            cap(flat, start, padded, softcap, spare)
        for j in range(used):
            total += line[j]
        stats[0, b, r, first + g] = total / np.float32(used)
        logits[g, used:] = np.float32(-np.inf)
        top = max(sinks[first + g], greatest(flat, start, padded))  # -inf without a learned sink
        total = exponentials(flat, start, padded, top) + np.float32(math.exp(sinks[first + g] - top))
        stats[1, b, r, first + g] = top + np.float32(math.log(total))
        for j in range(used):
            line[j] /= total


@numba.njit(inline="always")
def _weigh(v, places, kind, at, wide, weights, out):  # pragma: no cover - compiled
    """Write the sums of values, weighted by weights [heads, padded], to out."""
    (b, first, r), (heads, padded), dim = at, weights.shape, out.shape[3]
    flat = weights.reshape(heads * padded)
    _ask(v, places, 0, dim)
    tile, sums = np.zeros(TILE * wide, np.float32), np.zeros(heads * wide, np.float32)
    for j in range(0, len(places), TILE):
        _ask(v, places, j + TILE, dim)
        count = _read_tile(v, places, j, dim, wide, kind, tile)
        weigh(flat, j, padded, heads, tile, 0, wide, count, sums, wide)
    for g in range(heads):
        copy(sums[g * wide : g * wide + dim], out[b, r, first + g])


@numba.njit(inline="always")
def _add_rest(
    heads, rest, used, q, coefficients, mean_keys, kv, values, visible, scaling, at, stats, out
):  # pragma: no cover - compiled
    """Add the remainder, of `rest` tokens that were not selected, to out."""
    b, first, r = at
    sizes = np.float32(math.log(visible[b, r])), np.float32(math.log(used)), np.float32(math.log(rest))
    for g in range(heads):
        h = first + g
        known = stats[0, b, r, h], stats[1, b, r, h]
        share = _share(coefficients[h], known, q[b, h, r], mean_keys[b, kv, r], scaling, sizes)
        line, value = out[b, r, h], values[b, h, r]
        for i in range(out.shape[3]):
            line[i] += share * (value[i] - line[i])


@hot(fastmath={"reassoc", "contract", "nsz"})
def _attend_task(
    task, q, k, k_at, v, v_at, blocks, indices, out, stats, counts, scaling, softcap, sinks, kind,
    coefficients, mean_keys, values, visible,
):  # pragma: no cover - compiled  # fmt: skip
    (sets, n_rows), hq = indices.shape[1:3], q.shape[1]
    heads = hq // sets  # query heads that share this index set
    b, s, r = task // (sets * n_rows), task // n_rows % sets, task % n_rows
    at, kv = (b, s * heads, r), s * heads // (hq // k_at[3])
    chosen = indices[b, s, r]
    tokens = chosen[chosen >= 0]
    used = len(tokens)
    if used == 0:
        return
    if tokens.max() >= k_at[4] * max(1, blocks.shape[1]):
        counts[b, s, r] = -1
        return
    counts[b, s, r] = used
    wide, wide_v = (q.shape[3] + WIDTH - 1) // WIDTH * WIDTH, (out.shape[3] + WIDTH - 1) // WIDTH * WIDTH
    logits = np.empty((heads, (used + TILE - 1) // TILE * TILE), np.float32)

    # 1. logits and 2. softmax
    _multiply(q, k, _places(tokens, blocks, k_at, b, kv), kind, at, wide, logits)
    _soften(logits, used, scaling, softcap, sinks, at, stats)

    # 3. weighted sum of values
    _weigh(v, _places(tokens, blocks, v_at, b, kv), kind, at, wide_v, logits, out)

    # 4. the remainder
    rest = visible[b, r] - used if len(coefficients) else 0
    if rest > 0:
        _add_rest(heads, rest, used, q, coefficients, mean_keys, kv, values, visible, scaling, at, stats, out)


@inner(fastmath={"reassoc", "contract", "nsz"})
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
    mean_keys: NDArray[np.float32], values: NDArray[np.float32], visible: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Attend for tasks [first, last).

    Keys and values are at k_address and v_address: k_reach and v_reach elements of like's dtype. k_at and v_at are
    (strides of batch row, head and token, number of heads, number of tokens). With blocks [B, T], the page table, they
    are (strides of page, head and token, number of heads, tokens per page). stats gets the mean and the log-sum-exp of
    the logits; counts the number of tokens used, or -1 if an index is out of range.
    """
    k = numba.carray(pointer(k_address), k_reach, like.dtype)
    v = numba.carray(pointer(v_address), v_reach, like.dtype)
    for task in range(first, last):
        _attend_task(
            task, q, k, k_at, v, v_at, blocks, indices, out, stats, counts, scaling, softcap, sinks, kind,
            coefficients, mean_keys, values, visible,
        )  # fmt: skip
