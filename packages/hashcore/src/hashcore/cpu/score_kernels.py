"""Kernels that score keys (eq. 2, 4); hashcore.ops has checked their arguments. cpu/__init__.py explains them."""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import numpy as np
from numpy.typing import NDArray

from hashcore.cpu import launch_plan
from hashcore.cpu.intrinsics import LANES, memory, stay_a_function, word_at
from hashcore.cpu.launch_plan import BLOCK, CHUNK, PAGE
from hashcore.cpu.parts import copy, hot, inner
from hashcore.cpu.score_vectors import TILE_KEYS, score_128_bits, score_columns, transpose

QUARTER = LANES // 4  # pages with a multiple of this many keys, and a power of 2, are read in place; others are copied
# Constants are passed as np.int64(...), because numba compiles a function again for every literal argument.


@inner
def _operands(header, block):
    """Return the weights, buffers for a block's planes and for a tile, and the codes' (step, bits, whether pairs).

    Pairs are contiguous codes of two 64-bit words whose scores fit 16 bits.
    """
    words32, planes, step = header[launch_plan.WORDS], header[launch_plan.PLANES], header[launch_plan.STEP]
    words = (words32 + 1) // 2
    weights = np.empty(planes, np.uint32)
    for p in range(planes):
        weights[p] = header[launch_plan.FIRST_WEIGHT + p]
    pairs = words32 == 4 and step == 16 and header[launch_plan.TOP] < 1 << 16
    if header[PAGE] % QUARTER or header[PAGE] & (header[PAGE] - 1):  # only such pages are read in place
        pairs = False
    own, tile = np.empty((block, planes, words), np.uint64), np.empty(((words + 3) // 4 * 4, TILE_KEYS), np.uint64)
    return weights, own, tile, (step, 32 * words32, pairs)


@inner
def _copy_planes(address, header, own):
    """Copy planes of 32-bit words from an address to 64-bit words [P, ceil(W / 2)].

    They are complemented, so that xor with a key gives the matching bits, and padded with 0, which gives no match.
    """
    for p in range(own.shape[0]):
        for v in range(own.shape[1]):
            place = address + p * header[launch_plan.PLANE_STEP] + 2 * v * header[launch_plan.WORD_STEP]
            own[p, v] = np.uint32(~word_at(place))
            if 2 * v + 1 < header[launch_plan.WORDS]:
                own[p, v] |= np.uint64(np.uint32(~word_at(place + header[launch_plan.WORD_STEP]))) << np.uint64(32)


@hot
def _score(place, codes, size, tile, weights, planes, r, rows, places, like):
    """Score the keys at an address against planes[r : r + rows], writing to the addresses places[r], places[r + 1], ...

    For each row, `size` scores rounded up to TILE_KEYS are written.
    """
    stay_a_function()
    step, bits, pairs = codes
    words, count = planes.shape[2], len(weights)
    p, w, o, t = _address(planes[r]), _address(weights), _address(places) + 8 * r, _address(tile)
    whole = np.int64(0)
    if pairs:
        whole = size // LANES * LANES
        for i in range(0, whole, LANES):
            for q in range(rows):
                out = places[r + q] + i * like.itemsize
                _score_beside(place + 16 * i, p + 16 * count * q, w, count, np.uint16(0), out, like)
    elif words == 1 and bits == 64 and step == 8:
        whole = size // TILE_KEYS * TILE_KEYS
        for i in range(0, whole, TILE_KEYS):
            score_columns(place + i * step, 0, 1, p, w, count, rows, o, i * like.itemsize, like)
    for i in range(whole, size, TILE_KEYS):
        transpose(place + i * step, step, min(TILE_KEYS, size - i) - 1, bits // 32, t)
        score_columns(t, 8 * TILE_KEYS, words, p, w, count, rows, o, i * like.itemsize, like)


@inner
def _score_beside(keys, planes, weights, count, threshold, out, like):
    """Call `score_128_bits` for contiguous keys."""
    part = 16 * QUARTER
    quarters = keys, keys + part, keys + 2 * part, keys + 3 * part
    return score_128_bits(
        quarters[0], quarters[1], quarters[2], quarters[3], planes, weights, count, threshold, out, like
    )


@inner
def _address(x):
    return np.int64(x.ctypes.data)  # numba frees x after its last use, so x must be used later than the address


def score_tasks(
    first: int, last: int, header: NDArray[np.int64], rows: NDArray[np.int64], query: int, keys: int, out: int
) -> int:
    """Score tasks [first, last), each BLOCK rows x CHUNK keys, to rows of int32.

    header and rows are those of a plan; query, keys and out are the addresses to which its offsets are added.
    """
    n, step = header[launch_plan.N], header[launch_plan.STEP]
    weights, own, tile, codes = _operands(header, BLOCK)
    places, buffers = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    buffer = np.empty((BLOCK, TILE_KEYS), np.int32)
    for r in range(BLOCK):
        buffers[r] = _address(buffer[r])
    chunks = (n + CHUNK - 1) // CHUNK
    for task in range(first, last):
        low = task % chunks * CHUNK
        size = min(CHUNK, n - low)
        whole = size // TILE_KEYS * TILE_KEYS
        row = task // chunks * BLOCK
        end = min(row + BLOCK, len(rows))
        while row < end:
            same = np.int64(0)
            while row + same < end and rows[row + same, launch_plan.KEYS] == rows[row, launch_plan.KEYS]:
                _copy_planes(query + rows[row + same, launch_plan.QUERY], header, own[same])
                places[same] = out + rows[row + same, launch_plan.OUT] + 4 * low
                same += 1
            place = keys + rows[row, launch_plan.KEYS] + low * step
            _score(place, codes, whole, tile, weights, own, np.int64(0), same, places, buffer)
            if whole < size:
                place += whole * step
                _score(place, codes, size - whole, tile, weights, own, np.int64(0), same, buffers, buffer)
                for r in range(same):
                    o = memory(places[r] + 4 * whole, size - whole, buffer)
                    copy(buffer[r, : len(o)], o)
            row += same
    return 0
