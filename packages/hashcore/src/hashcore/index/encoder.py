"""Maps embeddings to the real numbers whose signs are the code: optional centring and random rotation."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore import bits
from hashcore.index import checks

BLOCK = 4096  # vectors per block, so that float32 copies take little memory


@dataclass(frozen=True, eq=False)
class Encoder:
    """f(x) = (x - mean) @ matrix, whose signs are the code (docs/algorithm.md, eq. 1).

    dim: numbers per vector. bits: numbers of f(x). mean: float32 [dim], or None for zero. matrix: float32 [dim, bits],
    or None for the identity. seed: seed of the matrix, or None.
    """

    dim: int
    bits: int
    mean: NDArray[np.float32] | None = None
    matrix: NDArray[np.float32] | None = None
    seed: int | None = None

    def project(self, name: str, x: NDArray[Any], first: int = 0) -> NDArray[np.float32]:
        """Return f of rows [n, dim] as float32 [n, bits].

        Raises: ValueError if a row, or f of it, is not finite; the message counts rows from `first`.
        """
        with np.errstate(over="ignore"):  # overflows become inf, which is checked
            rows = np.ascontiguousarray(x, np.float32)
            checks.finite(name, rows, first)
            if self.mean is None and self.matrix is None:
                return rows
            if self.mean is not None:
                rows = rows - self.mean
        if self.matrix is not None:
            from hashcore.index import projection  # numba takes half a second to import

            rows = projection.project(rows, self.matrix)
        checks.projected(name, rows, first)
        return rows

    def encode(self, x: NDArray[Any], out: NDArray[np.int32]) -> None:
        """Write the codes of rows [n, dim] to out, int32 [n, bits / 32], a block at a time."""
        for start in range(0, len(x), BLOCK):
            block = slice(start, start + BLOCK)
            out[block] = bits.pack(self.project("vectors", x[block], start))


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
