"""Part of a search: `_collect` for the keys of a shortlist, and its floors (eq. 20)."""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import numpy as np

from hashcore.cpu.collect_kernels import AT, FIRST_FLOOR, FLOOR, FROM, KEPT, STASHED, TO, _collect, _make_room
from hashcore.cpu.intrinsics import LANES, copy_key, lowest_bit, popcount, stay_a_function
from hashcore.cpu.launch_plan import CHUNK, HIGH, LOW, SHORTLIST, STASH, K
from hashcore.cpu.parts import copy, hot, inner
from hashcore.cpu.score_kernels import _address, _score, _score_beside
from hashcore.cpu.score_vectors import score_first_words
from hashcore.cpu.select_kernels import LAST, _entry, _threshold

LOWER = np.uint64((1 << 32) - 1)
USUAL = 8  # unconditional writes to a shortlist per 64 keys
SAMPLE, EARLY = 1024, 4  # sampled keys, and planes, whose first words determine the shortlist's floor (eq. 20)


@inner
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


@inner
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
    copy(buffer[r, :SAMPLE], first)
    _score(keys, (step, codes[1], codes[2]), size, tile, weights, planes, r, one, places, buffer)
    for i in range(SAMPLE):  # only keys on the shortlist: the best of all keys may not be on it
        buffer[r, listed] = buffer[r, i]
        listed += first[i] >= floor
    expected = k * SAMPLE / n
    rank, state[r, FLOOR] = np.int64(expected + 3 * np.sqrt(expected) + 4), 0
    if rank <= listed:
        floor, _ = _threshold(buffer[r, :listed], np.uint64(0), np.uint64(0), np.uint64(top), rank, histogram)
        state[r, FLOOR] = np.int64(floor)


@inner
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


@hot
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


@hot
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


@inner
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
