"""Part of a search: score keys and keep the entries that reach the floor of a row."""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import numpy as np

from hashcore.cpu.intrinsics import LANES, stay_a_function
from hashcore.cpu.launch_plan import CHUNK, MORE
from hashcore.cpu.parts import hot, inner
from hashcore.cpu.score_kernels import _address, _score, _score_beside
from hashcore.cpu.select_kernels import _append, _shrink, _take

# The columns of a row's search state: address of its keys, range that it sees, ..., offset of its page table.
AT, FROM, TO, WANTED, FLOOR, KEPT, PAGES = range(7)


@inner
def _collect(r0, r1, a, b, state, codes, planes, weights, tile, places, buffer, kept, histogram, top):
    """Score keys [a, b) for rows [r0, r1) of the block and append entries that reach their floors."""
    stay_a_function()
    step, _, pairs = codes
    for low in range(a, b, CHUNK):
        size, r = min(CHUNK, b - low), r0
        while r < r1:
            same, seen = _same(state, r, r1, low, low + size)
            if seen and not pairs:
                _score(state[r, AT] + low * step, codes, size, tile, weights, planes, r, same, places, buffer)
            for q in range(r, r + same):
                at, end = max(low, state[q, FROM]), min(low + size, state[q, TO])
                if state[q, WANTED] == 0 or at >= end:
                    continue
                count = _make_room(q, size, state, kept[q], top, histogram)
                if pairs:
                    keys = state[q, AT] + at * step
                    count = _append_pairs(keys, planes[q], weights, buffer[q], state[q, FLOOR], at, end, kept[q], count)
                    at += (end - at) // LANES * LANES
                    if at < end:
                        keys = state[q, AT] + at * step
                        _score(keys, codes, end - at, tile, weights, planes, q, np.int64(1), places, buffer)
                        count = _append(buffer[q, : end - at], state[q, FLOOR], at, kept[q], count)
                    state[q, KEPT] = count
                else:
                    state[q, KEPT] = _append(buffer[q, at - low : end - low], state[q, FLOOR], at, kept[q], count)
            r += same


@hot
def _append_pairs(keys, planes, weights, buffer, floor, low, high, kept, count):
    """Score keys [low, high) except a remainder below LANES, and append those that reach the floor."""
    stay_a_function()
    threshold = np.uint16(floor)  # fits: a floor is at most one above the top score, bounded by validation.score_bits
    p, w, out = _address(planes), _address(weights), _address(buffer)
    for i in range(low, high - LANES + 1, LANES):
        mask = _score_beside(keys, p, w, len(weights), threshold, out, buffer)
        keys += 16 * LANES
        if mask:
            count = _take(mask, buffer, np.int64(0), i, kept, count)
    return count


@inner
def _make_room(q, size, state, kept, top, histogram):
    """Shrink the entries of row q if `size` more might not fit, and raise its floor; return how many are kept."""
    count = state[q, KEPT]
    if count + size + MORE > len(kept):
        count = state[q, WANTED]
        # One above the lowest: later keys lose ties.
        state[q, FLOOR] = 1 + _shrink(kept, state[q, KEPT], count, state[q, FLOOR], top, histogram)
    return count


@inner
def _same(state, r, end, low, high):
    """Return how many rows from r on share its keys, and whether any of them sees a key in [low, high)."""
    same, seen = np.int64(0), False
    while r + same < end and state[r + same, AT] == state[r, AT]:
        seen |= state[r + same, FROM] < high and state[r + same, TO] > low
        same += 1
    return same, seen
