"""Scores (eq. 2, eq. 4), selection (eq. 6) and their fusion on the CPU, in numba.

Score. A task is BLOCK query rows x CHUNK keys. 32 keys go to registers, 8 keys a vector, and all rows of the block are
scored against them before the next 32 are read. Two words of 64 bits a code, the common case, are taken apart on the
way to the registers; other codes go, by masked loads and a transposition of 8 keys x 4 words, to a tile in L1 of one
column a word, which costs 0.2 ns a key and word. Nothing outside the codes is read. Per key of 128 bits and 3 planes: 6
popcounts, 4 bytes written. The ceiling is the memory that the codes are read from, or the scores written to.

Selection, per row: (1) smallest and largest score, (2) histogram, in two levels if the scores span more than LEVEL,
(3) threshold: walk the bins from the top until k are covered, (4) ordered compaction: 64 scores become a 64-bit mask of
those at or above the threshold, its set bits are taken in order, and equals only while their quota lasts.

Search. The scores of a chunk go to 16 bits in L1 and no further; most are never counted either, because counting one
takes longer (0.42 ns) than scoring it (0.24 ns). Per row and part of the keys: (1) score one key in 64, in runs spread
over all of them, and guess a floor that somewhat more than k keys reach; (2) score every chunk and keep what reaches
the floor; (3) when 2k are kept, shrink to the best k by histogram and raise the floor above the lowest of them; (4)
shrink once more at the end. Fewer than k kept means that the sample misled: then (2) again without a floor. What is
kept is in index order, so ties fall to the lowest index, and the guess decides the time but never the result. With
few rows and several threads the keys are parted and the parts' selections merged.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore.cpu import kernels, layout, threads
from hashcore.validation import Selection

ROOM = 1 << 20  # of what all rows of a block keep: 8 MiB


def score(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    weights: tuple[int, ...],
    lead: tuple[int, ...],
    out: NDArray[np.int32] | None = None,
    workers: int | None = None,
) -> NDArray[np.int32]:
    """Score planes [..., P, W] against keys [..., N, W], whose leading dimensions broadcast to lead: int32 [..., N]."""
    n = keys.shape[-2]
    if out is None:
        out = np.empty((*lead, n), np.int32)
    if out.size == 0:
        return out
    addresses = layout.rows(out)
    if addresses is None:
        out[...] = score(query, keys, weights, lead, workers=workers)
        return out
    workers = workers or threads.count(out.size * query.shape[-1] * query.shape[-2])
    tasks = -(-len(addresses) // kernels.BLOCK) * -(-n // kernels.CHUNK)
    sets = layout.code_sets(keys, lead)  # what it owns lives until the kernels are done
    operands = *layout.queries(query, lead), np.array(weights, np.uint32), sets.first, sets.step, sets.bits
    threads.run(kernels.score_tasks, tasks, workers, (*operands, n, addresses))
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
        return topk(np.ascontiguousarray(scores, native), k, low, high, width, workers)
    count = len(addresses)
    workers = workers or threads.count(4 * scores.size)
    arguments = (addresses, k, low, high, values.reshape(count, width), indices.reshape(count, width))
    wide = max(threads.run(kernels.topk_tasks, count, workers, arguments))
    if wide >= 0:
        row = scores.reshape(count, -1)[wide, low[wide] : high[wide]]
        raise ValueError(
            f"the scores of a row must differ by less than {1 << 16}, got {int(row.max()) - int(row.min())} in row "
            f"{wide}; use smaller weights or fewer bits"
        )
    return values, indices


def search(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    weights: tuple[int, ...],
    lead: tuple[int, ...],
    wanted: Selection,
    best: bool,
    out: tuple[NDArray[np.int32], NDArray[Any]] | None = None,
    workers: int | None = None,
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Find the best keys [..., N, W] of each row of lead by planes [..., P, W]: scores and indices [..., K]."""
    shape = (*lead, wanted.width)
    if out is None or not (out[1].dtype == np.int64 and all(x.flags.carray for x in out)):
        found = np.empty(shape, np.int32), np.empty(shape, np.int64)
    else:
        found = out
    if found[0].size:
        scores, indices = (x.reshape(-1, wanted.width) for x in found)
        workers = workers or threads.count(len(scores) * keys.shape[-2] * query.shape[-1] * query.shape[-2])
        _search(query, keys, weights, lead, wanted, best, scores, indices, workers)
    if out is not None and found is not out:
        out[0][...], out[1][...] = found
    return found


def _search(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    weights: tuple[int, ...],
    lead: tuple[int, ...],
    wanted: Selection,
    best: bool,
    scores: NDArray[np.int32],
    indices: NDArray[np.int64],
    workers: int,
) -> None:
    """Write the selections to contiguous [rows, K], not empty."""
    count, width = scores.shape
    n = keys.shape[-2]
    room = min(2 * width, n) + kernels.CHUNK + kernels.MORE  # of what a row keeps
    block = max(1, min(kernels.BLOCK, -(-count // workers), ROOM // room))
    blocks = -(-count // block)
    # A part finds its own best k, not its share of them: parts shorter than 8 k would mostly repeat each other.
    parts = max(1, min(workers // blocks, n // (8 * width)))
    found = scores[None], indices[None]
    if parts > 1:
        found = np.empty((parts, count, width), np.int32), np.empty((parts, count, width), np.int64)
    sets = layout.code_sets(keys, lead)  # what it owns lives until the kernels are done
    operands = *layout.queries(query, lead), np.array(weights, np.uint32), sets.first, sets.step, sets.bits
    top = sum(weights) * 32 * query.shape[-1]
    selection = top, wanted.k, wanted.low, wanted.high, room, block, parts, best and parts == 1
    threads.run(kernels.search_tasks, blocks * parts, workers, (*operands, n, *selection, *found))
    if parts > 1:
        threads.run(kernels.merge_tasks, count, 1, (*found, wanted.k, top, best, scores, indices))
