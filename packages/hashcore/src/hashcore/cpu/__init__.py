"""Scores (eq. 2, eq. 4), selection (eq. 6) and their fusion on the CPU, in numba.

Score. A task is BLOCK query rows x CHUNK keys, which stay in L1 while all rows of the block are scored against them.
Codes of 128 contiguous bits (two 64-bit words) are read in place, 64 keys at a time: the matches of a word fit a byte,
so eight vectors of counts merge into one (score_128_bits). Other codes are transposed by masked loads, 8 keys x 4 words
at a time, into a tile in L1 with one column per word and 32 keys, which costs 0.2 ns per key and word. Nothing outside
the codes is read. The limit is the bandwidth of reading the codes, or of writing the scores.

Selection, per row: (1) smallest and largest score, (2) histogram, in several levels if the scores span more than LEVEL,
(3) threshold: walk the bins from the top until k are covered, (4) ordered compaction: 64 scores become a 64-bit mask of
those at or above the threshold, whose set bits are taken in order; ties only until their quota is used up.

Search. Scores of 128-bit codes are compared with a floor in registers; other scores go to 16 bits in L1 and no further.
Most are never counted, because counting a score takes longer (0.42 ns) than computing it. Per row and part of the keys:
(1) score one key in 64, at most 8,192, in runs spread over all keys, and guess a floor that somewhat more than k keys
reach; (2) score every chunk and keep entries that reach the floor; (3) when 2k are kept, shrink to the best k by
histogram and raise the floor above the lowest of them; (4) shrink or sort once more at the end. If fewer than k are
kept, the guess was too high: then (2) again without a floor. Entries are kept in index order, so ties go to the lowest
index, and the guess affects the time but not the result. With few rows and several threads, the keys are split into
parts and the parts' selections are merged.

Keys in pages are read in place, by quarters of 64 keys, if a page has 128-bit codes contiguously. Other keys, and those
before the first and after the last 64 of a row, are copied to L1 first.

Calls. Everything that follows from shapes and integers is computed once (launch_plan) and cached: with cold CPU caches,
this Python code would take as long as the kernel.
"""

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, validation
from hashcore.cpu import launch_plan, score_kernels, search_kernels, select_kernels, threads
from hashcore.cpu.launch_plan import Plan
from hashcore.validation import Comparison, RowLimits

Codes = NDArray[np.int32]
Pair = tuple[NDArray[Any], NDArray[Any]]
"""Scores and indices."""
MOST_ROWS = 1024  # of a cached plan: 56 KiB


@functools.lru_cache(256)
def plan(make: Any, *given: Any) -> Plan:
    """Return the plan that `make` makes, cached."""
    return make(*given)


def _planned(make: Any, compared: Comparison, *given: Any) -> Plan:
    """Return a plan, cached if it is not too large, for as many threads as there are at most."""
    own = plan if math.prod(compared.lead) <= MOST_ROWS else plan.__wrapped__
    return own(make, compared, *given, threads.most())


def row_bounds(rows: RowLimits, n: int) -> tuple[Any, Any, Any]:
    """Return k, and start and end of the eligible positions: int64 [rows], or an int for all rows.

    Raises: ValueError if a row's start is behind its end.
    """
    k = rows.width if rows.k is None else rows.k
    if rows.lengths is rows.starts is None:  # numpy is ten times slower for single numbers
        low = min(rows.start + rows.sink, n)
        return k, low, max(rows.length - rows.recent, low)  # empty if they cross
    starts, lengths = rows.start if rows.starts is None else rows.starts, rows.lengths
    start, end = np.broadcast_arrays(starts, rows.length if lengths is None else lengths)
    if (start > end).any():
        at = int(np.argmax(start > end))
        validation.ordered(start[at], end[at], at)
    low = np.minimum(start + rows.sink, n)
    return k, low, np.maximum(end - rows.recent, low)


def score(query: Codes, keys: Codes, weights: Any, compared: Comparison) -> Codes:
    """Score codes that `compared` describes: ops.score."""
    made = _planned(launch_plan.score, compared)
    found = np.empty(made.shape, np.int32)
    if all(made.shape):
        passed = made.header, made.rows, *map(arguments.address, (query, keys, found))
        threads.run(score_kernels.score_tasks, made.tasks, made.workers, passed)
    return found


