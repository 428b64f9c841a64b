"""Part of a search: `_collect` for keys in pages, and copies of such keys."""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import numpy as np

from hashcore.cpu.collect_kernels import AT, FLOOR, FROM, KEPT, PAGES, TO, WANTED, _make_room
from hashcore.cpu.intrinsics import LANES, memory, prefetch, prefetch_far, stay_a_function
from hashcore.cpu.launch_plan import CHUNK, PAGE, WORDS
from hashcore.cpu.parts import copy, inner
from hashcore.cpu.score_kernels import QUARTER, _address, _score
from hashcore.cpu.score_vectors import score_pairs
from hashcore.cpu.select_kernels import _append, _take

SOON, LATER = 128, 512  # prefetch distances in keys, to L1 and L2: hardware prefetchers do not predict pages
TOUCHED = 2048
"""How many keys ahead pages are touched, those of a chunk in a row.

A prefetch waits for the address translation of its page. Processors look a few hundred instructions ahead, so one by
one among the scores these waits add up; in a row they overlap.
"""


@inner
def _pages(header, table):
    """Return the state of a search in pages: keys per page (0 without pages), page table, buffer, and its layout.

    The buffer holds a chunk of keys contiguously.
    """
    words32 = header[WORDS]
    room = np.empty(CHUNK * words32 if header[PAGE] else np.int64(0), np.uint32)
    return header[PAGE], table, room, (4 * words32, 32 * words32, words32 == 4)


@inner
def _paged_address(r, i, state, step, pages):
    """Return the address of key i of row r, `step` bytes after the key before it in its page."""
    page, table = pages[0], pages[1]
    return state[r, AT] + table[state[r, PAGES] + i // page] + i % page * step


@inner
def _lay_out(r, low, size, state, codes, pages):
    """Copy keys [low, low + size) of row r from their pages to the buffer; return its address and layout."""
    stay_a_function()
    page, _, room, laid = pages
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
def _collect_paged(r0, r1, a, b, state, codes, planes, weights, pages, work):
    """Like `_collect`, for keys [a, b) in pages."""
    stay_a_function()
    _, _, buffer, kept, histogram, top = work
    for low in range(a - a % LANES, b, CHUNK):
        for q in range(r0, r1):
            at, end = max(low, state[q, FROM]), min(low + CHUNK, b, state[q, TO])
            if state[q, WANTED] == 0 or at >= end:
                continue
            count = _make_room(q, end - at, state, kept[q], top, histogram)
            whole = whole_end = end
            if codes[2]:  # whole groups of LANES keys are read in place
                whole = min(end, (at + LANES - 1) // LANES * LANES)
                whole_end = whole + (end - whole) // LANES * LANES
            if at < whole:
                count = _append_laid(q, at, whole, state, codes, planes, weights, pages, work, count)
            if whole < whole_end:
                floor = state[q, FLOOR]
                where = state[q, AT], state[q, PAGES], whole, whole_end, min(b, state[q, TO])
                count = _append_pages(where, planes[q], weights, buffer[q], floor, pages, kept[q], count)
            if whole_end < end:
                count = _append_laid(q, whole_end, end, state, codes, planes, weights, pages, work, count)
            state[q, KEPT] = count


@inner
def _append_laid(q, low, high, state, codes, planes, weights, pages, work, count):
    """Copy keys [low, high), at most CHUNK, from their pages, score them, and append those that reach the floor."""
    stay_a_function()
    tile, places, buffer, kept, _, _ = work
    keys, laid = _lay_out(q, low, high - low, state, codes, pages)
    _score(keys, laid, high - low, tile, weights, planes, q, np.int64(1), places, buffer)
    return _append(buffer[q, : high - low], state[q, FLOOR], low, kept[q], count)


@inner
def _append_pages(where, planes, weights, buffer, floor, pages, kept, count):
    """Score keys [low, high), multiples of LANES, in place in their pages and append those that reach the floor.

    Prefetches what follows them, up to the last key of the row or part.
    """
    stay_a_function()
    keys, at, low, high, end = where
    page, table = pages[0], pages[1]
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
            for at in range(0, 16 * QUARTER, 64):
                prefetch(near + at)
                prefetch_far(far + at)
        mask = score_pairs(first, second, third, fourth, p, w, len(weights), threshold, out, buffer)
        if mask:
            count = _take(mask, buffer, np.int64(0), i, kept, count)
    return count


@inner
def _place(keys, blocks, i, shift, inside):
    """Return the address of key i in pages of 2^shift keys of 16 bytes."""
    return keys + blocks[np.uint64(i) >> np.uint64(shift)] + ((i & inside) << 4)
