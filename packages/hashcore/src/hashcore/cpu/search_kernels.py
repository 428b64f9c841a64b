"""The search kernels; hashcore.ops has checked their arguments. cpu/__init__.py explains how they work together."""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import numpy as np
from numpy.typing import NDArray

from hashcore.cpu import launch_plan
from hashcore.cpu.intrinsics import LANES, memory, prefetch, prefetch_far, stay_a_function
from hashcore.cpu.launch_plan import CHUNK, MORE, PAGE
from hashcore.cpu.parts import copy, hot, inner
from hashcore.cpu.score_kernels import QUARTER, _address, _copy_planes, _operands, _score, _score_beside
from hashcore.cpu.score_vectors import score_128_bits
from hashcore.cpu.select_kernels import LEVEL, _append, _chosen, _count_chosen, _entry, _shrink, _take, _write

RUN = 64  # consecutive keys of a sample
SOON, LATER = 128, 512  # prefetch distances in keys, to L1 and L2: hardware prefetchers do not predict pages
TOUCHED = 2048
"""How many keys ahead pages are touched, those of a chunk in a row.

A prefetch waits for the address translation of its page. Processors look a few hundred instructions ahead, so one by
one among the scores these waits add up; in a row they overlap.
"""
# The columns of a row's search state: address of its keys, range that it sees, ..., offset of its page table.
AT, FROM, TO, WANTED, FLOOR, KEPT, PAGES = range(7)


