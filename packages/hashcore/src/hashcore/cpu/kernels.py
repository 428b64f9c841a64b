"""The numba kernels. They check nothing: hashcore.ops has. cpu/__init__.py says how they work together.

All of them are in one file because numba's cache looks at the age of the file of a kernel, not of those it calls.
Arrays are sliced first and indexed from 0: with a base added to the index LLVM emits gathers, 3-11 times slower.
"""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false

import numba
import numpy as np

from hashcore.cpu.intrinsics import LANES, at_least, lowest_bit, memory, popcount

CHUNK = 4096  # keys scored at once: 64 KiB of 128-bit keys stay in L2 while the rows of a block pass over them
BLOCK = 8  # rows of scores that share a chunk
LEVEL = 1 << 12  # wider score ranges are counted in two levels, the first of them by 256 scores
RUN = 64  # neighbouring keys of a sample


def score_tasks(first, last, query, query_of, weights, keys, step, words, n, out, like):
    """Score tasks [first, last), each BLOCK rows x CHUNK keys, to rows of int32 at addresses out."""
    size_of_word = query.itemsize
    rows = len(keys)
    chunks = (n + CHUNK - 1) // CHUNK
    columns = np.empty((words, CHUNK), query.dtype)
    for task in range(first, last):
        low = task % chunks * CHUNK
        size = min(CHUNK, n - low)
        loaded = 0
        for row in range(task // chunks * BLOCK, min(task // chunks * BLOCK + BLOCK, rows)):
            place = keys[row] + low * step * size_of_word
            if loaded != place:
                loaded = place
                _load(place, step, words, size, columns)
            o = memory(out[row] + 4 * low, size, like)
            _score(place, step, words, columns, 0, query[query_of[row]], weights, o)
    return 0


def topk_tasks(first, last, scores, k, low, high, values, indices):
    """Select from rows [first, last) at addresses scores; return a row whose scores lie too far apart, or -1."""
    histogram = np.empty(LEVEL, np.int32)
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
        if span >= np.uint64(1 << 16):
            return row
        wanted = min(k[row], len(s))
        if wanted == 0:
            continue
        step, quota = _threshold(s, np.uint64(smallest), np.int64(span), wanted, histogram)  # (2), (3)
        _compact(s, s.dtype.type(np.uint64(smallest) + step), quota, indices[row], low[row])
        for i in range(wanted):
            values[row, i] = s[indices[row, i] - low[row]]
    return -1


def search_tasks(
    first, last, query, query_of, weights, keys, step, words, n, k, low, high, block, parts, best, scores, indices,
):  # fmt: skip
    """Select from tasks [first, last), each a block of rows x a part of the keys.

    Row r sees keys [low[r], high[r]). The best k[r] of each part go to scores and indices [parts, rows, K], in
    ascending index order or, if best, highest score first.
    """
    size_of_word = query.itemsize
    top = np.int64(8 * size_of_word * words) * np.int64(weights.sum())
    histogram = np.empty(max(top + 1, LEVEL), np.int32)
    columns = np.empty((words, CHUNK), query.dtype)
    buffer = np.empty(CHUNK, np.uint16)
    room = min(2 * k.max(), n) + CHUNK
    kept_scores, kept_indices = np.empty((block, room), np.uint16), np.empty((block, room), np.int64)
    floor, kept, active = np.empty(block, np.int64), np.empty(block, np.int64), np.empty(block, np.bool_)
    for task in range(first, last):
        a, b = n * (task % parts) // parts, n * (task % parts + 1) // parts
        row0 = task // parts * block
        rows = min(block, len(keys) - row0)
        for r in range(rows):
            row = row0 + r
            at, end, planes = max(a, low[row]), min(b, high[row]), query[query_of[row]]
            kept[r], active[r] = 0, k[row] > 0
            floor[r] = _guess(keys[row], step, words, at, end, k[row], planes, weights, columns, buffer, histogram, top)
        while active[:rows].any():
            for low_key in range(a, b, CHUNK):
                size, loaded = min(CHUNK, b - low_key), 0
                for r in range(rows):
                    row = row0 + r
                    at, end = max(low_key, low[row]), min(low_key + size, high[row])
                    if at >= end or not active[r]:
                        continue
                    place = keys[row] + low_key * step * size_of_word
                    if loaded != place:
                        loaded = place
                        _load(place, step, words, size, columns)
                    o, planes = buffer[: end - at], query[query_of[row]]
                    _score(place, step, words, columns, at - low_key, planes, weights, o)
                    if kept[r] + len(o) > room:
                        lowest = _shrink(kept_scores[r, : kept[r]], kept_indices[r], k[row], floor[r], top, histogram)
                        floor[r], kept[r] = lowest + 1, k[row]  # later equals lose the tie
                    kept[r] = _append(o, floor[r], at, kept_scores[r], kept_indices[r], kept[r])
            for r in range(rows):
                row = row0 + r
                wanted = min(k[row], max(0, min(b, high[row]) - max(a, low[row])))
                active[r] = active[r] and kept[r] < wanted
                if active[r]:  # the sample misled: again, without a floor
                    floor[r], kept[r] = 0, 0
                elif kept[r] > wanted:
                    _shrink(kept_scores[r, : kept[r]], kept_indices[r], wanted, floor[r], top, histogram)
                    kept[r] = wanted
        for r in range(rows):
            row = row0 + r
            s, i = kept_scores[r, : kept[r]], kept_indices[r, : kept[r]]
            _write(s, i, best, top, histogram, scores[task % parts, row], indices[task % parts, row])
    return 0


def merge_tasks(first, last, part_scores, part_indices, k, top, best, scores, indices):
    """Select, for rows [first, last), the best k[row] of what search_tasks found in every part."""
    parts, _, width = part_scores.shape
    histogram = np.empty(max(top + 1, LEVEL), np.int32)
    kept_scores, kept_indices = np.empty(parts * width, np.int32), np.empty(parts * width, np.int64)
    for row in range(first, last):
        kept = 0
        for part in range(parts):
            for i in range(min(k[row], width)):
                if part_indices[part, row, i] < 0:
                    break
                kept_scores[kept], kept_indices[kept] = part_scores[part, row, i], part_indices[part, row, i]
                kept += 1
        if kept > k[row]:
            _shrink(kept_scores[:kept], kept_indices, k[row], 0, top, histogram)
            kept = k[row]
        _write(kept_scores[:kept], kept_indices[:kept], best, top, histogram, scores[row], indices[row])
    return 0


@numba.njit
def _load(place, step, words, size, columns):
    """Copy the codes at an address into columns, one word of each a row, unless _score reads them where they lie."""
    if step == words and words <= 2:
        return
    for i in range(size):
        code = memory(place + i * step * columns.itemsize, words, columns)
        for v in range(words):
            columns[v, i] = code[v]


@numba.njit
def _score(place, step, words, columns, skip, planes, weights, out):
    """Write the scores of the loaded codes from the one at skip on."""
    if step == words and words <= 2:
        x = memory(place + skip * words * columns.itemsize, len(out) * words, columns)
        if words == 2:
            _score_pairs(x, planes, weights, out)
        else:
            _score_column(x, planes[:, 0], weights, out, False)
    else:
        for v in range(words):
            _score_column(columns[v, skip : skip + len(out)], planes[:, v], weights, out, v > 0)


@numba.njit
def _score_pairs(x, planes, weights, out):
    """Write the scores of codes of two words, which lie in turn in x: three planes a pass over x, then one."""
    kind = out.dtype.type
    p = 0
    while p + 3 <= len(weights):
        a0, b0, w0 = ~planes[p, 0], ~planes[p, 1], np.uint64(weights[p])
        a1, b1, w1 = ~planes[p + 1, 0], ~planes[p + 1, 1], np.uint64(weights[p + 1])
        a2, b2, w2 = ~planes[p + 2, 0], ~planes[p + 2, 1], np.uint64(weights[p + 2])
        for i in range(len(out)):
            a, b = x[2 * i], x[2 * i + 1]
            total = w0 * (popcount(a ^ a0) + popcount(b ^ b0))
            total += w1 * (popcount(a ^ a1) + popcount(b ^ b1))
            total += w2 * (popcount(a ^ a2) + popcount(b ^ b2))
            out[i] = kind(total) + (out[i] if p else kind(0))
        p += 3
    while p < len(weights):
        a0, b0, w0 = ~planes[p, 0], ~planes[p, 1], np.uint64(weights[p])
        for i in range(len(out)):
            total = w0 * (popcount(x[2 * i] ^ a0) + popcount(x[2 * i + 1] ^ b0))
            out[i] = kind(total) + (out[i] if p else kind(0))
        p += 1


@numba.njit
def _score_column(x, plane, weights, out, add):
    """Write, or add to out, the scores of one word of every code: three planes a pass over x, then one."""
    kind = out.dtype.type
    p = 0
    while p + 3 <= len(weights):
        a0, w0 = ~plane[p], np.uint64(weights[p])
        a1, w1 = ~plane[p + 1], np.uint64(weights[p + 1])
        a2, w2 = ~plane[p + 2], np.uint64(weights[p + 2])
        for i in range(len(out)):
            total = w0 * popcount(x[i] ^ a0) + w1 * popcount(x[i] ^ a1) + w2 * popcount(x[i] ^ a2)
            out[i] = kind(total) + (out[i] if add else kind(0))
        add = True
        p += 3
    while p < len(weights):
        a0, w0 = ~plane[p], np.uint64(weights[p])
        for i in range(len(out)):
            out[i] = kind(w0 * popcount(x[i] ^ a0)) + (out[i] if add else kind(0))
        add = True
        p += 1


@numba.njit
def _guess(keys, step, words, low, high, k, planes, weights, columns, buffer, histogram, top):
    """Return a score that about k of the codes [low, high) reach, rather more than fewer, from runs spread over them.

    0, which all of them reach, where a sample would not pay.
    """
    n = high - low
    runs = max(n // 4096, 8)
    if n < 32 * RUN or 4 * k >= n or k == 0:
        return 0
    shift = 0 if top < LEVEL else 8
    histogram[: (top >> shift) + 1] = 0
    for run in range(runs):
        place = keys + (low + run * (n - RUN) // (runs - 1)) * step * columns.itemsize
        _load(place, step, words, RUN, columns)
        o = buffer[:RUN]
        _score(place, step, words, columns, 0, planes, weights, o)
        for i in range(RUN):
            histogram[o[i] >> shift] += 1
    expected = k * runs * RUN / n
    rank = np.int64(expected + 4 * np.sqrt(expected) + 8)
    step_down = top >> shift
    while step_down > 0 and histogram[step_down] < rank:
        rank -= histogram[step_down]
        step_down -= 1
    return step_down << shift


@numba.njit
def _append(s, floor, base, scores, indices, kept):
    """Append the scores that reach the floor and their indices, counted from base; return how many are kept now."""
    if floor >> 16:
        return kept  # above every 16-bit score
    threshold = s.dtype.type(floor)
    whole = len(s) // LANES * LANES
    for group in range(0, whole, LANES):
        mask = at_least(s, group, threshold)
        while mask:
            i = group + np.int64(lowest_bit(mask))
            mask &= mask - np.uint64(1)
            scores[kept], indices[kept] = s[i], base + i
            kept += 1
    for i in range(whole, len(s)):
        if s[i] >= threshold:
            scores[kept], indices[kept] = s[i], base + i
            kept += 1
    return kept


@numba.njit
def _shrink(scores, indices, k, floor, top, histogram):
    """Keep the best k of scores and their indices, in order; return the lowest of them.

    The scores lie between floor and top, or one below the floor where an earlier shrink left them.
    """
    base = max(floor - 1, 0)
    steps, quota = _threshold(scores, np.uint64(base), np.int64(top - base), k, histogram)
    threshold = scores.dtype.type(np.uint64(base) + steps)
    taken = 0
    for i in range(len(scores)):
        score, index = scores[i], indices[i]
        equal = (score == threshold) & (quota > 0)
        scores[taken], indices[taken] = score, index
        taken += (score > threshold) | equal
        quota -= equal
        if taken == k:
            break
    return np.int64(threshold)


@numba.njit
def _threshold(s, smallest, span, quota, histogram):
    """Find the quota-th best of s, scores in smallest + [0, span]: its distance from smallest, and its own quota."""
    shift = np.uint64(0) if span < LEVEL else np.uint64(8)
    histogram[: (np.uint64(span) >> shift) + np.uint64(1)] = 0
    for i in range(len(s)):
        histogram[(np.uint64(s[i]) - smallest) >> shift] += 1
    step, quota = _walk(histogram, np.uint64(span) >> shift, quota)
    if shift == np.uint64(0):
        return step, quota
    histogram[:256] = 0
    for i in range(len(s)):
        distance = np.uint64(s[i]) - smallest
        if distance >> shift == step:
            histogram[distance & np.uint64(255)] += 1
    fine, quota = _walk(histogram, np.uint64(255), quota)
    return step << shift | fine, quota


@numba.njit
def _walk(histogram, step, quota):
    """Walk down from bin step until quota scores are covered: the bin reached, and what is left of the quota in it."""
    while histogram[step] < quota:
        quota -= histogram[step]
        step -= np.uint64(1)
    return step, quota


@numba.njit
def _compact(s, threshold, quota, indices, base):
    """Write, in order, the indices from base of all scores above the threshold and of the first quota equal to it."""
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
def _write(scores, indices, best, top, histogram, out_scores, out_indices):
    """Write a selection, in the order it has or best first, and fill the slots it leaves."""
    if best:
        counts = histogram[: top + 1]
        counts[:] = 0
        for i in range(len(scores)):
            counts[scores[i]] += 1
        place = 0
        for score in range(top, -1, -1):
            counts[score], place = place, place + counts[score]
    for i in range(len(scores)):
        place = i
        if best:
            place = counts[scores[i]]
            counts[scores[i]] += 1
        out_scores[place], out_indices[place] = scores[i], indices[i]
    out_scores[len(scores) :] = 0
    out_indices[len(scores) :] = -1
