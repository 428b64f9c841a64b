"""Scores (eq. 2, eq. 4), selection (eq. 6) and their fusion on the CPU, in numba.

Score. A task is BLOCK query rows x CHUNK keys, which stay in L1 while all rows of the block are scored against them.
Codes of 128 contiguous bits (two 64-bit words) are read in place, 64 keys at a time: the matches of a word fit a byte,
so eight vectors of counts merge into one (score_pairs). Other codes are transposed by masked loads, 8 keys x 4 words at
a time, into a tile in L1 with one column per word and 32 keys, which costs 0.2 ns per key and word. Nothing outside the
codes is read. The limit is the bandwidth of reading the codes, or of writing the scores.

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

Calls. Everything that follows from shapes and integers is computed once (launch_plan) and cached (kept): with cold
CPU caches, this Python code would take as long as the kernel.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, validation
from hashcore.arguments import Layout
from hashcore.cpu import launch_plan, score_kernels, search_kernels, select_kernels, threads
from hashcore.cpu.launch_plan import Plan
from hashcore.validation import Comparison, RowBounds

Rows = tuple[Any, Any, Any, Any, Any]
"""k, lengths, starts, sink and recent, as they were given; the first three may be arrays."""
Pair = tuple[NDArray[Any], NDArray[Any]]
"""Scores and indices."""
PLANS, ROWS = 256, 1024  # number of cached plans of each kind, and maximal number of rows of a cached plan: 48 KiB

Arguments = ParamSpec("Arguments")


def kept(make: Callable[Arguments, Plan]) -> Callable[Arguments, Plan]:
    """Cache the last plans of a function by its positional arguments, which must be hashable.

    Without a lock, which a fork could copy locked: each step with the dict is one that threads take in turn.
    """
    plans: dict[Any, Plan] = {}

    @functools.wraps(make)
    def get(*given: Arguments.args, **options: Arguments.kwargs) -> Plan:
        found = plans.get(given)
        if found is None:
            found = make(*given, **options)
            if len(found.rows) <= ROWS:
                plans[given] = found
                for oldest in list(plans)[:-PLANS]:
                    plans.pop(oldest, None)
        return found

    return get


@functools.lru_cache(PLANS)
def comparison(query: Layout, keys: Layout, weights: tuple[int, ...] | None) -> Comparison:
    """Check the arguments of a score (validation.comparison), cached."""
    return validation.comparison(query, keys, weights)


@kept
def plan_score(query: Layout, keys: Layout, weights: tuple[int, ...] | None, most: int) -> Plan:
    """Check and plan ops.score on `most` threads."""
    return launch_plan.score(comparison(query, keys, weights), most)


@kept
def plan_search(
    query: Any, keys: Any, weights: tuple[int, ...] | None, rows: Rows | int, best: bool, most: int
) -> Plan:
    """Check and plan ops.search.

    Args:
        query, keys: Layouts, or equal plain tuples, which are faster to create.
        rows: integers for all rows; or the largest k, for rows that differ, which `launch_plan.filled` adds.
    """
    compared = comparison(Layout(*query), Layout(*keys), weights)
    validation.score_bits(compared.weights, query[1][-1])
    if isinstance(rows, int):
        return launch_plan.search(compared, rows, best, most)
    wanted = validation.row_bounds((*compared.lead, keys[1][-2]), *rows)
    return launch_plan.filled(launch_plan.search(compared, wanted.width, best, most), wanted)


def score(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    weights: tuple[int, ...] | None,
    out: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Score arrays in any layout: ops.score."""
    query, keys = arguments.aligned(query), arguments.readable(keys)
    layouts = [Layout(x.dtype, x.shape, x.strides) for x in (query, keys)]
    made = plan_score(layouts[0], layouts[1], weights, threads.most())
    if out is not None:
        validation.output("out", out, made.shape, [np.int32], [query, keys])
    found = out if out is not None and out.flags.c_contiguous and arguments.are_plain(out) else None
    if found is None:
        found = np.empty(made.shape, np.int32)
    if all(made.shape):
        passed = made.header, made.rows, *map(arguments.address, (query, keys, found))
        threads.run(score_kernels.score_tasks, made.tasks, made.workers, passed)
    if out is None or found is out:
        return found
    out[...] = found
    return out


def topk(scores: NDArray[Any], rows: Rows, out: Pair | None = None) -> Pair:
    """Select from integers [..., N]: ops.topk."""
    wanted = validation.row_bounds(scores.shape, *rows)
    if out is None:
        return _topk(scores, wanted)
    shape, native = (*scores.shape[:-1], wanted.width), scores.dtype.newbyteorder("=")
    validation.outputs(*out, shape, native, scores.shape[-1], [scores, *rows[:3]])
    out[0][...], out[1][...] = _topk(scores, wanted)
    return out


