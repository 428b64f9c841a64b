"""Numba kernels of `dense.attend_rows`: attention of many query rows in bfloat16 on the CPU, dense or sparse.

`lay_out` writes the keys and values of a call once in the order that products read (`bfloat_lanes`), blocks of BLOCK
tokens. A task of `attend` is one (batch row, KV head, block of query rows): X = R G lines, with m, s and o of each in
cache. For the CHUNK tokens from each j on that any of its rows sees:

    1. l_xj = scaling q_x . k_j, soft-capped, for SIDE or MOST_ROWS lines at once
    2. m = max(m_x, max_j l_xj);  s_x and o_x times exp(m_x - m);  m_x = m;  w_xj = exp(l_xj - m) in bfloat16
    3. s_x += sum_j w_xj,  o_x += sum_j w_xj v_j

and at the end out_x = o_x / (s_x + exp(sink - m_x)). Sums are float32, and s_x adds up the rounded weights. Products
are those of AMX where there is, else AVX512_BF16's. A row's result does not depend on the number of threads.

Operations: 2 (D + Dv) for each pair of line and visible token, and an exponential. Each task reads the laid out keys
and values of its tokens once, from the L2 cache or memory: 2 (D + Dv) bytes for X lines.

If only a `fraction` of the tokens is to be read, blocks have ROWS rows, and each reads what its probes find:

    1. attend to the first SINK tokens that the rows see, and to those from RECENT before the first row on
    2. every PROBE-th row is a probe: for all query heads x of the group, a token j between has
       score_j = max over probe lines x of l_xj - log(sum over the tokens of 1 of exp(l_xi))
    3. choose the granules of GRANULE tokens with the largest score, `fraction` of those between but at least LEAST
    4. attend to them as well, all rows to the same ones

A score is the logarithm of what a token would add to a probe's softmax sum, relative to what is there. Probes are exact
products: with many rows, products are what takes time, and codes would need as many. Few rows, or few tokens between,
read all of them.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import math
from typing import Any

import numba
import numpy as np
from hashcore.cpu.intrinsics import pointer
from hashcore.cpu.parts import copy, hot
from hashcore.cpu.select_kernels import LEVEL, choose
from numpy.typing import NDArray

from sparse_decode.cpu.bfloat_lanes import (
    SIDE,
    configure,
    flat_products,
    flat_sums,
    narrow,
    pair,
    products,
    raised,
    release,
    soften,
    tile_products,
    tile_sums,
    turn,
    weighed,
)
from sparse_decode.cpu.lanes import BLOCK, LANES, LOWEST, MOST_ROWS, WIDTH, cap, extent, hide, largest

CHUNK = 512
"""Tokens whose logits are in the cache at a time."""
LINE = CHUNK + LANES
"""Distance of two lines' logits: that of CHUNK would put too many lines in one set of the L1 cache."""
LINES = 192
"""Lines of a task, about: the more, the less often keys and values are read."""
ROWS = 32
PROBE = 2
SINK = 16
RECENT = 256
GRANULE = 16
LEAST = 16
_BINS = LEVEL
"""Scores are told apart by 1/32, from -96 to 32."""


