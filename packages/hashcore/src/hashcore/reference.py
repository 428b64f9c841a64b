"""The oracle: every function of hashcore in plain numpy, to be read beside docs/algorithm.md.

It imports no other module of hashcore and checks nothing. Tests compare the implementations to it with tolerance zero.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = tuple[int, ...]
Rows = int | NDArray[Any] | None


def pack(x: NDArray[Any]) -> NDArray[np.int32]:
    """Pack the signs of [..., 32 W] numbers into [..., W] words (eq. 1)."""
    bits = (x > 0).reshape(*x.shape[:-1], -1, 32)
    return (bits.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)


def unpack(codes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Unpack [..., W] words into [..., 32 W] bits (eq. 1)."""
    bits = codes[..., None] >> np.arange(32, dtype=np.int32) & 1
    return bits.astype(bool).reshape(*codes.shape[:-1], 32 * codes.shape[-1])


def quantise(w: NDArray[Any], planes: int = 3) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Quantise [..., D] weights to odd levels and a scale [..., 1] (eq. 5)."""
    with np.errstate(over="ignore"):
        w, m, limits = w.astype(np.float32), np.float32(2**planes - 1), np.finfo(np.float32)
    w, nan = np.clip(np.where(np.isnan(w), np.float32(0), w), limits.min, limits.max), np.isnan(w)
    s = np.float32(0.8 if planes < 6 else 1) * abs(w).max(-1, keepdims=True) / m
    s = np.where(s < limits.tiny, limits.tiny, s)
    level = np.where(nan, -1, np.clip(2 * np.floor(w / s / 2) + 1, -m, m))
    return level.astype(np.int8 if planes <= 7 else np.int16), s


def planes(w: NDArray[Any], planes: int = 3) -> tuple[NDArray[np.int32], Weights]:
    """Quantise [..., 32 W] weights to planes [..., P, W] (eq. 5)."""
    digits = (quantise(w, planes)[0].astype(int) + 2**planes - 1) // 2
    weights = tuple(2**p for p in range(planes))
    return np.stack([pack(digits // weight % 2) for weight in weights], -2), weights


def group_planes(codes: NDArray[np.int32]) -> tuple[NDArray[np.int32], Weights]:
    """Merge [..., G, W] codes into planes [..., P, W] (eq. 3)."""
    group = codes.shape[-2]
    count = int(np.ceil(np.log2(group + 1)))
    weights = (*(2**p for p in range(count - 1)), group - (2 ** (count - 1) - 1))
    n: NDArray[Any] = unpack(codes).sum(-2)
    bits: list[NDArray[np.bool_]] = []
    for p in reversed(range(count)):  # heaviest first: set a bit only if lighter planes cannot represent the rest
        bits.insert(0, n > sum(weights[:p]))
        n = n - weights[p] * bits[0]
    return np.stack([pack(b) for b in bits], -2), weights


def score(query: NDArray[np.int32], keys: NDArray[np.int32], weights: Weights | None = None) -> NDArray[np.int32]:
    """Count the matching bits of codes (eq. 2) or of weighted planes (eq. 4)."""
    if weights is None:
        return score(query[..., :, None, :], keys[..., None, :, :], (1,))
    differ = query[..., None, :, :] ^ keys[..., :, None, :]
    matches = np.bitwise_count((~differ).view(np.uint32)).sum(-1, dtype=np.int64)
    return (matches * np.array(weights)).sum(-1).astype(np.int32)


def eligible(
    shape: tuple[int, ...], lengths: Rows = None, starts: Rows = 0, sink: int = 0, recent: int = 0
) -> NDArray[np.bool_]:
    """Mark the positions [start + sink, length - recent) of each row of scores of this shape (eq. 13)."""
    position, n = np.arange(shape[-1]), shape[-1]
    first = np.broadcast_to(np.asarray(starts), shape[:-1])[..., None] + sink
    end = np.broadcast_to(np.asarray(n if lengths is None else lengths), shape[:-1])[..., None] - recent
    return (first <= position) & (position < end)


def topk(
    scores: NDArray[Any], k: int | NDArray[Any], *, order: str = "index", **ranges: Any
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Select the k highest eligible scores of each row, ties to the lowest index (eq. 6), in either order (eq. 14)."""
    sizes, seen = np.broadcast_to(k, scores.shape[:-1]), eligible(scores.shape, **ranges)
    shape = (*scores.shape[:-1], k if isinstance(k, int) else sizes.max(initial=0))
    values, indices = np.zeros(shape, scores.dtype), np.full(shape, -1, np.int64)
    for row in np.ndindex(scores.shape[:-1]):
        worst_first = np.argsort(scores[row][::-1], kind="stable")
        best_first = scores.shape[-1] - 1 - worst_first[::-1]
        chosen = best_first[seen[row][best_first]][: sizes[row]]
        chosen = chosen if order == "best" else np.sort(chosen)
        indices[row][: len(chosen)], values[row][: len(chosen)] = chosen, scores[row][chosen]
    return values, indices


def gathered(pool: NDArray[np.int32], blocks: NDArray[Any]) -> NDArray[np.int32]:
    """Gather keys [..., N, W] from pages [..., M, S, W] in the order of blocks [..., T]; leading shapes broadcast.

    Page numbers out of range count as 0; no row may see these keys.
    """
    lead, (pages, size, words) = np.broadcast_shapes(pool.shape[:-3], blocks.shape[:-1]), pool.shape[-3:]
    pool, blocks = np.broadcast_to(pool, (*lead, *pool.shape[-3:])), np.broadcast_to(blocks, (*lead, blocks.shape[-1]))
    keys = np.empty((*lead, blocks.shape[-1] * size, words), np.int32)
    for row in np.ndindex(lead):
        table = np.where((blocks[row] >= 0) & (blocks[row] < pages), blocks[row], 0)
        keys[row] = pool[row][table].reshape(-1, words)
    return keys


def search(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    k: int | NDArray[Any],
    weights: Weights | None = None,
    *,
    order: str = "best",
    **ranges: Any,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Select the k best keys of each row by score."""
    return topk(score(query, keys, weights), k, order=order, **ranges)
