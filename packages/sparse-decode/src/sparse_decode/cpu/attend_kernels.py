"""Numba kernel of attention over selected tokens: one row and the query heads of one set (`sparse_decode.attend`)."""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import math

import numba
import numpy as np
from hashcore.cpu.parts import copy, hot, inner

from sparse_decode.cpu.lanes import BLOCK, TOKENS, WIDTH, cap, dot, exponentials, largest, prefetch, weigh

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
def _places(tokens, table, at):  # pragma: no cover - compiled
    """Return the offsets of tokens in a head's rows, contiguous or in the pages of a table."""
    places = np.empty(len(tokens), np.int64)
    if len(table) == 0:
        for j in range(len(tokens)):
            places[j] = tokens[j] * at[1]
        return places
    for j in range(len(tokens)):
        places[j] = table[tokens[j] // at[2]] * at[0] + tokens[j] % at[2] * at[1]
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
def _multiply(q, k, places, kind, wide, logits):  # pragma: no cover - compiled
    """Write the products of queries and keys to logits [heads, padded]."""
    (heads, padded), dim = logits.shape, q.shape[1]
    tile, queries = np.zeros(TILE * wide, np.float32), np.zeros(heads * wide, np.float32)
    flat = logits.reshape(heads * padded)
    for g in range(heads):
        copy(q[g], queries[g * wide :])
    _ask(k, places, 0, dim)
    for j in range(0, len(places), TILE):
        _ask(k, places, j + TILE, dim)
        _read_tile(k, places, j, dim, wide, kind, tile)
        for t in range(0, TILE, TOKENS):
            dot(queries, wide, heads, tile, t * wide, wide, wide, flat, j + t, padded)


@numba.njit(inline="always")
def _soften(logits, used, scaling, softcap, sinks, stats):  # pragma: no cover - compiled
    """Replace products by weights of the softmax; write the mean and the log-sum-exp of the logits to stats."""
    heads, padded = logits.shape
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
        stats[0, g] = total / np.float32(used)
        logits[g, used:] = np.float32(-np.inf)
        top = max(sinks[g], largest(flat, start, padded))  # -inf without a learned sink
        total = exponentials(flat, start, padded, top) + np.float32(math.exp(sinks[g] - top))
        stats[1, g] = top + np.float32(math.log(total))
        for j in range(used):
            line[j] /= total


@numba.njit(inline="always")
def _weigh(v, places, kind, wide, weights, out):  # pragma: no cover - compiled
    """Write the sums of values, weighted by weights [heads, padded], to out [heads, Dv]."""
    (heads, padded), dim = weights.shape, out.shape[1]
    flat = weights.reshape(heads * padded)
    _ask(v, places, 0, dim)
    tile, sums = np.zeros(TILE * wide, np.float32), np.zeros(heads * wide, np.float32)
    for j in range(0, len(places), TILE):
        _ask(v, places, j + TILE, dim)
        count = _read_tile(v, places, j, dim, wide, kind, tile)
        weigh(flat, j, padded, heads, tile, 0, wide, count, sums, wide)
    for g in range(heads):
        copy(sums[g * wide : g * wide + dim], out[g])


@inner(fastmath={"reassoc", "contract", "nsz"})
def _share(c, known, query, mean_key, scaling, sizes):  # pragma: no cover - compiled
    """Return the remainder's share of the softmax (eq. 15 and 16), given the selected weight exp(total)."""
    (mean, total), (log_used, log_rest) = known, sizes
    product = np.float32(0)
    for i in range(len(query)):
        product += query[i] * mean_key[i]
    typical = c[0] + c[1] * mean + c[2] * (product * scaling) + c[3] * (total - log_used) + c[4] * log_used
    weight = min(typical, total - log_used) + log_rest
    return np.float32(1) / (np.float32(1) + np.float32(math.exp(total - weight)))


@hot(fastmath={"reassoc", "contract", "nsz"})
def attend(
    q, k, k_at, v, v_at, table, indices, out, scaling, softcap, sinks, kind, coefficients, mean_key, rest, visible
):  # pragma: no cover - compiled
    """Attend with the queries q [G, D] of one row to the tokens in `indices`, which are valid; write out [G, Dv].

    k and v: the memory from the head's first row on, of 16-bit or 32-bit words. k_at and v_at: strides of a page and of
    a token, and tokens of a page, for the page table of the row; without a table, tokens are contiguous. Without
    coefficients [G, 5] there is no remainder.
    """
    heads, used = len(q), len(indices)
    wide, wide_v = (q.shape[1] + WIDTH - 1) // WIDTH * WIDTH, (out.shape[1] + WIDTH - 1) // WIDTH * WIDTH
    logits, stats = np.empty((heads, (used + BLOCK - 1) // BLOCK * BLOCK), np.float32), np.empty((2, heads), np.float32)

    # 1. logits and 2. softmax
    _multiply(q, k, _places(indices, table, k_at), kind, wide, logits)
    _soften(logits, used, scaling, softcap, sinks, stats)

    # 3. weighted sum of values
    _weigh(v, _places(indices, table, v_at), kind, wide_v, logits, out)

    # 4. the remainder
    left = visible - used
    if len(coefficients) and left > 0:
        sizes = np.float32(math.log(used)), np.float32(math.log(left))
        for g in range(heads):
            share = _share(coefficients[g], (stats[0, g], stats[1, g]), q[g], mean_key, scaling, sizes)
            line, value = out[g], rest[g]
            for i in range(len(line)):
                line[i] += share * (value[i] - line[i])