def _topk(scores: NDArray[Any], wanted: RowBounds) -> Pair:
    values = np.zeros((*scores.shape[:-1], wanted.width), scores.dtype.newbyteorder("="))
    indices = np.full(values.shape, -1, np.int64)
    if scores.size == 0:
        return values, indices
    if not arguments.are_plain(scores):
        scores = arguments.dense(scores)
    addresses = arguments.offsets(scores.shape[:-1], scores.strides[:-1], scores.shape[:-1]) + arguments.address(scores)
    count = len(addresses)
    bounds = (x if isinstance(x, np.ndarray) else np.full(count, x) for x in wanted[:3])
    passed = addresses, *bounds, *(x.reshape(count, wanted.width) for x in (values, indices))
    threads.run(select_kernels.topk_tasks, count, threads.count(4 * scores.size), passed)
    return values, indices


def search(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    weights: tuple[int, ...] | None,
    rows: Rows,
    best: bool,
    blocks: Any = None,
    out: Pair | None = None,
    only: NDArray[np.int64] | None = None,
) -> Pair:
    """Search arrays in any layout, rows that differ, and pages: ops.search.

    only: without blocks, a bitmap of the keys that may be found by all rows (search_kernels.search_tasks).

    With cold CPU caches, each Python operation takes microseconds, as long as scoring a thousand keys. So little is
    done for integers that are the same for all rows.
    """
    query = arguments.aligned(query)
    if blocks is None:
        keys = arguments.readable(keys)
        against = keys.dtype, keys.shape, keys.strides
    else:
        against = _laid(keys, blocks)
    layouts = (query.dtype, query.shape, query.strides), against
    if any(arguments.is_array(x) for x in rows[:3] if type(x) is not int and x is not None):
        compared = comparison(*(Layout(*x) for x in layouts), weights)
        wanted = validation.row_bounds((*compared.lead, against[1][-2]), *rows)
        made = launch_plan.filled(plan_search(*layouts, weights, wanted.width, best, threads.most()), wanted)
    else:
        named = zip(("k", "lengths", "starts", "sink", "recent"), rows, strict=True)
        alike: Any = tuple(x if x is None else arguments.integer(name, x) for name, x in named)
        made = plan_search(*layouts, weights, alike, best, threads.most())
    if blocks is not None:
        made = _paged(made, keys, blocks)
    elif only is not None:
        made = made._replace(table=only)
    if out is not None:
        validation.outputs(*out, made.shape, np.int32, against[1][-2], [query, keys, blocks, *rows[:3]])
    if out is not None and out[1].dtype == np.int64 and all(x.flags.carray for x in out):
        found = out
    else:
        found = np.empty(made.shape, np.int32), np.empty(made.shape, np.int64)
    if all(made.shape):
        _run(made, arguments.address(query), arguments.address(keys), *found)
    if out is not None and found is not out:
        out[0][...], out[1][...] = found
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


def _laid(pool: NDArray[Any], blocks: Any) -> Layout:
    """Check keys in pages, and return the layout of a row's keys, to which the kernel adds each block's offset."""
    laid = validation.paged(Layout(pool.dtype, pool.shape, pool.strides), blocks)
    if not (pool.flags.aligned and (pool.strides[-1] == 4 or pool.shape[-1] == 1)):
        raise ValueError(
            f"the words of a key in pages must be contiguous and aligned, got strides {list(pool.strides)}; "
            "copy the pages to such a layout"
        )
    return laid


def _paged(made: Plan, pool: NDArray[Any], blocks: NDArray[Any]) -> Plan:
    """Return a search plan whose rows have their bounds, with the page table of each row.

    Raises: ValueError if blocks do not broadcast to one table per row, or a row sees a page out of range.
    """
    numbers = _tables(made.shape[:-1], blocks.shape)
    _check_pages(blocks, numbers, made.rows, pool.shape[-3], pool.shape[-2])
    header, rows = made.header.copy(), made.rows.copy()
    header[launch_plan.PAGE] = pool.shape[-2]
    rows[:, launch_plan.TABLE] = numbers * blocks.shape[-1]
    table = np.multiply(blocks, pool.strides[-3], dtype=np.int64).ravel()
    return made._replace(header=header, rows=rows, table=table)


@functools.lru_cache(16)
def _tables(lead: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the number of each row's table, for rows of shape `lead` and tables [..., T] that broadcast to them."""
    try:
        return np.broadcast_to(np.arange(math.prod(shape[:-1])).reshape(shape[:-1]), lead).ravel()
    except ValueError:
        raise validation.not_a_table_per_row(lead, shape) from None


def _check_pages(
    blocks: NDArray[Any], numbers: NDArray[np.int64], rows: NDArray[np.int64], pages: int, size: int
) -> None:
    """Raise ValueError if a row sees a page out of range; other entries of the table may be anything."""
    if not blocks.size or not len(numbers) or (blocks.min() >= 0 and blocks.max() < pages):
        return
    low, high = rows[:, launch_plan.LOW, None], rows[:, launch_plan.HIGH, None]
    first, of_rows = np.arange(blocks.shape[-1]) * size, blocks.reshape(-1, blocks.shape[-1])[numbers]
    seen = (first + size > low) & (first < high) & (low < high)
    wrong = seen & ((of_rows < 0) | (of_rows >= pages))
    if wrong.any():
        raise ValueError(
            f"blocks of positions that a row sees must be pages in 0..{pages - 1}, got "
            f"{int(of_rows[wrong][0])}; shorten lengths or fill the table"
        )
