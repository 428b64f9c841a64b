"""Numba kernel of sparse prompts in bfloat16 on the CPU: each block of rows reads the granules that its probes find.

The layout and the arithmetic are those of prompt_kernels.py. A task is one (batch row, KV head, block of ROWS rows):

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
from numpy.typing import NDArray

from sparse_decode.cpu.bfloat_lanes import BLOCK, raised
from sparse_decode.cpu.lanes import LANES, MOST_ROWS
from sparse_decode.cpu.prompt_kernels import CHUNK, LINE, aligned, attend_span, begin, load, multiply, part, write
from sparse_decode.cpu.softmax import cap, extent
from sparse_decode.cpu.tiles import SIDE, release

ROWS = 32
PROBE = 2
SINK = 16
RECENT = 256
GRANULE = 16
LEAST = 16
_BINS = 4096
"""Scores are told apart by 1/32, from -96 to 32."""


@hot(fastmath={"reassoc", "contract", "nsz"})
def _score(
    tiled, k, k_at, first, last, words, probes, lines, least, scaling, softcap, logits, spare, best, keys
):  # pragma: no cover - compiled  # fmt: skip
    """Write a granule's score to keys, as its bin, for the granules from token `first` to `last`.

    probes: queries of `lines` lines; least [lines]: the logarithm of each line's softmax sum so far.
    """
    each = SIDE if tiled else MOST_ROWS
    for chunk in range(first // BLOCK * BLOCK, last, CHUNK):
        blocks = min(CHUNK, last - chunk + BLOCK - 1) // BLOCK
        size = blocks * BLOCK
        for i in range(size // GRANULE):
            best[i] = np.float32(-np.inf)
        for x in range(0, lines, each):
            multiply(tiled, probes, words, x, lines - x, k, k_at + chunk * words, blocks, logits)
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
def _choose(keys, count, wanted, histogram, chosen):  # pragma: no cover - compiled
    """Write the `wanted` granules with the largest keys to chosen, the first ones of equals; return their number."""
    histogram[:] = 0
    for i in range(count):
        histogram[keys[i]] += 1
    floor, above = _BINS - 1, 0
    while above + histogram[floor] < wanted:
        above += histogram[floor]
        floor -= 1
    ties, found = wanted - above, 0
    for i in range(count):
        key = keys[i]
        if key > floor or (key == floor and ties > 0):
            ties -= key == floor
            chosen[found] = i
            found += 1
    return found


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


def attend_some(
    first: int, last: int, tiled: bool, configuration: NDArray[np.uint8], q_address: int, q_reach: int,
    q_at: tuple[int, ...], like: NDArray[Any], k: NDArray[np.uint32], v: NDArray[np.uint32],
    bounds: NDArray[np.int64], fraction: np.float32, scaling: np.float32, softcap: np.float32,
    sinks: NDArray[np.float32], out: NDArray[np.uint16], read: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Attend for tasks [first, last) of ROWS rows; arguments as those of `prompt_kernels.attend`.

    fraction: share of the granules to choose. read [B, Hkv, tasks]: tokens that a task read for each of its rows.
    """
    q, k_line, v_line = numba.carray(pointer(q_address), q_reach, like.dtype), k.reshape(-1), v.reshape(-1)
    (batch, heads, blocks, key_words), value_words = k.shape, v.shape[3]
    (hq, rows, _), width, words, wide = q_at[3:], out.shape[3], key_words // BLOCK, value_words * 2 // BLOCK
    group, pieces, target = hq // heads, (rows + ROWS - 1) // ROWS, out.reshape(-1)
    room, granules = (ROWS * group + SIDE - 1) // SIDE * SIDE, blocks * BLOCK // GRANULE
    size = room * (2 * words + wide + 3) + (SIDE + 3) * LINE + CHUNK * (words + wide // 2) + 2 * granules + _BINS
    space = np.empty(size + 16 * LANES, np.float32)
    queries, at = part(aligned(space), room * words, np.uint32)
    probes, at = part(at, room * words, np.uint32)
    sums, at = part(at, room * wide, np.float32)
    some_keys, at = part(at, CHUNK * words, np.uint32)
    some_values, at = part(at, CHUNK * wide // 2, np.uint32)
    logits, at = part(at, SIDE * LINE, np.float32)
    spare, at = part(at, LINE, np.float32)
    best, at = part(at, LINE, np.float32)
    stats, at = part(at, (room, 2), np.float32)
    least, at = part(at, room, np.float32)
    histogram, at = part(at, _BINS, np.int32)
    bins, at = part(at, granules, np.int32)
    chosen, at = part(at, granules, np.int32)
    queries[:], probes[:] = 0, 0
    whole = np.zeros((ROWS, 2), np.int64)
    begin(tiled, configuration)
    for task in range(first, last):
        piece, b, h = pieces - 1 - task // (batch * heads), task // heads % batch, task % heads
        start, end, head = piece * ROWS, min(rows, (piece + 1) * ROWS), (b * heads + h) * blocks
        k_at, v_at, own = head * key_words, head * value_words, bounds[b, start:end]
        load(q, q_at, b, h, start, end, group, words, queries)
        sums[:], stats[:, 0], stats[:, 1] = 0, np.float32(-np.inf), np.float32(0)
        low, high, shown_from, shown_to = extent(own)
        between = (shown_from + SINK + GRANULE - 1) // GRANULE * GRANULE
        recent = max(between, (shown_to - RECENT) // GRANULE * GRANULE)
        count = (recent - between) // GRANULE
        wanted = max(LEAST, math.ceil(fraction * count))
        if wanted >= count:
            between, recent, count, wanted = low, low, 0, 0
        attend_span(
            tiled, k_line, k_at, v_line, v_at, own, low, between, BLOCK, group, words, wide, scaling, softcap,
            queries, logits, spare, stats, sums,
        )  # fmt: skip
        attend_span(
            tiled, k_line, k_at, v_line, v_at, own, recent, high, BLOCK, group, words, wide, scaling, softcap,
            queries, logits, spare, stats, sums,
        )  # fmt: skip
        read[b, h, piece] = high - recent + between - low + wanted * GRANULE
        if wanted:
            lines = _probe(queries, end - start, group, words, stats, probes, least)
            _score(
                tiled, k_line, k_at, between, recent, words, probes, lines, least, scaling, softcap, logits, spare,
                best, bins,
            )  # fmt: skip
            _choose(bins, count, wanted, histogram, chosen)
            for i in range(0, wanted, CHUNK // GRANULE):
                some = chosen[i : min(wanted, i + CHUNK // GRANULE)]
                _gather(k_line, k_at, v_line, v_at, between, words, wide, some, some_keys, some_values)
                whole[:, 1] = len(some) * GRANULE
                attend_span(
                    tiled, some_keys, 0, some_values, 0, whole[: end - start], 0, len(some) * GRANULE, BLOCK, group,
                    words, wide, scaling, softcap, queries, logits, spare, stats, sums,
                )  # fmt: skip
        at = ((b * rows + start) * hq + h * group) * width
        steps = hq * width, width
        write(sums, stats, sinks[h], wide, spare.view(np.uint32), target, at, steps, end - start, group, width)
    if tiled:
        release()
    space[0] = 0  # it is in use until here
