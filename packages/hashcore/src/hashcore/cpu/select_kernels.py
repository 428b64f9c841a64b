"""Kernels that select the best scores (eq. 6); hashcore.ops has checked their arguments. See cpu/__init__.py."""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore.cpu.intrinsics import LANES, at_least, lowest_bit, memory, popcount, stay_a_function
from hashcore.cpu.launch_plan import MORE
from hashcore.cpu.parts import hot, inner

LEVEL = 1 << 12  # wider score ranges are counted in two levels, the first with bins of 256 scores
LAST, INDEX, ALL = np.uint64(1 << 63), np.uint64((1 << 48) - 1), np.uint64((1 << 64) - 1)


def mark(ids, first, span, bits):
    """Set the bits id - first of a bitmap of span bits, which has a word more; return whether all are in its range."""
    one, six, low = np.uint64(1), np.uint64(6), np.uint64(63)
    last = np.uint64(len(bits) - 1)
    for start in range(0, len(ids), 32):
        end = min(start + 32, len(ids))
        if end - start == 32:  # ids in order often fit 128 bits; vector instructions take half the time
            own, base = ids[start:end], (ids[start] - first) & ~np.int64(63)
            head, tail, largest = np.uint64(0), np.uint64(0), np.uint64(0)
            for n in range(32):
                at = np.uint64(own[n] - first - base)
                largest |= at
                head |= one << at if at < np.uint64(64) else np.uint64(0)
                behind = at ^ np.uint64(64)
                tail |= one << behind if behind < np.uint64(64) else np.uint64(0)
            if largest < np.uint64(128) and np.uint64(base) >> six < last:
                bits[np.uint64(base) >> six] |= head
                bits[(np.uint64(base) >> six) + one] |= tail
                continue
        for n in range(start, end):
            at = np.uint64(ids[n] - first)
            if at >> six >= last:
                return False
            bits[at >> six] |= one << (at & low)
    return bits[last] == 0 and bits[last - one] >> (np.uint64(span) & low) == 0


@inner
def _chosen(allowed, i):
    """Return the bits of keys [i, i + 64) in a bitmap of the keys that may be found, or all if it is empty."""
    if len(allowed) == 0:
        return ALL
    word, shift = i >> 6, np.uint64(i & 63)
    return np.uint64(allowed[word]) >> shift | np.uint64(allowed[word + 1]) << np.uint64(1) << (np.uint64(63) - shift)


@inner
def _count_chosen(allowed, low, high):
    """Return how many of the keys [low, high) may be found."""
    if len(allowed) == 0:
        return max(high - low, 0)
    count = np.int64(0)
    for i in range(low, high, 64):
        bits = _chosen(allowed, i)
        if high - i < 64:
            bits &= (np.uint64(1) << np.uint64(high - i)) - np.uint64(1)
        count += np.int64(popcount(bits))
    return count


@hot
def _append(s, floor, base, kept, count, allowed):
    """Append the scores that reach the floor, with indices counted from base, of keys that may be found; return the
    new number of entries."""
    stay_a_function()
    threshold = s.dtype.type(floor)
    whole = len(s) // LANES * LANES
    for group in range(0, whole, LANES):
        mask = at_least(s, group, threshold)
        if mask:
            mask &= _chosen(allowed, base + group)
            count = _take(mask, s, group, base + group, kept, count)
    for i in range(whole, len(s)):
        if s[i] >= threshold and _chosen(allowed, base + i) & np.uint64(1):
            kept[count] = _entry(s[i], base + i)
            count += 1
    return count


@hot
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


@inner
def _entry(score, index):
    """Pack a score above its index, which has 48 bits."""
    return np.uint64(score) << np.uint64(48) | np.uint64(index)


@hot
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


@hot
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


@inner
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


@inner
def _walk(histogram, step, quota):
    """Walk down from bin `step` until `quota` scores are covered; return the bin and the quota left in it."""
    while histogram[step] < quota:
        quota -= histogram[step]
        step -= np.uint64(1)
    return step, quota


@inner
def choose(s, smallest, span, wanted, histogram, indices, base):
    """Write in order the indices, counted from base, of the `wanted` best of scores smallest + [0, span]; of equals the
    first. histogram: space for 4 LEVEL counts."""
    step, quota = _threshold(s, np.uint64(0), np.uint64(smallest), span, wanted, histogram)
    _compact(s, s.dtype.type(np.uint64(smallest) + step), quota, indices, base)


@inner
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


@hot
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


@inner
def _sort(kept, wanted, base, top, histogram, scores, indices):
    """Write the best entries, with scores in base..top, highest score first and ties in their order.

    Every entry is written, because a mispredicted branch takes longer. Unwanted entries go to the last slot, which is
    rewritten at the end.
    """
    bins = top - base + 1
    histogram[:bins] = 0
    for i in range(len(kept)):
        histogram[(kept[i] >> np.uint64(48)) - np.uint64(base)] += 1
    place, end, last = np.int64(0), wanted - 1, np.uint64(0)
    for step in range(bins - 1, -1, -1):  # counts to start positions
        histogram[step], place = place, place + histogram[step]
    for i in range(len(kept)):
        step = (kept[i] >> np.uint64(48)) - np.uint64(base)
        place = np.int64(histogram[step])
        histogram[step] += 1
        last = kept[i] if place == end else last
        place = min(place, end)
        scores[place], indices[place] = kept[i] >> np.uint64(48), kept[i] & INDEX
    scores[end], indices[end] = last >> np.uint64(48), last & INDEX


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
        choose(s, smallest, span, wanted, histogram, indices[row], low[row])  # (2), (3)
        for i in range(wanted):
            values[row, i] = s[indices[row, i] - low[row]]
    return 0
