"""Scores (eq. 2, eq. 4), selection (eq. 6) and their fusion on the CPU, in numba.

Score. A task is BLOCK query rows x CHUNK keys, which stay in L1 while all rows of the block are scored against them.
The common codes, two words of 64 bits each in turn in memory, are read as they lie, 64 keys at a time: the matches of a
word fill a byte, so eight vectors of them merge into one (score_pairs). Other codes go, by masked loads and a
transposition of 8 keys x 4 words, to a tile in L1 of one column a word, 32 keys at a time, which costs 0.2 ns a key and
word. Nothing outside the codes is read. The ceiling is the memory that the codes are read from, or the scores written
to.

Selection, per row: (1) smallest and largest score, (2) histogram, in several levels if the scores span more than LEVEL,
(3) threshold: walk the bins from the top until k are covered, (4) ordered compaction: 64 scores become a 64-bit mask of
those at or above the threshold, its set bits are taken in order, and equals only while their quota lasts.

Search. The scores of pairs are compared with a floor in registers; those of other codes go to 16 bits in L1 and no
further. Most are never counted, because counting one takes longer (0.42 ns) than scoring it. Per row and part of the
keys: (1) score one key in 64, 8,192 at most, in runs spread over all of them, and guess a floor that somewhat more than
k keys reach; (2) score every chunk and keep what reaches the floor; (3) when 2k are kept, shrink to the best k by
histogram and raise the floor above the lowest of them; (4) shrink or sort once more at the end. Fewer than k kept means
that the sample misled: then (2) again without a floor. What is kept is in index order, so ties fall to the lowest
index, and the guess decides the time but never the result. With few rows and several threads the keys are parted and
the parts' selections merged.

Keys in pages are read where they lie if a page has them side by side, by quarters of 64; the others, and those before
the first and after the last 64 of a row, go to L1 first.

With a shortlist (2) scores the first words of 64 keys in registers, notes which of them reach the floor that a sample
says the shortlist has, and scores these in full when some hundred have come together.

Call. What follows from shapes and numbers is worked out once (plan) and kept (prepared): after other work has emptied
the caches, the steps in Python took as long as the kernel.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore.cpu import kernels, layout, pages, plan, prepared, threads
from hashcore.cpu.plan import Plan
from hashcore.validation import Comparison, Selection

__all__ = ["layout", "pages", "plan", "prepared", "run_score", "run_search", "score", "search", "threads", "topk"]


def score(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    weights: tuple[int, ...],
    lead: tuple[int, ...],
    workers: int | None = None,
) -> NDArray[np.int32]:
    """Score planes [..., P, W] against keys [..., N, W], whose leading dimensions broadcast to lead: int32 [..., N]."""
    query, keys = layout.aligned(query), layout.readable(keys)
    made = plan.score(layout.of(query), layout.of(keys), weights, lead, workers, threads.most())
    return run_score(made, *layout.addresses(query, keys))


def run_score(made: Plan, query: int, keys: int, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
    """Run a plan on the addresses of what it was made for; out is of its shape, with any strides."""
    rows = made.rows
    if out is None:
        out = np.empty(made.shape, np.int32)
    if not all(made.shape):
        return out
    if not out.flags.c_contiguous:
        if not layout.are_plain(out):
            out[...] = run_score(made, query, keys)
            return out
        rows = rows.copy()
        rows[:, plan.OUT] = layout.offsets(out.shape[:-1], out.strides[:-1], out.shape[:-1])
    arguments = made.header, rows, query, keys, layout.address(out)
    threads.run(kernels.score_tasks, made.tasks, made.workers, arguments)
    return out


def topk(
    scores: NDArray[Any],
    k: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    width: int,
    workers: int | None = None,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Select the k[r] highest of positions [low[r], high[r]) of each row r of [..., N] into [..., width]."""
    native = scores.dtype.newbyteorder("=")
    values = np.zeros((*scores.shape[:-1], width), native)
    indices = np.full(values.shape, -1, np.int64)
    if scores.size == 0:
        return values, indices
    addresses = layout.rows(scores)
    if addresses is None:
        return topk(layout.dense(scores), k, low, high, width, workers)
    count = len(addresses)
    workers = workers or threads.count(4 * scores.size)
    arguments = (addresses, k, low, high, values.reshape(count, width), indices.reshape(count, width))
    threads.run(kernels.topk_tasks, count, workers, arguments)
    return values, indices


