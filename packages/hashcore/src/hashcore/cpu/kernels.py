"""The numba kernels; hashcore.ops has checked their arguments. cpu/__init__.py explains how they work together.

They are all in one file because numba's cache checks the file of a kernel only, not those that it imports. FROM_OTHERS
is the digest of intrinsics.py and plan.py, so that this file changes with them.
"""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hashcore.cpu import plan
from hashcore.cpu.intrinsics import (
    LANES,
    TILE_KEYS,
    at_least,
    copy_key,
    lowest_bit,
    memory,
    popcount,
    prefetch,
    prefetch_far,
    score_columns,
    score_first_words,
    score_pairs,
    stay_a_function,
    transpose,
    word_at,
)

FROM_OTHERS = "4d961d9136f758aa"
CHUNK, BLOCK, MORE, STASH = plan.CHUNK, plan.BLOCK, plan.MORE, plan.STASH
N, WORDS, PLANES, PLANE_STEP, WORD_STEP, STEP, TOP, WIDTH, BEST, ROOMY, ROWS, PARTS, SHORTLIST, PAGE = plan.HEADER
QUERY, KEYS_AT, OUT, K, LOW, HIGH, TABLE = plan.COLUMNS
FIRST_WEIGHT = plan.FIRST_WEIGHT
LEVEL = 1 << 12  # wider score ranges are counted in two levels, the first with bins of 256 scores
QUARTER = LANES // 4  # pages with a multiple of this many keys, and a power of 2, are read in place; others are copied
SOON, LATER = 128, 1024  # prefetch distances in keys, to L1 and L2: hardware prefetchers do not predict pages
RUN = 64  # consecutive keys of a sample
LAST, INDEX, LOWER = np.uint64(1 << 63), np.uint64((1 << 48) - 1), np.uint64((1 << 32) - 1)
USUAL = 8  # unconditional writes to a shortlist per 64 keys
SAMPLE, EARLY = 1024, 4  # sampled keys, and planes, whose first words determine the shortlist's floor (eq. 20)
# The columns of a row's search state: address of its keys, range that it sees, ..., offset of its page table.
AT, FROM, TO, WANTED, FLOOR, KEPT, FIRST_FLOOR, STASHED, PAGES = range(9)
# Constants are passed as np.int64(...), because numba compiles a function again for every literal argument.


def score_tasks(
    first: int, last: int, header: NDArray[np.int64], rows: NDArray[np.int64], query: int, keys: int, out: int
) -> int:
    """Score tasks [first, last), each BLOCK rows x CHUNK keys, to rows of int32.

    header and rows are those of a plan; query, keys and out are the addresses to which its offsets are added.
    """
    n, step = header[N], header[STEP]
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
            while row + same < end and rows[row + same, KEYS_AT] == rows[row, KEYS_AT]:
                _copy_planes(query + rows[row + same, QUERY], header, own[same])
                places[same] = out + rows[row + same, OUT] + 4 * low
                same += 1
            place = keys + rows[row, KEYS_AT] + low * step
            _score(place, codes, whole, tile, weights, own, np.int64(0), same, places, buffer)
            if whole < size:
                place += whole * step
                _score(place, codes, size - whole, tile, weights, own, np.int64(0), same, buffers, buffer)
                for r in range(same):
                    o = memory(places[r] + 4 * whole, size - whole, buffer)
                    o[:] = buffer[r, : len(o)]
            row += same
    return 0