@inner
def _collect(r0, r1, a, b, state, codes, planes, weights, pages, allowed, work):
    """Score keys [a, b) for rows [r0, r1) of the block and append entries that reach their floors."""
    stay_a_function()
    tile, places, buffer, kept, histogram, top = work
    beside, pairs = pages[0] == 0, codes[2]
    for low in range(a if beside else a - a % LANES, b, CHUNK):
        size, r = min(CHUNK, b - low), r0
        if _count_chosen(allowed, low, low + size) == 0:
            continue
        while r < r1:
            same, seen = _same(state, r, r1, low, low + size)
            if beside and seen and not pairs:
                _score(state[r, AT] + low * codes[0], codes, size, tile, weights, planes, r, same, places, buffer)
            for q in range(r, r + same):
                at, end = max(low, state[q, FROM]), min(low + size, state[q, TO])
                if state[q, WANTED] == 0 or at >= end:
                    continue
                count, floor = _make_room(q, size, state, kept[q], top, histogram), state[q, FLOOR]
                if beside and not pairs:
                    state[q, KEPT] = _append(buffer[q, at - low : end - low], floor, at, kept[q], count, allowed)
                    continue
                first = last = end
                if pairs:  # groups of LANES keys are read in place; in pages, those that begin at a multiple
                    first = at if beside else min(end, (at + LANES - 1) // LANES * LANES)
                    last = first + (end - first) // LANES * LANES
                if at < first:
                    count = _append_few(q, at, first, state, codes, planes, weights, pages, work, count, allowed)
                if first < last:
                    keys, table, to = state[q, AT] + 16 * first, state[q, PAGES], min(b, state[q, TO])
                    if beside:  # arguments are no tuples, which would count references
                        count = _append_pairs(
                            keys, first, last, planes[q], weights, buffer[q], floor, kept[q], count, allowed
                        )
                    else:
                        count = _append_pages(
                            keys, first, last, planes[q], weights, buffer[q], floor, kept[q], count, pages, table, to
                        )
                if last < end:
                    count = _append_few(q, last, end, state, codes, planes, weights, pages, work, count, allowed)
                state[q, KEPT] = count
            r += same


@inner
def _append_few(q, low, high, state, codes, planes, weights, pages, work, count, allowed):
    """Score keys [low, high), at most CHUNK, copied if they are in pages, and append those that reach the floor."""
    stay_a_function()
    tile, places, buffer, kept, _, _ = work
    keys, laid = _laid(q, low, high - low, state, codes, pages)
    _score(keys, laid, high - low, tile, weights, planes, q, np.int64(1), places, buffer)
    return _append(buffer[q, : high - low], state[q, FLOOR], low, kept[q], count, allowed)


@hot
def _append_pairs(keys, low, high, planes, weights, buffer, floor, kept, count, allowed):
    """Score keys [low, high), a multiple of LANES, in place, and append those that reach the floor."""
    stay_a_function()
    threshold = np.uint16(floor)  # fits: a floor is at most one above the top score, bounded by validation.searched
    p, w, out = _address(planes), _address(weights), _address(buffer)
    for i in range(low, high, LANES):
        mask = _chosen(allowed, i)
        if mask:
            mask &= _score_beside(keys, p, w, len(weights), threshold, out, buffer)
        keys += 16 * LANES
        if mask:
            count = _take(mask, buffer, np.int64(0), i, kept, count)
    return count


@hot
def _append_pages(keys, low, high, planes, weights, buffer, floor, kept, count, pages, at, end):
    """Like `_append_pairs`, in pages; low is a multiple of LANES. What follows is prefetched, up to key `end`."""
    stay_a_function()
    keys, page, table = keys - 16 * low, pages[0], pages[1]
    threshold, p, w, out = np.uint16(floor), _address(planes), _address(weights), _address(buffer)
    last, shift, inside = end - 1, np.int64(0), page - 1
    while np.int64(1) << shift < page:
        shift += 1
    blocks = memory(_address(table) + 8 * at, (last >> shift) + 1, table)
    for i in range(low + TOUCHED, min(high + TOUCHED, end), page):
        prefetch_far(_place(keys, blocks, i, shift, inside))
    for i in range(low, high, LANES):
        first, second = _place(keys, blocks, i, shift, inside), _place(keys, blocks, i + QUARTER, shift, inside)
        third = _place(keys, blocks, i + 2 * QUARTER, shift, inside)
        fourth = _place(keys, blocks, i + 3 * QUARTER, shift, inside)
        for part in range(0, LANES, QUARTER):
            near = _place(keys, blocks, min(i + SOON + part, last), shift, inside)
            far = _place(keys, blocks, min(i + LATER + part, last), shift, inside)
            for line in range(0, 16 * QUARTER, 64):
                prefetch(near + line)
                prefetch_far(far + line)
        mask = score_128_bits(first, second, third, fourth, p, w, len(weights), threshold, out, buffer)
        if mask:
            count = _take(mask, buffer, np.int64(0), i, kept, count)
    return count


@inner
def _place(keys, blocks, i, shift, inside):
    """Return the address of key i in pages of 2^shift keys of 16 bytes."""
    return keys + blocks[np.uint64(i) >> np.uint64(shift)] + ((i & inside) << 4)


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


@inner
def _pages(header, table):
    """Return the state of a search in pages: keys per page (0 without pages), page table, buffer, and its layout.

    The buffer holds a chunk of keys contiguously.
    """
    words32 = header[launch_plan.WORDS]
    room = np.empty(CHUNK * words32 if header[PAGE] else np.int64(0), np.uint32)
    return header[PAGE], table, room, (4 * words32, 32 * words32, words32 == 4)


@inner
def _paged_address(r, i, state, step, pages):
    """Return the address of key i of row r, `step` bytes after the key before it in its page."""
    page, table = pages[0], pages[1]
    return state[r, AT] + table[state[r, PAGES] + i // page] + i % page * step


@inner
def _laid(r, low, size, state, codes, pages):
    """Return address and layout of keys [low, low + size) of row r, which are copied to the buffer from pages."""
    stay_a_function()
    page, _, room, laid = pages
    if page == 0:
        return state[r, AT] + low * codes[0], codes
    words, at = laid[1] // 32, np.int64(0)
    while at < size:
        inside = (low + at) % page
        key, count = _paged_address(r, low + at, state, codes[0], pages), min(size - at, page - inside)
        if codes[0] == 4 * words:
            copy(memory(key, words * count, room), room[words * at :])
        else:
            for i in range(at, at + count):
                copy(memory(key, words, room), room[words * i :])
                key += codes[0]
        at += count
    return _address(room), laid


@inner
def _guess(r, state, codes, planes, weights, tile, places, buffer, histogram, top, pages, allowed, allowed_count):
    """Return a score that somewhat more keys of row r reach than it wants, from a sample of runs of those allowed.

    0, which all keys reach, if a sample would not save time. The number of best keys in a sample is about Poisson
    distributed: three standard deviations are added.
    """
    stay_a_function()
    step, keys, low, k = codes[0], state[r, AT], state[r, FROM], state[r, WANTED]
    n = state[r, TO] - low
    runs = min(max(n // 4096, 8), 128)
    if n < 32 * RUN or 4 * k >= allowed_count or k == 0:
        return 0
    for run in range(runs):
        at = low + run * (n - RUN) // (runs - 1)
        for i in range(at, at + RUN, max(64 // max(abs(step), 1), 1)):
            prefetch(_paged_address(r, i, state, step, pages) if pages[0] else keys + i * step)
    shift = 0
    while top >> shift >= LEVEL:  # the finest bins that fit; coarse bins would let too many keys pass
        shift += 1
    histogram[: (top >> shift) + 1] = 0
    sampled = np.int64(0)
    for run in range(runs):
        at = low + run * (n - RUN) // (runs - 1)
        place, laid = _laid(r, at, np.int64(RUN), state, codes, pages)
        _score(place, laid, np.int64(RUN), tile, weights, planes, r, np.int64(1), places, buffer)
        bits = _chosen(allowed, at)
        for i in range(RUN):
            one = np.int64(bits >> np.uint64(i) & np.uint64(1))
            histogram[buffer[r, i] >> shift] += one
            sampled += one
    expected = k * sampled / allowed_count
    rank, bin = np.int64(expected + 3 * np.sqrt(expected) + 4), top >> shift
    while bin > 0 and histogram[bin] < rank:
        rank -= histogram[bin]
        bin -= 1
    return bin << shift


@inner
def _restart_short_row(state, rows):
    """Find the first row that kept too few keys, and restart it without a floor."""
    for r in range(rows):
        if state[r, KEPT] < state[r, WANTED]:
            state[r, KEPT], state[r, FLOOR] = 0, 0
            return r, r + 1
    return np.int64(0), np.int64(0)


def search_tasks(
    first: int,
    last: int,
    header: NDArray[np.int64],
    rows: NDArray[np.int64],
    table: NDArray[np.int64],
    query: int,
    keys: int,
    scores: int,
    indices: int,
) -> int:
    """Search in tasks [first, last), each a block of rows x a part of the keys.

    header, rows and table are those of a plan; query and keys are the addresses to which its offsets are added.
    Row r sees keys [low, high), with scores in 0..top; without pages only those in the bitmap `table`, if it is not
    empty: bit i % 64 of int64 i // 64 for key i, and an int64 more. The best k of each part are written to int32 and
    int64 [parts, rows, WIDTH] at the addresses scores and indices, in ascending index order or, if best, highest score
    first.
    """
    n, top, width = header[launch_plan.N], header[launch_plan.TOP], header[launch_plan.WIDTH]
    room, block, parts = header[launch_plan.CAPACITY], header[launch_plan.ROWS], header[launch_plan.PARTS]
    best = header[launch_plan.BEST] and parts == 1  # several parts are merged before sorting
    weights, own, tile, codes = _operands(header, block)
    histogram = np.empty(max(top + 1, 4 * LEVEL), np.int32)
    buffer, places = np.empty((block, CHUNK), np.uint16), np.empty(block, np.int64)
    kept, state = np.empty((block, room), np.uint64), np.zeros((block, 7), np.int64)
    pages = _pages(header, table)
    allowed = table[:0] if header[PAGE] else table
    work = tile, places, buffer, kept, histogram, top
    for r in range(block):
        places[r] = _address(buffer[r])
    for task in range(first, last):
        part, row0 = task % parts, task // parts * block
        a, b, count = n * part // parts, n * (part + 1) // parts, min(block, len(rows) - row0)
        for r in range(count):
            row = rows[row0 + r]
            at, end = max(a, row[launch_plan.LOW]), max(a, min(b, row[launch_plan.HIGH]))
            _copy_planes(query + row[launch_plan.QUERY], header, own[r])
            state[r, AT], state[r, FROM], state[r, TO] = keys + row[launch_plan.KEYS], at, end
            allowed_count = _count_chosen(allowed, at, end)
            state[r, WANTED], state[r, KEPT] = min(row[launch_plan.K], allowed_count), 0
            state[r, PAGES] = row[launch_plan.TABLE]
            state[r, FLOOR] = _guess(
                r, state, codes, own, weights, tile, places, buffer, histogram, top, pages, allowed, allowed_count
            )
        ends = np.int64(0), count
        while ends[0] < ends[1]:
            _collect(ends[0], ends[1], a, b, state, codes, own, weights, pages, allowed, work)
            ends = _restart_short_row(state, count)
        for r in range(count):
            found, wanted, floor = state[r, KEPT], min(state[r, WANTED], state[r, KEPT]), state[r, FLOOR]
            place = (part * len(rows) + row0 + r) * width
            out = memory(scores + 4 * place, width, histogram), memory(indices + 8 * place, width, places)
            _write(kept[r], found, wanted, floor, best, top, histogram, out[0], out[1])
    return 0


def merge_tasks(
    first: int,
    last: int,
    part_scores: NDArray[np.int32],
    part_indices: NDArray[np.int64],
    k: NDArray[np.int64],
    top: int,
    best: int,
    scores: NDArray[np.int32],
    indices: NDArray[np.int64],
) -> int:
    """Select, for rows [first, last), the best k[row] of the parts' results from search_tasks."""
    parts, _, width = part_scores.shape
    histogram = np.empty(max(top + 1, 4 * LEVEL), np.int32)
    kept = np.empty(parts * width, np.uint64)
    for row in range(first, last):
        count = np.int64(0)
        for part in range(parts):
            for i in range(min(k[row], width)):
                if part_indices[part, row, i] < 0:
                    break
                kept[count] = _entry(part_scores[part, row, i], part_indices[part, row, i])
                count += 1
        _write(kept, count, min(count, k[row]), np.int64(0), best, top, histogram, scores[row], indices[row])
    return 0
