"""Numba kernel of `dense.attend_all` for bfloat16 where the CPU has AVX512_BF16: a third of `dense_kernels`'.

A task is one (batch row, KV head, SPAN tokens). For each part of CHUNK tokens it takes the three steps of
prompt_kernels.py, with BLOCK keys or values at once, not widened; `dense_kernels.combine` does the rest. The result is
the same bit for bit whatever the number of threads, and a row's whatever the other rows.

Bytes read: N (D + Dv) elements per KV head. Memory bandwidth is the limit up to about X = 8 lines of 64 components on
two cores of an AMD EPYC; then it is X (D + Dv) / 32 vector products per token, and a sixth more for exponentials.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import numba
import numpy as np
from hashcore.cpu.intrinsics import pointer
from hashcore.cpu.parts import hot
from numpy.typing import NDArray

from sparse_decode.cpu.bfloat_lanes import products, weigh
from sparse_decode.cpu.lanes import BLOCK, LANES, MOST_ROWS, VECTORS, cap, extent, hide
from sparse_decode.cpu.prompt_kernels import lay_out_block, soften_line

CHUNK = 256
"""Tokens whose logits are in the cache at a time."""
SPAN = 4 * CHUNK
"""Tokens per task: the sums of a task are written once, and for many lines they are as many bytes as its keys."""
LINE = CHUNK + LANES
"""Distance of two lines' logits: that of CHUNK would put too many lines in one set of the L1 cache."""


@numba.njit(inline="always")
def _later(base, j, step, group, groups):  # pragma: no cover - compiled
    """Return which rows a group of lines prefetches: the first, and how many quarters of a BLOCK.

    It is the block after the next: the next one would come too late for few lines.
    """
    each = (VECTORS - 1 + groups) // groups
    first = min(VECTORS, group * each)
    return base + (j + 2 * BLOCK + first * LANES) * step, min(each, VECTORS - first)


# The steps of a task are inlined, so that they have its fastmath, and LLVM sees which arrays overlap.
@numba.njit(inline="always")
def _multiply(
    queries, k, base, k_at, low, high, count, wide, lines, scale, logits, rows, tile
):  # pragma: no cover - compiled
    """Write the logits of a part, from `base` on, before soft-capping."""
    step, dim, words, groups = k_at[2], k_at[5], wide // 2, (lines + MOST_ROWS - 1) // MOST_ROWS
    for j in range(0, count, BLOCK):
        lay_out_block(k, base + j * step, step, dim, low - j, high - j, wide, True, rows, tile)
        for group in range(groups):
            x, (later, quarters) = group * MOST_ROWS, _later(base, j, step, group, groups)
            at, to = x * words, x * LINE + j
            products(
                lines - x, queries, at, words, tile, 0, BLOCK, words, scale, logits, to, LINE, k, later, step, quarters
            )


@numba.njit(inline="always")
def _weigh(v, base, v_at, low, high, count, wide, lines, weights, out, rows, tile):  # pragma: no cover - compiled
    """Add the values of a part, from `base` on, times their weights to out [lines, wide]."""
    step, dim, groups = v_at[2], v_at[5], (lines + MOST_ROWS - 1) // MOST_ROWS
    for j in range(0, count, BLOCK):
        lay_out_block(v, base + j * step, step, dim, low - j, high - j, wide, False, rows, tile)
        for group in range(groups):
            x, (later, quarters) = group * MOST_ROWS, _later(base, j, step, group, groups)
            at = x * LINE + j // 2
            weigh(weights, at, LINE, lines - x, tile, BLOCK // 2, out, x * wide, wide, v, later, step, quarters)


@hot(fastmath={"reassoc", "contract", "nsz"})
def _task(
    task, q, k, k_at, v, v_at, bounds, scaling, softcap, sums, stats, logits, spare, rows, tiles
):  # pragma: no cover - compiled  # fmt: skip
    heads, n, spans = k_at[3], k_at[4], sums.shape[2]
    b, h, c = task // (heads * spans), task // spans % heads, task % spans
    (lines, words), wide_v = q.shape[2:], sums.shape[4]
    queries, out, stat = q[b, h].reshape(lines * words), sums[b, h, c].reshape(lines * wide_v), stats[b, h, c]
    out[:], stat[:, 0], stat[:, 1] = 0, np.float32(-np.inf), np.float32(0)
    any_from, any_to, all_from, all_to = extent(bounds[b])
    for first in range(c * SPAN, min(n, (c + 1) * SPAN), CHUNK):
        count = min(CHUNK, n - first)
        low, high = any_from - first, min(count, any_to - first)
        if count <= low or high <= 0:
            continue
        base = b * k_at[0] + h * k_at[1] + first * k_at[2]
        _multiply(queries, k, base, k_at, low, high, count, 2 * words, lines, scaling, logits, rows, tiles[0])
        for x in range(lines):
            at, r = x * LINE, x // (lines // bounds.shape[1])
            if softcap > 0:
                cap(logits, at, CHUNK, softcap, spare)
            if all_from > first or all_to < first + CHUNK:
                hide(logits, at, CHUNK, bounds[b, r, 0] - first, min(count, bounds[b, r, 1] - first))
            soften_line(logits, at, CHUNK, np.float32(1), stat, x, out, wide_v)
        base = b * v_at[0] + h * v_at[1] + first * v_at[2]
        _weigh(v, base, v_at, low, high, count, wide_v, lines, logits.view(np.uint32), out, rows, tiles[1])


def tasks(
    first: int, last: int, q: NDArray[np.uint32], k_address: int, k_reach: int, k_at: tuple[int, ...],
    v_address: int, v_reach: int, v_at: tuple[int, ...], like: NDArray[Any], bounds: NDArray[np.int64],
    scaling: np.float32, softcap: np.float32, sums: NDArray[np.float32], stats: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Attend for tasks [first, last).

    Arguments are those of `dense_kernels.tasks`, with SPAN for CHUNK, q [B, Hkv, X, D / 2] as words of two components,
    padded to a multiple of WIDTH components, and sums padded to a multiple of BLOCK.
    """
    k = numba.carray(pointer(k_address), k_reach, like.dtype)
    v = numba.carray(pointer(v_address), v_reach, like.dtype)
    lines, wide, wide_v = q.shape[2], 2 * q.shape[3], sums.shape[4]
    logits = np.zeros(lines * LINE, np.float32)
    spare, rows = np.empty(CHUNK, np.float32), np.empty(BLOCK * max(wide, wide_v), np.uint16)
    tiles = np.empty(wide // 2 * BLOCK, np.uint32), np.zeros(BLOCK // 2 * wide_v, np.uint32)
    for task in range(first, last):
        _task(task, q, k, k_at, v, v_at, bounds, scaling, softcap, sums, stats, logits, spare, rows, tiles)
