"""Finds the best codes of an index for each query, and reranks them by the original vectors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore import ops
from hashcore.index.rows import Rows

GATHERED = 1 << 22  # numbers of original vectors gathered per block: 16 MiB


def live_best(
    queries: NDArray[np.int32], content: Rows, k: int, weights: Sequence[int] | None
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Find the k best rows that are not removed, for codes [..., W] or planes [..., P, W] with weights.

    Returns: scores int32 and positions int64, both [..., k], best first, ties to the lowest position.
    """
    keys = content.codes[: content.count]
    # Search for as many more as were removed; then at least k of the results are live.
    wanted = k + len(content.dead) if k else 0
    if weights is None:
        found = ops.search(queries.reshape(-1, queries.shape[-1]), keys, wanted)
        scores, positions = (x.reshape(*queries.shape[:-1], wanted) for x in found)
    else:
        scores, positions = ops.search(queries, keys, wanted, weights)
    if wanted == k:
        return scores, positions
    dead = np.isin(positions, content.dead)
    alive = np.argsort(dead, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(scores, alive, -1), np.take_along_axis(positions, alive, -1)


def rerank_best(
    queries: NDArray[Any],
    vectors: NDArray[Any],
    at: NDArray[np.int64],
    candidates: NDArray[np.int64],
    k: int,
    cosine: bool,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Select the k candidates of each query with the highest exact score, best first, ties to the lowest position.

    Args:
        queries: floats [..., D]. vectors: floats [M, D].
        candidates: int64 [..., C], positions in any order. at: int64 [..., C], their rows in vectors.
        k: candidates to select. cosine: score by cosine instead of inner product.
    Returns: scores float32 and positions int64, both [..., k].
    """
    lead, width = candidates.shape[:-1], candidates.shape[-1]
    count = int(np.prod(lead))
    queries = np.ascontiguousarray(queries, np.float32).reshape(count, queries.shape[-1])
    at, candidates = at.reshape(count, width), candidates.reshape(count, width)
    scores, positions = np.empty((count, k), np.float32), np.empty((count, k), np.int64)
    step = max(1, GATHERED // max(1, width * queries.shape[-1]))
    for start in range(0, count, step):
        block = slice(start, start + step)
        exact = _exact(queries[block], _finite(vectors, at[block]), cosine)
        order = np.lexsort((candidates[block], -exact), axis=-1)[:, :k]
        scores[block] = np.take_along_axis(exact, order, -1)
        positions[block] = np.take_along_axis(candidates[block], order, -1)
    return scores.reshape(*lead, k), positions.reshape(*lead, k)


def _finite(vectors: NDArray[Any], at: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return rows [Q, C] of vectors as float32 [Q, C, D]."""
    with np.errstate(over="ignore"):
        chosen = vectors[at].astype(np.float32, copy=False)
    good = np.isfinite(chosen).all(axis=-1)
    if not good.all():
        raise ValueError(
            f"vectors= must be finite in float32, got NaN or infinity in row {at[~good][0]}; remove or repair it"
        )
    return chosen


def _exact(queries: NDArray[np.float32], candidates: NDArray[np.float32], cosine: bool) -> NDArray[np.float32]:
    """Return inner products or cosines of [Q, D] and [Q, C, D], float32 [Q, C]; the cosine of a zero vector is 0."""
    products = np.einsum("qcd,qd->qc", candidates, queries, dtype=np.float64)
    if cosine:
        norms = np.sqrt(np.einsum("qcd,qcd->qc", candidates, candidates, dtype=np.float64))
        norms *= np.sqrt(np.einsum("qd,qd->q", queries, queries, dtype=np.float64))[:, None]
        products = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
    with np.errstate(over="ignore"):
        scores = products.astype(np.float32)
    if not np.isfinite(scores).all():
        raise ValueError("exact scores must fit float32, got larger ones; scale the vectors or use metric='cosine'")
    return scores