@numba.njit(inline="always")
def _arrange(x, at, step, count, turned, wide, tile):  # pragma: no cover - compiled
    if turned:
        for t in range(0, BLOCK, LANES):
            turn(x, at + t * step, step, count, tile, t)
    else:
        for t in range(0, BLOCK, 2):
            pair(x, at + t * step, step, count, tile, t // 2 * wide)


@hot
def lay_out_block(x, at, step, width, low, high, wide, turned, rows, tile):  # pragma: no cover - compiled
    """Write BLOCK rows of x from `at` on to tile; rows outside [low, high), which no row sees, become zeros.

    rows: space for BLOCK rows of `wide` components. Components of tile from `width` on must be zeros.
    """
    low, high = max(0, low), min(BLOCK, high)
    if low == 0 and high == BLOCK and width % WIDTH == 0:
        _arrange(x, at, step, width // WIDTH, turned, wide, tile)
        return
    rows[: BLOCK * wide] = 0
    for t in range(low, high):
        copy(x[at + t * step : at + t * step + width], rows[t * wide :])
    _arrange(rows, 0, wide, wide // WIDTH, turned, wide, tile)


def lay_out(
    first: int, last: int, address: int, reach: int, x_at: tuple[int, ...], like: NDArray[Any],
    seen: NDArray[np.int64], turned: bool, out: NDArray[np.uint32],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Lay out blocks [first, last) of x, `reach` elements of like's type at an address.

    x_at: strides of batch row, head and token; numbers of heads, tokens and components. seen [B, 2]: first and last
    (exclusive) of the tokens that any row sees. out [B, H, blocks, words of a block]: turned for keys, else paired;
    zeros where a row is longer than its components.
    """
    x, (heads, blocks, size) = numba.carray(pointer(address), reach, like.dtype), out.shape[1:]
    wide = size * 2 // BLOCK
    rows = np.empty(BLOCK * wide, np.uint16)
    for task in range(first, last):
        b, h, block = task // (heads * blocks), task // blocks % heads, task % blocks
        at, before = b * x_at[0] + h * x_at[1] + block * BLOCK * x_at[2], block * BLOCK
        low, high = seen[b, 0] - before, seen[b, 1] - before
        lay_out_block(x, at, x_at[2], x_at[5], low, high, wide, turned, rows, out[b, h, block])


@numba.njit(inline="always")
def soften_line(logits, at, size, scaling, stats, x, out, wide):  # pragma: no cover - compiled
    """Replace `size` products of line x by weights, and bring its stats [m, s] and out [Dv] to the new m."""
    top = largest(logits, at, size) * scaling
    if top > stats[x, 0]:
        share = np.float32(math.exp(stats[x, 0] - top))
        for i in range(x * wide, (x + 1) * wide):
            out[i] *= share
        stats[x, 0] = top
        stats[x, 1] *= share
    stats[x, 1] += soften(logits, at, size, max(stats[x, 0], LOWEST), scaling)


@numba.njit(inline="always")
def _multiply(tiled, queries, words, x, lines, k, at, blocks, logits):  # pragma: no cover - compiled
    """Write the products of a group of `lines` lines from x on with the keys of a chunk."""
    for block in range(blocks):
        b, to = at + block * words * BLOCK, block * BLOCK
        if not tiled:
            one = np.float32(1)
            products(MOST_ROWS, queries, x * words, words, k, b, BLOCK, words, one, logits, to, LINE, k, 0, 0, 0)
        elif lines <= LANES:
            flat_products(queries, x * words, words, k, b, BLOCK, words, logits, to, LINE)
        else:
            for half in range(0, BLOCK, SIDE):
                tile_products(queries, x * words, words, k, b + half, BLOCK, words, logits, to + half, LINE)


@numba.njit(inline="always")
def _weigh(tiled, weights, lines, v, at, blocks, out, to, wide):  # pragma: no cover - compiled
    """Add the values of a chunk times the weights of a group of lines to out, from `to` on."""
    depth = blocks * BLOCK // 2
    for i in range(0, wide, BLOCK):
        if not tiled:
            one = np.float32(1)
            weighed(MOST_ROWS, weights, 0, LINE, v, at + i, wide, depth, one, out, to + i, wide, v, 0, 0, 0)
        elif lines <= LANES:
            flat_sums(weights, 0, LINE, v, at + i, wide, depth, out, to + i, wide)
        else:
            for half in range(i, i + BLOCK, SIDE):
                tile_sums(weights, 0, LINE, v, at + half, wide, depth, out, to + half, wide)


@hot(fastmath={"reassoc", "contract", "nsz"})
def _attend_span(how, room, k, k_at, v, v_at, bounds, low, high, grid):  # pragma: no cover - compiled
    """Attend for the lines of a task to the tokens of [low, high) that each sees: bring stats and sums up to date.

    bounds [R, 2] of the rows. k_at, v_at: of block 0. Chunks start at multiples of `grid`.
    """
    tiled, count, words, wide, scaling, softcap = how
    queries, logits, spare, stats, out = room
    each, lines, weights = SIDE if tiled else MOST_ROWS, len(bounds) * count, logits.view(np.uint32)
    _, _, shown_from, shown_to = extent(bounds)
    shown_from, shown_to = max(low, shown_from), min(high, shown_to)
    for first in range(low // grid * grid, high, CHUNK):
        blocks, block = min(CHUNK, high - first + BLOCK - 1) // BLOCK, first // BLOCK
        size = blocks * BLOCK
        every = shown_from <= first and first + size <= shown_to
        for x in range(0, lines, each):
            _multiply(tiled, queries, words, x, lines - x, k, k_at + block * words * BLOCK, blocks, logits)
            for y in range(min(each, lines - x)):
                at, r, scale = y * LINE, (x + y) // count, scaling
                if softcap > 0:
                    for j in range(size):
                        logits[at + j] *= scaling
                    cap(logits, at, size, softcap, spare)
                    scale = np.float32(1)
                if not every:
                    hide(logits, at, size, max(low, bounds[r, 0]) - first, min(high, bounds[r, 1]) - first)
                soften_line(logits, at, size, scale, stats, x + y, out, wide)
            at = v_at + block * wide * BLOCK // 2
            _weigh(tiled, weights, lines - x, v, at, blocks, out, x * wide, wide)


@hot(fastmath={"reassoc", "contract", "nsz"})
def _score(how, room, k, k_at, first, last, probes, lines, least, best, keys):  # pragma: no cover - compiled
    """Write a granule's score to keys, as its bin, for the granules from token `first` to `last`.

    probes: queries of `lines` lines; least [lines]: the logarithm of each line's softmax sum so far.
    """
    tiled, _, words, _, scaling, softcap = how
    _, logits, spare, _, _ = room
    each = SIDE if tiled else MOST_ROWS
    for chunk in range(first // BLOCK * BLOCK, last, CHUNK):
        blocks = min(CHUNK, last - chunk + BLOCK - 1) // BLOCK
        size = blocks * BLOCK
        for i in range(size // GRANULE):
            best[i] = np.float32(-np.inf)
        for x in range(0, lines, each):
            _multiply(tiled, probes, words, x, lines - x, k, k_at + chunk * words, blocks, logits)
            scale = scaling
            if softcap > 0:
                for y in range(min(each, lines - x)):
                    for j in range(y * LINE, y * LINE + size):
                        logits[j] *= scaling
                    cap(logits, y * LINE, size, softcap, spare)
                scale = np.float32(1)
            raised(logits, LINE, min(each, lines - x), size // GRANULE, scale, least, x, best)
        for token in range(max(first, chunk), min(last, chunk + size), GRANULE):
            score = (best[(token - chunk) // GRANULE] + np.float32(96)) * np.float32(32)
            keys[(token - first) // GRANULE] = min(max(score, np.float32(0)), np.float32(_BINS - 1))


@hot
def _gather(k, k_at, v, v_at, first, words, wide, granules, keys, values):  # pragma: no cover - compiled
    """Copy granules to blocks of their own; the last block is filled up with zeros."""
    blocks = (len(granules) * GRANULE + BLOCK - 1) // BLOCK
    keys[: blocks * words * BLOCK], values[: blocks * wide * BLOCK // 2] = 0, 0
    for i in range(len(granules)):
        token, to = first + granules[i] * GRANULE, i * GRANULE
        source = k_at + token // BLOCK * words * BLOCK + token % BLOCK
        target = to // BLOCK * words * BLOCK + to % BLOCK
        for w in range(words):
            for j in range(GRANULE):
                keys[target + w * BLOCK + j] = k[source + w * BLOCK + j]
        at = v_at + token // 2 * wide
        copy(v[at : at + GRANULE // 2 * wide], values[to // 2 * wide :])


@numba.njit(inline="always")
def _probe(queries, rows, group, words, stats, probes, least):  # pragma: no cover - compiled
    """Copy the lines of every PROBE-th row, and of the last, to probes; return their number."""
    lines = 0
    for r in range(rows):
        if r % PROBE == PROBE - 1 or r == rows - 1:
            for g in range(group):
                x = r * group + g
                copy(queries[x * words : (x + 1) * words], probes[lines * words :])
                least[lines] = stats[x, 0] + math.log(stats[x, 1]) if stats[x, 1] > 0 else np.float32(np.inf)
                lines += 1
    return lines


@numba.njit(inline="always")
def _load(q, q_at, b, h, start, end, group, words, queries):  # pragma: no cover - compiled
    """Copy the queries of rows [start, end) of a KV head's group to lines."""
    numbers = queries.view(np.uint16)
    for r in range(start, end):
        for g in range(group):
            at = b * q_at[0] + (h * group + g) * q_at[1] + r * q_at[2]
            copy(q[at : at + q_at[5]], numbers[((r - start) * group + g) * words * 2 :])


@hot
def _write(out, stats, sinks, wide, words, target, at, steps, rows, group, width):  # pragma: no cover - compiled
    """Write the outputs of a task; a line that sees no token gets zeros."""
    line = words.view(np.uint16)[:width]
    for r in range(rows):
        for g in range(group):
            x = r * group + g
            top, total, to = stats[x, 0], stats[x, 1], at + r * steps[0] + g * steps[1]
            if total == 0:
                target[to : to + width] = 0
                continue
            more = max(top, sinks[g])
            share = np.float32(math.exp(top - more))
            share /= total * share + np.float32(math.exp(sinks[g] - more))
            narrow(out, x * wide, wide, share, words)
            copy(line, target[to : to + width])


# Arrays by address: numba would count references to arrays of its own, atomically, several times a line.
@numba.njit(inline="always")
def _aligned(space):  # pragma: no cover - compiled
    """Return an address in the first 64 bytes of space: tiles and vectors are whole cache lines."""
    return (space.ctypes.data + 63) & -64


@numba.njit(inline="always")
def _part(at, shape, kind):  # pragma: no cover - compiled
    """Return an array of numbers of 4 bytes at an address, and the address behind it."""
    found = numba.carray(pointer(at), shape, kind)
    return found, at + 4 * found.size


def attend(
    first: int, last: int, tiled: bool, configuration: NDArray[np.uint8], q_address: int, q_reach: int,
    q_at: tuple[int, ...], like: NDArray[Any], k: NDArray[np.uint32], v: NDArray[np.uint32],
    bounds: NDArray[np.int64], each: int, fraction: tuple[np.float32, ...], scaling: np.float32, softcap: np.float32,
    sinks: NDArray[np.float32], out: NDArray[np.uint16],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Attend for tasks [first, last): the last rows, which see most, come first.

    q is at an address, q_at: strides of batch row, head and row; numbers of heads, rows and components. k and v as laid
    out. bounds [B, Q, 2]. each: rows of a task. fraction: share of the granules to choose; empty: all tokens are read,
    and of the rest no code is made. sinks [Hkv, G], -inf without learned sinks. out [B, Q, Hq, Dv], bfloat16 by its
    bits.
    """
    q, k_line, v_line = numba.carray(pointer(q_address), q_reach, like.dtype), k.reshape(-1), v.reshape(-1)
    (batch, heads, blocks, key_words), value_words = k.shape, v.shape[3]
    (hq, rows, _), width, words, wide = q_at[3:], out.shape[3], key_words // BLOCK, value_words * 2 // BLOCK
    group, pieces, target = hq // heads, (rows + each - 1) // each, out.reshape(-1)
    room, granules = (each * group + SIDE - 1) // SIDE * SIDE, blocks * BLOCK // GRANULE
    size = room * (2 * words + wide + 3) + (SIDE + 3) * LINE + CHUNK * (words + wide // 2) + 2 * granules + 4 * _BINS
    space = np.empty(size + 16 * LANES, np.float32)
    queries, at = _part(_aligned(space), room * words, np.uint32)
    probes, at = _part(at, room * words, np.uint32)
    sums, at = _part(at, room * wide, np.float32)
    some_keys, at = _part(at, CHUNK * words, np.uint32)
    some_values, at = _part(at, CHUNK * wide // 2, np.uint32)
    logits, at = _part(at, SIDE * LINE, np.float32)
    spare, at = _part(at, LINE, np.float32)
    best, at = _part(at, LINE, np.float32)
    stats, at = _part(at, (room, 2), np.float32)
    least, at = _part(at, room, np.float32)
    histogram, at = _part(at, 4 * _BINS, np.int32)
    bins, at = _part(at, granules, np.int32)
    chosen, at = _part(at, granules, np.int32)
    queries[:], probes[:] = 0, 0
    how, lines = (tiled, group, words, wide, scaling, softcap), (queries, logits, spare, stats, sums)
    whole = np.zeros((each, 2), np.int64)
    if tiled:
        configure(configuration)
    for task in range(first, last):
        piece, b, h = pieces - 1 - task // (batch * heads), task // heads % batch, task % heads
        start, end, head = piece * each, min(rows, (piece + 1) * each), (b * heads + h) * blocks
        k_at, v_at, own = head * key_words, head * value_words, bounds[b, start:end]
        _load(q, q_at, b, h, start, end, group, words, queries)
        sums[:], stats[:, 0], stats[:, 1] = 0, np.float32(-np.inf), np.float32(0)
        low, high, shown_from, shown_to = extent(own)
        if len(fraction) == 0:
            _attend_span(how, lines, k_line, k_at, v_line, v_at, own, low, high, CHUNK)
        else:
            between = (shown_from + SINK + GRANULE - 1) // GRANULE * GRANULE
            recent = max(between, (shown_to - RECENT) // GRANULE * GRANULE)
            count = (recent - between) // GRANULE
            wanted = max(LEAST, math.ceil(fraction[0] * count))
            if wanted >= count:
                between, recent, wanted = low, low, 0
            for span in ((low, between), (recent, high)):
                _attend_span(how, lines, k_line, k_at, v_line, v_at, own, span[0], span[1], BLOCK)
            if wanted:
                probed = _probe(queries, end - start, group, words, stats, probes, least)
                _score(how, lines, k_line, k_at, between, recent, probes, probed, least, best, bins)
                choose(bins[:count], 0, np.uint64(_BINS - 1), wanted, histogram, chosen, 0)
            for i in range(0, wanted, CHUNK // GRANULE):
                some = chosen[i : min(wanted, i + CHUNK // GRANULE)]
                _gather(k_line, k_at, v_line, v_at, between, words, wide, some, some_keys, some_values)
                whole[:, 1] = len(some) * GRANULE
                seen = whole[: end - start]
                _attend_span(how, lines, some_keys, 0, some_values, 0, seen, 0, len(some) * GRANULE, BLOCK)
        at = ((b * rows + start) * hq + h * group) * width
        steps = hq * width, width
        _write(sums, stats, sinks[h], wide, spare.view(np.uint32), target, at, steps, end - start, group, width)
    if tiled:
        release()
    space[0] = 0  # it is in use until here