def search(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    weights: tuple[int, ...],
    lead: tuple[int, ...],
    wanted: Selection,
    best: bool,
    workers: int | None = None,
    shortlist: int = 0,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Find the best keys [..., N, W] of each row of lead by planes [..., P, W]: scores and indices [..., K]."""
    query, keys = layout.aligned(query), layout.readable(keys)
    compared = Comparison(layout.of(query), layout.of(keys), weights, lead)
    made = plan.search(*compared, wanted.width, best, None, workers, threads.most(), shortlist)
    return run_search(plan.filled(made, wanted), *layout.addresses(query, keys))


def run_search(
    made: Plan, query: int, keys: int, out: tuple[NDArray[np.int32], NDArray[Any]] | None = None
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Run a plan on the addresses of what it was made for; out is a pair of its shape."""
    if out is None or not (out[1].dtype == np.int64 and all(x.flags.carray for x in out)):
        found = np.empty(made.shape, np.int32), np.empty(made.shape, np.int64)
    else:
        found = out
    if all(made.shape):
        if made.parts == 1:
            _search_whole(made, query, keys, *found)
        else:
            scores, indices = found
            rows = -1, made.shape[-1]
            _search_parts(made, query, keys, scores.reshape(rows), indices.reshape(rows))
            _search_again(made, query, keys, scores.reshape(rows), indices.reshape(rows))
    if out is not None and found is not out:
        out[0][...], out[1][...] = found
    return found


def _search_whole(made: Plan, query: int, keys: int, scores: NDArray[np.int32], indices: NDArray[np.int64]) -> None:
    """Search all keys at once, or in parts of their own if scores and indices have them: contiguous."""
    arguments = made.header, made.rows, made.table, query, keys, layout.address(scores), layout.address(indices)
    threads.run(kernels.search_tasks, made.tasks, made.workers, arguments)


def _search_parts(made: Plan, query: int, keys: int, scores: NDArray[np.int32], indices: NDArray[np.int64]) -> None:
    """Search the parts of the keys, and merge what they found to contiguous [rows, K]."""
    shape = made.parts, *scores.shape
    found = np.empty(shape, np.int32), np.empty(shape, np.int64)
    _search_whole(made, query, keys, *found)
    top, best = made.header[[plan.TOP, plan.BEST]].tolist()
    k = np.ascontiguousarray(made.rows[:, plan.K])
    threads.run(kernels.merge_tasks, len(scores), 1, (*found, k, top, best, scores, indices))


def _search_again(made: Plan, query: int, keys: int, scores: NDArray[np.int32], indices: NDArray[np.int64]) -> None:
    """Search, in one part, the rows of which the parts together kept too little of a shortlist; they cannot know it."""
    if not made.header[plan.SHORTLIST]:
        return
    k, low, high = (made.rows[:, column] for column in (plan.K, plan.LOW, plan.HIGH))
    (poor,) = np.nonzero((indices >= 0).sum(1) < np.minimum(k, high - low))
    if len(poor):
        header = made.header.copy()
        header[plan.PARTS] = 1
        found = np.empty((len(poor), scores.shape[1]), np.int32), np.empty((len(poor), scores.shape[1]), np.int64)
        tasks = -(-len(poor) // int(header[plan.ROWS]))
        _search_whole(made._replace(header=header, rows=made.rows[poor], tasks=tasks), query, keys, *found)
        scores[poor], indices[poor] = found
