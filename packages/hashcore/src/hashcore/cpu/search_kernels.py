"""The search kernels; hashcore.ops has checked their arguments. cpu/__init__.py explains how they work together."""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

import numpy as np
from numpy.typing import NDArray

from hashcore.cpu.collect_kernels import AT, FLOOR, FROM, KEPT, PAGES, TO, WANTED, _collect
from hashcore.cpu.intrinsics import memory, prefetch, stay_a_function
from hashcore.cpu.launch_plan import (
    BEST,
    CHUNK,
    HIGH,
    LOW,
    PAGE,
    PARTS,
    QUERY,
    ROOMY,
    ROWS,
    TABLE,
    TOP,
    WIDTH,
    K,
    N,
)
from hashcore.cpu.launch_plan import KEYS as KEYS_AT
from hashcore.cpu.paged_kernels import _collect_paged, _lay_out, _paged_address, _pages
from hashcore.cpu.parts import inner
from hashcore.cpu.score_kernels import _address, _copy_planes, _operands, _score
from hashcore.cpu.select_kernels import LEVEL, _entry, _write

RUN = 64  # consecutive keys of a sample


@inner
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
    for run in range(runs):
        at = low + run * (n - RUN) // (runs - 1)
        for i in range(at, at + RUN, max(64 // max(abs(step), 1), 1)):
            prefetch(_paged_address(r, i, state, step, pages) if pages[0] else keys + i * step)
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


@inner
def _misled(state, rows):
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
    Row r sees keys [low, high), with scores in 0..top. The best k of each part are written to int32 and int64
    [parts, rows, WIDTH] at the addresses scores and indices, in ascending index order or, if best, highest score
    first.
    """
    n, top, width = header[N], header[TOP], header[WIDTH]
    room, block, parts = header[ROOMY], header[ROWS], header[PARTS]
    best = header[BEST] and parts == 1  # several parts are merged before sorting
    weights, own, tile, codes = _operands(header, block)
    histogram = np.empty(max(top + 1, 4 * LEVEL), np.int32)
    buffer, places = np.empty((block, CHUNK), np.uint16), np.empty(block, np.int64)
    kept, state = np.empty((block, room), np.uint64), np.zeros((block, 7), np.int64)
    pages = _pages(header, table)
    work = tile, places, buffer, kept, histogram, top
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
            state[r, FLOOR] = _guess(r, state, codes, own, weights, tile, places, buffer, histogram, top, pages)
        ends = np.int64(0), count
        while ends[0] < ends[1]:
            if header[PAGE]:
                _collect_paged(ends[0], ends[1], a, b, state, codes, own, weights, pages, work)
            else:
                _collect(ends[0], ends[1], a, b, state, codes, own, weights, tile, places, buffer, kept, histogram, top)
            ends = _misled(state, count)
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