def topk(scores: NDArray[Any], *wanted: Any, compared: None = None) -> Pair:
    """Select from integers [..., N] what validation.RowLimits says: ops.topk."""
    rows = RowLimits(*wanted)
    values = np.zeros((*scores.shape[:-1], rows.width), scores.dtype.newbyteorder("="))
    indices = np.full(values.shape, -1, np.int64)
    if scores.size:
        beside = scores.strides[-1] == scores.itemsize or scores.shape[-1] == 1
        if not (beside and scores.flags.aligned and scores.dtype.isnative):
            scores = arguments.dense(scores)
        at = arguments.offsets(scores.shape[:-1], scores.strides[:-1], scores.shape[:-1]) + arguments.address(scores)
        bounds = (np.broadcast_to(x, at.shape).copy() for x in row_bounds(rows, scores.shape[-1]))
        passed = at, *bounds, *(x.reshape(len(at), rows.width) for x in (values, indices))
        threads.run(select_kernels.topk_tasks, len(at), threads.count(4 * scores.size), passed)
    return values, indices


def search(
    query: Codes,
    keys: Codes,
    weights: Any,
    best: bool,
    blocks: Any,
    *limits: Any,
    compared: Comparison,
    allowed: NDArray[np.int64] | None = None,
) -> Pair:
    """Search codes that `compared` describes, with the arguments of the operator: ops.search.

    allowed: without blocks, a bitmap of the keys that may be found by all rows (search_kernels.search_tasks).

    With cold CPU caches, each Python operation takes microseconds, as long as scoring a thousand keys. So little is
    done for integers that are the same for all rows.
    """
    rows = RowLimits(*limits)
    wanted = row_bounds(rows, compared.shape[-1])
    if rows.k is rows.lengths is rows.starts is None:
        made = _planned(launch_plan.search, compared, rows.width, wanted, best)
    else:
        made = _planned(launch_plan.search, compared, rows.width, (0, 0, 0), best)
        made = made._replace(rows=launch_plan.filled(made.rows, wanted))
    if blocks is not None:
        made = _paged(made, keys, blocks)
    elif allowed is not None:
        made = made._replace(table=allowed)
    found = np.empty(made.shape, np.int32), np.empty(made.shape, np.int64)
    if all(made.shape):
        _run(made, arguments.address(query), arguments.address(keys), *found)
    return found


def _run(made: Plan, query: int, keys: int, scores: NDArray[np.int32], indices: NDArray[np.int64]) -> None:
    """Run a search into contiguous results; if the keys have several parts, search these and merge what they select."""
    parts = scores, indices
    shape = made.parts, scores.size // scores.shape[-1], scores.shape[-1]
    if made.parts > 1:
        parts = np.empty(shape, np.int32), np.empty(shape, np.int64)
    passed = made.header, made.rows, made.table, query, keys, *map(arguments.address, parts)
    threads.run(search_kernels.search_tasks, made.tasks, made.workers, passed)
    if made.parts > 1:
        top, best = made.header[[launch_plan.TOP, launch_plan.BEST]].tolist()
        k = np.ascontiguousarray(made.rows[:, launch_plan.K])
        whole = (x.reshape(shape[1:]) for x in (scores, indices))
        threads.run(search_kernels.merge_tasks, shape[1], 1, (*parts, k, top, best, *whole))


def _paged(made: Plan, pool: NDArray[Any], blocks: NDArray[Any]) -> Plan:
    """Return a search plan whose rows have their bounds, with the page table of each row.

    Raises: ValueError if a row sees a page out of range; other entries of the table may be anything.
    """
    lead, own, (pages, size) = made.shape[:-1], blocks.shape[:-1], pool.shape[-3:-1]
    numbers = np.broadcast_to(np.arange(math.prod(own)).reshape(own), lead).ravel()  # of each row's table
    header, rows = made.header.copy(), made.rows.copy()
    header[launch_plan.PAGE] = size
    rows[:, launch_plan.TABLE] = numbers * blocks.shape[-1]
    if len(numbers) and blocks.size and not (blocks.min() >= 0 and blocks.max() < pages):
        low, high = rows[:, launch_plan.LOW, None], rows[:, launch_plan.HIGH, None]
        first, of_rows = np.arange(blocks.shape[-1]) * size, blocks.reshape(-1, blocks.shape[-1])[numbers]
        wrong = (first + size > low) & (first < high) & (low < high) & ((of_rows < 0) | (of_rows >= pages))
        if wrong.any():
            raise ValueError(
                f"blocks of positions that a row sees must be pages in 0..{pages - 1}, got "
                f"{int(of_rows[wrong][0])}; shorten lengths or fill the table"
            )
    return made._replace(header=header, rows=rows, table=np.multiply(blocks, pool.strides[-3], dtype=np.int64).ravel())
