"""Numba kernels of `dense.attend_all`: dense attention of a few query rows on the CPU.

A task is one (batch row, KV head, chunk of CHUNK tokens). It reads each key and value of its chunk once, converts it to
float32 in cache and uses it for all X = R G lines: R query rows of the G query heads of the group.

    1. l_xj = scaling q_x . k_j, soft-capped, for the tokens j that line x sees: TOKENS keys at once
    2. m_x = max_j l_xj,  s_x = sum_j exp(l_xj - m_x)
    3. o_x = sum_j exp(l_xj - m_x) v_j

`combine` adds up the chunks c of a line in order, with M = max_c m_c or the learned sink if that is greater:
out = sum_c exp(m_c - M) o_c / (sum_c exp(m_c - M) s_c + exp(sink - M)). Chunks do not depend on the number of threads
or rows. Hence the result is the same bit for bit, and a row's result does not depend on the other rows.

Bytes read: N (D + Dv) elements per KV head, in order. Memory bandwidth is the limit, until X is so large that the
products take longer: 2 X D / LANES vector products per token. Keys that no row sees are not read.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import math
from typing import Any

import numba
import numpy as np
from hashcore.cpu.intrinsics import pointer
from hashcore.cpu.parts import hot
from numpy.typing import NDArray

from sparse_decode.cpu.attend_kernels import _fetch, _widen
from sparse_decode.cpu.lanes import LOWEST, TOKENS, WIDTH, cap, dot, exponentials, extent, hide, largest, weigh

AHEAD = 4096
"""Bytes of keys or values to prefetch, and to process at once: more would not stay in the L1 cache. Prefetches after
the last token are wasted."""
CHUNK = 256
"""Tokens per task: their logits stay in the L1 cache, for up to 32 lines."""


@numba.njit(inline="always")
def _read(x, base, stride, low, high, j, width, wide, kind, tile):  # pragma: no cover - compiled
    """Write rows j..j+WIDTH-1 of a chunk to tile [WIDTH, wide] as float32, zeros for tokens that no row sees."""
    tile[: WIDTH * wide] = 0
    bits = tile.view(np.uint32)
    for t in range(WIDTH):
        at, to = base + (j + t) * stride, t * wide
        if low <= j + t < high:
            _widen(x[at : at + width], kind, bits[to : to + width], tile[to : to + width])


@numba.njit(inline="always")
def _in_place(low, high, j, width, kind):  # pragma: no cover - compiled
    """Whether WIDTH rows of a chunk, from j on, can be used without a copy: they lie in [low, high)."""
    return kind < 2 and low <= j and j + WIDTH <= high and width % WIDTH == 0


@numba.njit(inline="always")
def _ahead(size):  # pragma: no cover - compiled
    """Return how many rows of `size` bytes to prefetch: WIDTH, or a half, a quarter, ... of it."""
    rows = WIDTH
    while rows > TOKENS and rows * size > AHEAD:
        rows //= 2
    return rows


@numba.njit(inline="always")
def _ask(x, at, step, rows, width):  # pragma: no cover - compiled
    """Prefetch later rows; the hardware prefetcher would be too late."""
    for t in range(rows):
        _fetch(x, at + t * step, width)


@numba.njit(inline="always")
def _soften(logits, at):  # pragma: no cover - compiled
    """Replace CHUNK logits by weights exp(logit - top); return the largest logit, top, and the sum of the weights."""
    top = largest(logits, at, CHUNK)
    return top, exponentials(logits, at, CHUNK, max(top, LOWEST))


# The steps of a task are inlined, so that they have its fastmath, and LLVM sees which arrays overlap.
@numba.njit(inline="always")
def _multiply(queries, k, base, k_at, low, high, count, kind, wide, lines, logits, tile):  # pragma: no cover - compiled
    """Write the products of queries and the keys of a chunk, from `base` on, to logits."""
    step, dim = k_at[2], k_at[5]
    ahead = _ahead(dim * k.itemsize)
    for j in range(0, count, WIDTH):
        if _in_place(low, high, j, dim, kind):
            for t in range(j, j + WIDTH, TOKENS):
                _ask(k, base + (t + ahead) * step, step, TOKENS, dim)
                dot(queries, wide, lines, k, base + t * step, step, dim, logits, t, CHUNK)
        else:
            _read(k, base, step, low, high, j, dim, wide, kind, tile)
            for t in range(0, WIDTH, TOKENS):
                dot(queries, wide, lines, tile, t * wide, wide, wide, logits, j + t, CHUNK)


@numba.njit(inline="always")
def _weigh(
    v, base, v_at, low, high, count, kind, wide, lines, ahead, weights, out, tile
):  # pragma: no cover - compiled
    """Add the values of a chunk, from `base` on, times their weights to out."""
    step, dim = v_at[2], v_at[5]
    for j in range(0, count, WIDTH):
        if _in_place(low, high, j, dim, kind):
            for t in range(j, j + WIDTH, ahead):
                _ask(v, base + (t + ahead) * step, step, ahead, dim)
                weigh(weights, t, CHUNK, lines, v, base + t * step, step, ahead, out, wide)
        else:
            _read(v, base, step, low, high, j, dim, wide, kind, tile)
            weigh(weights, j, CHUNK, lines, tile, 0, wide, WIDTH, out, wide)


@hot(fastmath={"reassoc", "contract", "nsz"})
def _task(
    task, q, k, k_at, v, v_at, bounds, scaling, softcap, kind, sums, stats, logits, spare, tile
):  # pragma: no cover - compiled  # fmt: skip
    heads, n, chunks = k_at[3], k_at[4], sums.shape[2]
    b, h, c = task // (heads * chunks), task // chunks % heads, task % chunks
    (lines, wide), wide_v, first = q.shape[2:], sums.shape[4], c * CHUNK
    count = min(CHUNK, n - first)
    queries, (low, high, all_from, all_to) = q[b, h].reshape(lines * wide), extent(bounds[b])
    low, high, every = low - first, min(count, high - first), all_from <= first and first + CHUNK <= all_to
    if count <= low or high <= 0:
        stats[b, h, c, :, 0], stats[b, h, c, :, 1] = np.float32(-np.inf), np.float32(0)
        return

    base = b * k_at[0] + h * k_at[1] + first * k_at[2]
    _multiply(queries, k, base, k_at, low, high, count, kind, wide, lines, logits, tile)

    values, ahead = b * v_at[0] + h * v_at[1] + first * v_at[2], _ahead(v_at[5] * v.itemsize)
    _ask(v, values, v_at[2], ahead, v_at[5])  # loaded during the softmax
    for x in range(lines):
        line = logits[x * CHUNK : (x + 1) * CHUNK]  # all of it: the last chunk sums in the same order
        for j in range(CHUNK):
            line[j] *= scaling
        if softcap > 0:
            cap(logits, x * CHUNK, CHUNK, softcap, spare)
        if not every:
            r = x // (lines // bounds.shape[1])
            hide(logits, x * CHUNK, CHUNK, bounds[b, r, 0] - first, min(count, bounds[b, r, 1] - first))
        stats[b, h, c, x, 0], stats[b, h, c, x, 1] = _soften(logits, x * CHUNK)

    out = sums[b, h, c].reshape(lines * wide_v)
    out[:] = 0
    _weigh(v, values, v_at, low, high, count, kind, wide_v, lines, ahead, logits, out, tile)


def tasks(
    first: int, last: int, q: NDArray[np.float32], k_address: int, k_reach: int, k_at: tuple[int, ...],
    v_address: int, v_reach: int, v_at: tuple[int, ...], like: NDArray[Any], bounds: NDArray[np.int64],
    scaling: np.float32, softcap: np.float32, kind: int, sums: NDArray[np.float32], stats: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Attend for tasks [first, last).

    Keys and values are at k_address and v_address: k_reach and v_reach elements of like's dtype. k_at and v_at are
    (strides of batch row, head and token, numbers of heads, tokens and components). q [B, Hkv, X, D] and sums are
    zero-padded to a multiple of WIDTH. bounds [B, R, 2]: first and last (exclusive) of the tokens that a row sees.
    Outputs for each chunk: o in sums [B, Hkv, C, X, Dv], m and s in stats [B, Hkv, C, X, 2].
    """
    k = numba.carray(pointer(k_address), k_reach, like.dtype)
    v = numba.carray(pointer(v_address), v_reach, like.dtype)
    lines, wide, wide_v = q.shape[2], q.shape[3], sums.shape[4]
    logits = np.empty(lines * CHUNK, np.float32)
    logits[:] = 0  # slots after the last token are also scaled and capped, before they are hidden
    spare = np.empty(CHUNK, np.float32)
    tile = np.empty(WIDTH * max(wide, wide_v), np.float32)
    for task in range(first, last):
        _task(task, q, k, k_at, v, v_at, bounds, scaling, softcap, kind, sums, stats, logits, spare, tile)


def combine(
    first: int, last: int, sums: NDArray[np.float32], stats: NDArray[np.float32], sinks: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Combine the chunks of batch rows [first, last) into out [B, R, Hkv, G, Dv], zeros for rows without a token.

    sinks [Hkv, G], -inf without learned sinks.
    """
    n_rows, heads, group, width = out.shape[1:]
    for b in range(first, last):
        for r, h, g in np.ndindex((n_rows, heads, group)):
            x = r * group + g
            parts, line, top, seen = stats[b, h, :, x], out[b, r, h, g], sinks[h, g], False
            for c in range(len(parts)):
                top, seen = max(top, parts[c, 0]), seen or parts[c, 1] != 0  # NaN, too
            line[:] = np.float32(0)
            if not seen:
                continue
            total = np.float32(math.exp(sinks[h, g] - top))
            for c in range(len(parts)):
                if parts[c, 1] != 0:
                    share = np.float32(math.exp(parts[c, 0] - top))
                    total += share * parts[c, 1]
                    values = sums[b, h, c, x]
                    for i in range(width):
                        line[i] += share * values[i]
            for i in range(width):
                line[i] /= total