def topk_tasks(
    first: int,
    last: int,
    scores: NDArray[np.int64],
    k: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    values: NDArray[Any],
    indices: NDArray[np.int64],
) -> int:
    """Select from rows [first, last), whose addresses are in `scores`."""
    histogram = np.empty(4 * LEVEL, np.int32)
    for row in range(first, last):
        if low[row] == high[row]:
            continue
        s = memory(scores[row] + low[row] * values.itemsize, high[row] - low[row], values)
        smallest = largest = s[0]  # (1)
        for i in range(len(s)):
            smallest = min(smallest, s[i])
            largest = max(largest, s[i])
        # Differences are taken modulo 2^64: right for every integer type, signed or not.
        span = np.uint64(largest) - np.uint64(smallest)
        wanted = min(k[row], len(s))
        if wanted == 0:
            continue
        step, quota = _threshold(s, np.uint64(0), np.uint64(smallest), span, wanted, histogram)  # (2), (3)
        _compact(s, s.dtype.type(np.uint64(smallest) + step), quota, indices[row], low[row])
        for i in range(wanted):
            values[row, i] = s[indices[row, i] - low[row]]
    return 0


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

    header, rows and table are those of a plan; query and keys are the addresses to which its offsets are added. Row r
    sees keys [low, high), with scores in 0..top. The best k of each part are written to int32 and int64
    [parts, rows, WIDTH] at the addresses scores and indices, in ascending index order or, if best, highest score first.
    With a shortlist, only keys on it are selected.
    """
    n, top, width = header[N], header[TOP], header[WIDTH]
    room, block, parts = header[ROOMY], header[ROWS], header[PARTS]
    best = header[BEST] and parts == 1  # several parts are merged before sorting
    weights, own, tile, codes = _operands(header, block)
    histogram = np.empty(max(top + 1, 4 * LEVEL), np.int32)
    buffer, places = np.empty((block, CHUNK), np.uint16), np.empty(block, np.int64)
    kept, state = np.empty((block, room), np.uint64), np.zeros((block, 9), np.int64)
    pages = _pages(header, table)
    short, work = _short(block, weights, header), (tile, places, buffer, kept, histogram, top)
    for r in range(block):
        places[r] = _address(buffer[r])
    for task in range(first, last):
        part, row0 = task % parts, task // parts * block
        a, b, count = n * part // parts, n * (part + 1) // parts, min(block, len(rows) - row0)
        for r in range(count):
            row = rows[row0 + r]
            at, end = max(a, row[LOW]), max(a, min(b, row[HIGH]))
            _copy_planes(query + row[QUERY], header, own[r])
            state[r, AT], state[r, FROM], state[r, TO] = keys + row[KEYS_AT], at, end
            state[r, WANTED], state[r, KEPT], state[r, PAGES] = min(row[K], max(0, end - at)), 0, row[TABLE]
            if header[SHORTLIST]:
                _shorten(r, row, header, state, codes, own, weights, short, work)
            if state[r, FIRST_FLOOR] == 0:
                state[r, FLOOR] = _guess(r, state, codes, own, weights, tile, places, buffer, histogram, top, pages)
        ends = np.int64(0), count
        while ends[0] < ends[1]:
            if header[PAGE]:
                _collect_paged(ends[0], ends[1], a, b, state, codes, own, weights, pages, work)
            elif header[SHORTLIST]:
                _collect_short(ends[0], ends[1], a, b, state, codes, own, weights, short, work)
            else:
                _collect(ends[0], ends[1], a, b, state, codes, own, weights, tile, places, buffer, kept, histogram, top)
            ends = _misled(state, count, parts)
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


@numba.njit
def _operands(header, block):
    """Return the weights, buffers for a block's planes and for a tile, and the codes' (step, bits, whether pairs).

    Pairs are contiguous codes of two 64-bit words whose scores fit 16 bits.
    """
    words32, planes, step = header[WORDS], header[PLANES], header[STEP]
    words = (words32 + 1) // 2
    weights = np.empty(planes, np.uint32)
    for p in range(planes):
        weights[p] = header[FIRST_WEIGHT + p]
    pairs = words32 == 4 and step == 16 and header[TOP] < 1 << 16
    if header[PAGE] % QUARTER or header[PAGE] & (header[PAGE] - 1):  # only such pages are read in place
        pairs = False
    own, tile = np.empty((block, planes, words), np.uint64), np.empty(((words + 3) // 4 * 4, TILE_KEYS), np.uint64)
    return weights, own, tile, (step, 32 * words32, pairs)


@numba.njit
def _copy_planes(address, header, own):
    """Copy planes of 32-bit words from an address to 64-bit words [P, ceil(W / 2)].

    They are complemented, so that xor with a key gives the matching bits, and padded with 0, which gives no match.
    """
    for p in range(own.shape[0]):
        for v in range(own.shape[1]):
            place = address + p * header[PLANE_STEP] + 2 * v * header[WORD_STEP]
            own[p, v] = np.uint32(~word_at(place))
            if 2 * v + 1 < header[WORDS]:
                own[p, v] |= np.uint64(np.uint32(~word_at(place + header[WORD_STEP]))) << np.uint64(32)


@numba.njit
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


@numba.njit
def _pages(header, table):
    """Return the state of a search in pages: keys per page (0 without pages), page table, buffer, and its layout.

    The buffer holds a chunk of keys contiguously.
    """
    words32 = header[WORDS]
    room = np.empty(CHUNK * words32 if header[PAGE] else np.int64(0), np.uint32)
    return header[PAGE], table, room, (4 * words32, 32 * words32, words32 == 4)


@numba.njit
def _lay_out(r, low, size, state, codes, pages):
    """Copy keys [low, low + size) of row r from their pages to the buffer; return its address and layout."""
    stay_a_function()
    page, table, room, laid = pages
    words, at = laid[1] // 32, np.int64(0)
    while at < size:
        block, inside = (low + at) // page, (low + at) % page
        key, count = state[r, AT] + table[state[r, PAGES] + block] + inside * codes[0], min(size - at, page - inside)
        if codes[0] == 4 * words:
            room[words * at : words * (at + count)] = memory(key, words * count, room)
        else:
            for i in range(at, at + count):
                room[words * i : words * (i + 1)] = memory(key, words, room)
                key += codes[0]
        at += count
    return _address(room), laid


@numba.njit
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
                where = state[q, AT], state[q, PAGES], whole, whole_end
                count = _append_pages(where, planes[q], weights, buffer[q], floor, pages, kept[q], count)
            if whole_end < end:
                count = _append_laid(q, whole_end, end, state, codes, planes, weights, pages, work, count)
            state[q, KEPT] = count


@numba.njit
def _append_laid(q, low, high, state, codes, planes, weights, pages, work, count):
    """Copy keys [low, high), at most CHUNK, from their pages, score them, and append those that reach the floor."""
    stay_a_function()
    tile, places, buffer, kept, _, _ = work
    keys, laid = _lay_out(q, low, high - low, state, codes, pages)
    _score(keys, laid, high - low, tile, weights, planes, q, np.int64(1), places, buffer)
    return _append(buffer[q, : high - low], state[q, FLOOR], low, kept[q], count)


@numba.njit
def _append_pages(where, planes, weights, buffer, floor, pages, kept, count):
    """Score keys [low, high), multiples of LANES, in place in their pages and append those that reach the floor."""
    stay_a_function()
    keys, at, low, high = where
    page, table = pages[0], pages[1]
    threshold, p, w, out = np.uint16(floor), _address(planes), _address(weights), _address(buffer)
    last, shift, inside = high - 1, np.int64(0), page - 1
    while np.int64(1) << shift < page:
        shift += 1
    blocks = memory(_address(table) + 8 * at, (last >> shift) + 1, table)
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


@numba.njit
def _place(keys, blocks, i, shift, inside):
    """Return the address of key i in pages of 2^shift keys of 16 bytes."""
    return keys + blocks[np.uint64(i) >> np.uint64(shift)] + ((i & inside) << 4)


@numba.njit
def _make_room(q, size, state, kept, top, histogram):
    """Shrink the entries of row q if `size` more might not fit, and raise its floor; return how many are kept."""
    count = state[q, KEPT]
    if count + size + MORE > len(kept):
        count = state[q, WANTED]
        # One above the lowest: later keys lose ties.
        state[q, FLOOR] = 1 + _shrink(kept, state[q, KEPT], count, state[q, FLOOR], top, histogram)
    return count


@numba.njit
def _same(state, r, end, low, high):
    """Return how many rows from r on share its keys, and whether any of them sees a key in [low, high)."""
    same, seen = np.int64(0), False
    while r + same < end and state[r + same, AT] == state[r, AT]:
        seen |= state[r + same, FROM] < high and state[r + same, TO] > low
        same += 1
    return same, seen


@numba.njit
def _misled(state, rows, parts):
    """Find the first row that kept too few keys, and restart it without a floor, or then without a shortlist.

    A single part of the keys may have few keys of a shortlist; the caller checks whether all parts have enough.
    """
    for r in range(rows):
        short = state[r, FIRST_FLOOR] > 0
        if state[r, KEPT] >= state[r, WANTED] or (short and parts > 1):
            continue
        if state[r, FLOOR] == 0:
            state[r, FIRST_FLOOR] = 0
        state[r, KEPT], state[r, FLOOR] = 0, 0
        return r, r + 1
    return np.int64(0), np.int64(0)


@numba.njit
def _short(block, weights, header):
    """Return the state of a search with a shortlist.

    The weights of the last planes, their first words for each row, a buffer for their scores, and buffers for codes and
    indices of keys that wait to be scored in full.
    """
    block = block if header[SHORTLIST] else np.int64(0)
    early = weights[max(0, len(weights) - EARLY) :]
    first_words = np.zeros((block, len(early), 1), np.uint64)
    codes, indices = np.empty((max(SAMPLE, STASH), 2), np.uint64), np.empty((block, STASH + USUAL), np.int64)
    return early, first_words, np.empty(CHUNK, np.uint16), codes, indices


@numba.njit
def _shorten(r, row, header, state, codes, planes, weights, short, work):
    """Set the floors of row r's shortlist from a sample spread over the keys that it sees (eq. 20).

    FIRST_FLOOR: the score by first words that keys on the shortlist reach; 0 if all keys are on it. Otherwise also
    FLOOR: a full score that somewhat more than k of them reach, as in `_guess`.
    """
    stay_a_function()
    tile, places, buffer, _, histogram, top = work
    early, first_words = short[0], short[1]
    k, n, size, one = row[K], row[HIGH] - row[LOW], np.int64(SAMPLE), np.int64(1)
    wanted, last = header[SHORTLIST] * k, np.uint64(0)
    state[r, FIRST_FLOOR] = 0
    for p in range(len(early)):
        first_words[r, p, 0] = planes[r, len(weights) - len(early) + p, 0] & LOWER
        last += np.uint64(32) * np.uint64(early[p])
    if n < 2 * SAMPLE or k == 0 or wanted >= n:
        return
    keys, step = state[r, AT] + row[LOW] * codes[0], codes[0] * (n // SAMPLE)
    if codes[2]:  # contiguous copies are scored faster, and they are scored twice
        room = _address(short[3])
        for i in range(SAMPLE):
            copy_key(keys + i * step, room + 16 * i)
        keys, step = room, np.int64(16)
    _score(keys, (step, np.int64(32), False), size, tile, early, first_words, r, one, places, buffer)
    rank = (wanted * SAMPLE + n - 1) // n
    floor, _ = _threshold(buffer[r, :SAMPLE], np.uint64(0), np.uint64(0), last, rank, histogram)
    state[r, FIRST_FLOOR] = np.int64(floor)
    first, listed = short[2], np.int64(0)
    first[:] = buffer[r, :SAMPLE]
    _score(keys, (step, codes[1], codes[2]), size, tile, weights, planes, r, one, places, buffer)
    for i in range(SAMPLE):  # only keys on the shortlist: the best of all keys may not be on it
        buffer[r, listed] = buffer[r, i]
        listed += first[i] >= floor
    expected = k * SAMPLE / n
    rank, state[r, FLOOR] = np.int64(expected + 3 * np.sqrt(expected) + 4), 0
    if rank <= listed:
        floor, _ = _threshold(buffer[r, :listed], np.uint64(0), np.uint64(0), np.uint64(top), rank, histogram)
        state[r, FLOOR] = np.int64(floor)


@numba.njit
def _collect_short(r0, r1, a, b, state, codes, planes, weights, short, work):
    """Like `_collect` for keys [a, b), but score in full only those whose first words reach their floor."""
    stay_a_function()
    _, _, pairs = codes
    chunk = CHUNK if r1 - r0 > 1 or not pairs else b - a  # a single row does not reuse keys in L1
    tile, places, buffer, kept, histogram, top = work
    for q in range(r0, r1):
        state[q, STASHED] = 0
        if state[q, FIRST_FLOOR] == 0:
            _collect(q, q + 1, a, b, state, codes, planes, weights, tile, places, buffer, kept, histogram, top)
    for low in range(a, b, chunk):
        for q in range(r0, r1):
            at, end = max(low, state[q, FROM]), min(low + chunk, b, state[q, TO])
            if state[q, FIRST_FLOOR] == 0 or at >= end:
                continue
            if pairs:
                at = _append_short(q, at, end, state, planes, weights, short, work)
            if at < end:
                if pairs:
                    _append_stash(q, state[q, STASHED], state, planes, weights, short, work)
                _append_both(q, at, end, state, codes, planes, weights, short, work)
    if pairs:
        for q in range(r0, r1):
            _append_stash(q, state[q, STASHED], state, planes, weights, short, work)


@numba.njit
def _append_short(q, low, high, state, planes, weights, short, work):
    """Collect the keys of [low, high) that reach the floor of first words, score them in batches; return the end."""
    stay_a_function()
    early, first_words, _, _, stash = short
    threshold, p, w = np.uint16(state[q, FIRST_FLOOR]), _address(first_words[q]), _address(early)
    indices, filled, keys = stash[q], state[q, STASHED], state[q, AT] + 16 * low
    end = low + (high - low) // LANES * LANES
    for i in range(low, end, LANES):
        mask = score_first_words(keys, p, w, len(early), threshold)
        keys += 16 * LANES
        place, filled = filled, filled + np.int64(popcount(mask))
        for _ in range(USUAL):  # as in _take
            indices[place] = i + np.int64(lowest_bit(mask | LAST))
            mask &= mask - np.uint64(1)
            place += 1
        while mask:
            indices[place] = i + np.int64(lowest_bit(mask))
            mask &= mask - np.uint64(1)
            place += 1
        if filled > STASH - LANES:
            state[q, STASHED] = filled
            filled = _append_stash(q, filled // LANES * LANES, state, planes, weights, short, work)
    state[q, STASHED] = filled
    return end


@numba.njit
def _append_stash(q, size, state, planes, weights, short, work):
    """Score the first `size` collected keys, append those that reach the floor, and return how many are left."""
    stay_a_function()
    codes, indices, filled = short[3], short[4][q], state[q, STASHED]
    _, _, buffers, kept, histogram, top = work
    buffer, kept = buffers[q], kept[q]
    count = _make_room(q, size, state, kept, top, histogram)
    threshold, keys = np.uint16(state[q, FLOOR]), state[q, AT]
    c, p, w, out = _address(codes), _address(planes[q]), _address(weights), _address(buffer)
    for i in range(size):
        copy_key(keys + 16 * indices[i], c + 16 * i)
    for start in range(0, size, LANES):
        mask = _score_beside(c + 16 * start, p, w, len(weights), threshold, out, buffer)
        if size - start < LANES:
            mask &= (np.uint64(1) << np.uint64(size - start)) - np.uint64(1)
        while mask:
            i = np.int64(lowest_bit(mask))
            mask &= mask - np.uint64(1)
            kept[count] = _entry(buffer[i], indices[start + i])
            count += 1
    for i in range(size, filled):
        indices[i - size] = indices[i]
    state[q, KEPT], state[q, STASHED] = count, filled - size
    return filled - size


@numba.njit
def _append_both(q, low, high, state, codes, planes, weights, short, work):
    """Score keys [low, high), at most CHUNK, by first words and in full; append those that reach both floors."""
    stay_a_function()
    early, first_words, first, _, _ = short
    tile, places, buffer, kept, histogram, top = work
    size, one, kept = high - low, np.int64(1), kept[q]
    count = _make_room(q, size, state, kept, top, histogram)
    keys, places_of_first = state[q, AT] + low * codes[0], np.full(q + 1, _address(first))
    _score(keys, (codes[0], np.int64(32), False), size, tile, early, first_words, q, one, places_of_first, buffer)
    _score(keys, codes, size, tile, weights, planes, q, one, places, buffer)
    for i in range(size):
        if first[i] >= state[q, FIRST_FLOOR] and buffer[q, i] >= state[q, FLOOR]:
            kept[count] = _entry(buffer[q, i], low + i)
            count += 1
    state[q, KEPT] = count


@numba.njit
def _guess(r, state, codes, planes, weights, tile, places, buffer, histogram, top, pages):
    """Return a score that somewhat more keys of row r reach than it wants, from a sample of runs of keys.

    0, which all keys reach, if a sample would not save time. The number of best keys in a sample is about Poisson
    distributed: three standard deviations are added.
    """
    stay_a_function()
    step, keys, low, k = codes[0], state[r, AT], state[r, FROM], state[r, WANTED]
    n = state[r, TO] - low
    runs = min(max(n // 4096, 8), 128)
    if n < 32 * RUN or 4 * k >= n or k == 0:
        return 0
    for run in range(runs if pages[0] == 0 else 0):
        for i in range(0, RUN, max(64 // max(abs(step), 1), 1)):
            prefetch(keys + (low + run * (n - RUN) // (runs - 1) + i) * step)
    shift = 0
    while top >> shift >= LEVEL:  # the finest bins that fit; coarse bins would let too many keys pass
        shift += 1
    histogram[: (top >> shift) + 1] = 0
    for run in range(runs):
        at, laid = low + run * (n - RUN) // (runs - 1), codes
        place = keys + at * step
        if pages[0]:
            place, laid = _lay_out(r, at, np.int64(RUN), state, codes, pages)
        _score(place, laid, np.int64(RUN), tile, weights, planes, r, np.int64(1), places, buffer)
        for i in range(RUN):
            histogram[buffer[r, i] >> shift] += 1
    expected = k * runs * RUN / n
    rank, bin = np.int64(expected + 3 * np.sqrt(expected) + 4), top >> shift
    while bin > 0 and histogram[bin] < rank:
        rank -= histogram[bin]
        bin -= 1
    return bin << shift


@numba.njit
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


@numba.njit
def _score_beside(keys, planes, weights, count, threshold, out, like):
    """Call `score_pairs` for contiguous keys."""
    part = 16 * QUARTER
    quarters = keys, keys + part, keys + 2 * part, keys + 3 * part
    return score_pairs(quarters[0], quarters[1], quarters[2], quarters[3], planes, weights, count, threshold, out, like)


@numba.njit
def _address(x):
    return np.int64(x.ctypes.data)  # numba frees x after its last use, so x must be used later than the address


@numba.njit
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


@numba.njit
def _append(s, floor, base, kept, count):
    """Append the scores that reach the floor, with indices counted from base; return the new number of entries."""
    stay_a_function()
    threshold = s.dtype.type(floor)
    whole = len(s) // LANES * LANES
    for group in range(0, whole, LANES):
        mask = at_least(s, group, threshold)
        if mask:
            count = _take(mask, s, group, base + group, kept, count)
    for i in range(whole, len(s)):
        if s[i] >= threshold:
            kept[count] = _entry(s[i], base + i)
            count += 1
    return count


@numba.njit
def _take(mask, s, first, base, kept, count):
    """Append the masked elements of s[first : first + LANES], with indices counted from base.

    MORE entries are written unconditionally, because a mispredicted branch takes longer.
    """
    end, place = count + np.int64(popcount(mask)), count
    for _ in range(MORE):
        i = np.int64(lowest_bit(mask | LAST))
        kept[place] = _entry(s[first + i], base + i)
        mask &= mask - np.uint64(1)
        place += 1
    while mask:
        i = np.int64(lowest_bit(mask))
        kept[place] = _entry(s[first + i], base + i)
        mask &= mask - np.uint64(1)
        place += 1
    return end


@numba.njit
def _entry(score, index):
    """Pack a score above its index, which has 48 bits."""
    return np.uint64(score) << np.uint64(48) | np.uint64(index)


@numba.njit
def _shrink(kept, count, k, floor, top, histogram):
    """Keep the best k of `count` entries, in order; return their lowest score.

    The scores are in floor..top, or one below the floor if kept by an earlier shrink.
    """
    stay_a_function()
    base = max(floor - 1, 0)
    steps, quota = _threshold(kept[:count], np.uint64(48), np.uint64(base), np.uint64(top - base), k, histogram)
    threshold = np.uint64(base) + steps
    taken = 0
    for i in range(count):
        entry = kept[i]
        score = entry >> np.uint64(48)
        equal = (score == threshold) & (quota > 0)
        kept[taken] = entry
        taken += (score > threshold) | equal
        quota -= equal
    return np.int64(threshold)


@numba.njit
def _threshold(s, drop, smallest, span, quota, histogram):
    """Find the quota-th best score s >> drop, all in smallest + [0, span]; return its distance from smallest, and how
    many scores equal to it are within the quota."""
    stay_a_function()
    if span < np.uint64(LEVEL):
        _count(s, drop, smallest, np.int64(span) + 1, histogram)
        return _walk(histogram, span, quota)
    shift, found = np.uint64(0), np.uint64(0)
    while span >> shift >= np.uint64(LEVEL):
        shift += np.uint64(8)
    while True:  # the score in question is smallest + found + [0, span]
        histogram[: (span >> shift) + np.uint64(1)] = 0
        for i in range(len(s)):
            distance = (np.uint64(s[i]) >> drop) - smallest - found
            if distance <= span:
                histogram[distance >> shift] += 1
        bin, quota = _walk(histogram, span >> shift, quota)
        found += bin << shift
        if shift == 0:
            return found, quota
        span = (np.uint64(1) << shift) - np.uint64(1)
        shift -= np.uint64(8)


@numba.njit
def _count(s, drop, smallest, bins, histogram):
    """Count scores in four histograms in turn: consecutive equal scores would otherwise stall on store forwarding."""
    histogram[: 4 * bins] = 0
    a, b, c, d = histogram[:bins], histogram[bins:], histogram[2 * bins :], histogram[3 * bins :]
    whole = len(s) // 4 * 4
    for i in range(0, whole, 4):
        a[(np.uint64(s[i]) >> drop) - smallest] += 1
        b[(np.uint64(s[i + 1]) >> drop) - smallest] += 1
        c[(np.uint64(s[i + 2]) >> drop) - smallest] += 1
        d[(np.uint64(s[i + 3]) >> drop) - smallest] += 1
    for i in range(whole, len(s)):
        a[(np.uint64(s[i]) >> drop) - smallest] += 1
    for i in range(bins):
        a[i] += b[i] + c[i] + d[i]


@numba.njit
def _walk(histogram, step, quota):
    """Walk down from bin `step` until `quota` scores are covered; return the bin and the quota left in it."""
    while histogram[step] < quota:
        quota -= histogram[step]
        step -= np.uint64(1)
    return step, quota


@numba.njit
def _compact(s, threshold, quota, indices, base):
    """Write in order the indices, counted from base, of scores above the threshold and of the first `quota` ties."""
    stay_a_function()
    taken = 0
    whole = len(s) // LANES * LANES
    for group in range(0, whole, LANES):
        mask = at_least(s, group, threshold)
        while mask:
            i = group + np.int64(lowest_bit(mask))
            mask &= mask - np.uint64(1)
            equal = s[i] == threshold
            if equal and quota == 0:
                continue
            quota -= equal
            indices[taken] = base + i
            taken += 1
    for i in range(whole, len(s)):
        equal = s[i] == threshold
        if s[i] > threshold or (equal and quota > 0):
            quota -= equal
            indices[taken] = base + i
            taken += 1


@numba.njit
def _write(kept, count, wanted, floor, best, top, histogram, scores, indices):
    """Write the best `wanted` of `count` entries, in their order or best first, and fill the remaining slots."""
    stay_a_function()
    if best and wanted > 0:
        _sort(kept[:count], wanted, max(floor - 1, 0), top, histogram, scores, indices)
    else:
        if count > wanted:
            _shrink(kept, count, wanted, floor, top, histogram)
        for i in range(wanted):
            scores[i], indices[i] = kept[i] >> np.uint64(48), kept[i] & INDEX
    scores[wanted:] = 0
    indices[wanted:] = -1


@numba.njit
def _sort(kept, wanted, base, top, histogram, scores, indices):
    """Write the best entries, with scores in base..top, highest score first and ties in their order.

    Every entry is written, because a mispredicted branch takes longer. Unwanted entries go to the last slot, which is
    rewritten at the end.
    """
    if top - base < LEVEL:
        _count(kept, np.uint64(48), np.uint64(base), top - base + 1, histogram)
    else:
        histogram[: top - base + 1] = 0
        for i in range(len(kept)):
            histogram[(kept[i] >> np.uint64(48)) - np.uint64(base)] += 1
    place, end, last = np.int64(0), wanted - 1, np.uint64(0)
    for step in range(top - base, -1, -1):  # counts to start positions
        histogram[step], place = place, place + histogram[step]
    for i in range(len(kept)):
        step = (kept[i] >> np.uint64(48)) - np.uint64(base)
        place = np.int64(histogram[step])
        histogram[step] += 1
        last = kept[i] if place == end else last
        place = min(place, end)
        scores[place], indices[place] = kept[i] >> np.uint64(48), kept[i] & INDEX
    scores[end], indices[end] = last >> np.uint64(48), last & INDEX
