"""Vectors of an index: the real numbers whose signs are their codes (centring, a random rotation), and exact scores.

A BLAS rounds differently depending on the number of rows, the threads and the machine. Codes are the signs of products,
so products with the rotation are made in float64: what differs is 10^-16 of a sum, and flips next to no sign.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, quantiser, validation

BLOCK = 4096  # vectors per block, so that float32 copies take little memory
ROWS = 512  # vectors per product in float64
GATHERED = 1 << 22  # numbers of original vectors gathered per block: 16 MiB


@dataclass(frozen=True, eq=False)
class Encoder:
    """f(x) = (x - mean) @ matrix, whose signs are the code (docs/algorithm.md, eq. 1).

    dim: numbers per vector. bits: numbers of f(x). mean: float32 [dim], or None for zero. matrix: float32 [dim, bits],
    or None for the identity. seed: seed of the matrix, or None.

    A code has whole words: bits after the last are padding, 0 in codes and in queries, so that all match.
    """

    dim: int
    bits: int
    mean: NDArray[np.float32] | None = None
    matrix: NDArray[np.float32] | None = None
    seed: int | None = None

    @property
    def words(self) -> int:
        """Words of a code."""
        return -(-self.bits // 32)

    @property
    def padding(self) -> int:
        """Bits of a code after the last."""
        return 32 * self.words - self.bits

    @functools.cached_property
    def _matrix(self) -> NDArray[np.float64]:
        """The matrix in float64: to convert it takes longer than the product with a single query."""
        assert self.matrix is not None
        return self.matrix.astype(np.float64)

    def masked(self, codes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return codes [..., words] without what is in their padding; a copy only if there is padding."""
        if not self.padding:
            return codes
        mask = np.full(self.words, -1, np.int32)
        mask[-1] = (1 << (32 - self.padding)) - 1
        return codes & mask

    def project(self, name: str, x: NDArray[Any], first: int = 0) -> NDArray[np.float32]:
        """Return f of rows [n, dim] as float32 [n, bits], and zeros for the padding.

        Raises: ValueError if a row, or f of it, is not finite; the message counts rows from `first`.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # overflows become inf, which is checked
            rows = np.ascontiguousarray(x, np.float32)
            if self.mean is not None:
                rows = rows - self.mean
            if self.matrix is not None:
                parts = (rows[start : start + ROWS].astype(np.float64) for start in range(0, len(rows), ROWS))
                products = [(part @ self._matrix).astype(np.float32) for part in parts]
                rows = np.concatenate(products) if products else np.empty((0, self.bits), np.float32)
        require_finite(name, rows, first)
        return np.pad(rows, ((0, 0), (0, self.padding))) if self.padding else rows

    def encode(self, x: NDArray[Any], out: NDArray[np.int32]) -> None:
        """Write the codes of rows [n, dim] to out, int32 [n, words], a block at a time."""
        for start in range(0, len(x), BLOCK):
            block = slice(start, start + BLOCK)
            out[block] = quantiser.pack(self.project("vectors", x[block], start))


def rotation(dim: int, count: int, seed: int) -> NDArray[np.float32]:
    """Draw `count` columns of random rotations in SO(dim): several independent ones, concatenated, if count > dim.

    Returns: float32 [dim, count]. Source: docs/algorithm.md, Variants, `lsh`.
    """
    generator = np.random.default_rng(seed)
    blocks = []
    for _ in range(math.ceil(count / dim)):
        q, r = np.linalg.qr(generator.standard_normal((dim, dim)))
        q *= np.sign(np.diagonal(r))  # makes the draw uniform over O(dim), and the same for every LAPACK
        if np.linalg.det(q) < 0:
            q[:, 0] = -q[:, 0]
        blocks.append(q)
    return np.ascontiguousarray(np.concatenate(blocks, axis=1)[:, :count], np.float32)


def mean_of(x: NDArray[Any]) -> NDArray[np.float32]:
    """Average rows [n, dim], n >= 1, in float64, a block at a time."""
    total = np.zeros(x.shape[1])
    for start in range(0, len(x), BLOCK):
        total += x[start : start + BLOCK].sum(axis=0, dtype=np.float64)
    with np.errstate(over="ignore"):  # checked as a mean
        return (total / len(x)).astype(np.float32)


def given_mean(value: Any, dim: int) -> NDArray[np.float32]:
    """Return a mean that was passed as float32 [dim]."""
    (array,), _ = arguments.host_arrays(mean=value)
    validation.real("mean", array, "[D]")
    if array.shape != (dim,):
        raise ValueError(f"mean must have shape [{dim}], got {list(array.shape)}; average the vectors over their rows")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    require_finite("mean", array[None])
    return array


def require_finite(name: str, x: NDArray[Any], first: int = 0) -> None:
    """Raise ValueError unless x [n, D], centred and rotated, is finite; rows are counted from `first`."""
    good = np.isfinite(x).all(axis=-1)
    if not good.all():
        row = first + int(np.argmin(good))
        raise ValueError(
            f"{name} must be finite in float32, got NaN or infinity in row {row}; remove, repair or scale it"
        )


def best_vectors(
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
    if at.size and at.max() >= len(vectors):
        raise ValueError(
            f"vectors= must have a row for every id, got {len(vectors)} rows and id {at.max()}; pass them all"
        )
    lead, width = candidates.shape[:-1], candidates.shape[-1]
    count = int(np.prod(lead))
    queries = np.ascontiguousarray(queries, np.float32).reshape(count, queries.shape[-1])
    at, candidates = at.reshape(count, width), candidates.reshape(count, width)
    scores, positions = np.empty((count, k), np.float32), np.empty((count, k), np.int64)
    step = max(1, GATHERED // max(1, width * queries.shape[-1]))
    for start in range(0, count, step):
        block = slice(start, start + step)
        exact = _exact(queries[block], vectors, at[block], cosine)
        order = np.lexsort((candidates[block], -exact), axis=-1)[:, :k]
        scores[block] = np.take_along_axis(exact, order, -1)
        positions[block] = np.take_along_axis(candidates[block], order, -1)
    return scores.reshape(*lead, k), positions.reshape(*lead, k)


def _exact(
    queries: NDArray[np.float32], vectors: NDArray[Any], at: NDArray[np.int64], cosine: bool
) -> NDArray[np.float32]:
    """Return inner products or cosines of [Q, D] and rows [Q, C] of vectors, float32 [Q, C]; 0 for a zero vector."""
    with np.errstate(over="ignore"):
        candidates = vectors[at].astype(np.float32, copy=False)
    good = np.isfinite(candidates).all(axis=-1)
    if not good.all():
        raise ValueError(
            f"vectors= must be finite in float32, got NaN or infinity in row {at[~good][0]}; remove, repair or scale it"
        )
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
