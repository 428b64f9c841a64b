"""What a code is, what it may be fitted on, and how bits and factors become bytes."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BYTES = 16
"""Stored per key and KV head, factors of that key included."""


@dataclass(frozen=True)
class Training:
    """Keys and queries of one KV head, from text that is not scored."""

    keys: Tensor
    """float32 [N, D]."""
    moment: Tensor
    """Second moment of the queries, summed over the group, float64 [D, D]."""
    generator: torch.Generator
    """Draws random rotations and starts, on the CPU."""


class Code(Protocol):
    """A code of one KV head. `query(q) @ decode(encode(k)).T` estimates q . k, up to a constant per query."""

    def encode(self, k: Tensor) -> Tensor:
        """Return all that is stored of keys [T, D]: uint8 [T, 16]."""
        ...

    def decode(self, stored: Tensor) -> Tensor:
        """Return coordinates of the stored keys, float32 [T, C]."""
        ...

    def query(self, q: Tensor) -> Tensor:
        """Return the coordinates of queries [..., D] that keys are compared with, float32 [..., C]."""
        ...


class Metric:
    """Coordinates in which an error of a key counts as much in every direction, for the training queries.

    A key k becomes y = (k - mean) root and a query q becomes q inverse, so that products stay the same but for a
    constant per query, and |y - y'|^2 is the expected square of the error of q . k (docs/algorithm.md, eq. 18).
    """

    def __init__(self, training: Training):
        values, vectors = torch.linalg.eigh(training.moment)
        values = values.clamp(min=1e-6 * float(values.max().clamp(min=1e-30)))
        self.mean: Tensor = training.keys.mean(0)
        self.root: Tensor = (vectors * values.sqrt() @ vectors.mT).to(training.keys)
        self.inverse: Tensor = (vectors * values.rsqrt() @ vectors.mT).to(training.keys)

    def keys(self, k: Tensor) -> Tensor:
        """Map keys [T, D]."""
        return (k.float() - self.mean) @ self.root

    def queries(self, q: Tensor) -> Tensor:
        """Map queries [..., D]."""
        return q.float() @ self.inverse


def principal(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variances [D], in descending order, and the principal directions [D, D], in columns, of rows y."""
    values, vectors = torch.linalg.eigh(torch.cov(y.T.double()))
    return values.flip(0).to(y), vectors.flip(1).to(y)


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw orthonormal rows, at most as many as columns, uniformly: float32 [rows, columns]."""
    q, r = torch.linalg.qr(torch.randn(columns, columns, generator=generator))
    return (q * r.diagonal().sign())[:rows]


def pack_signs(x: Tensor) -> Tensor:
    """Pack the signs of x [T, n], n a multiple of 8, to bytes [T, n / 8]; a bit is set where x > 0."""
    powers = 2 ** torch.arange(8, device=x.device)
    return ((x > 0).unflatten(-1, (-1, 8)) * powers).sum(-1).to(torch.uint8)


def unpack_signs(stored: Tensor) -> Tensor:
    """Return the signs of packed bytes [T, n / 8] as +-1, float32 [T, n]."""
    bits = stored[..., None].to(torch.int32) >> torch.arange(8, device=stored.device) & 1
    return bits.flatten(-2).float() * 2 - 1


def pack_factors(*factors: Tensor) -> Tensor:
    """Store numbers [T] each in 16 bits: uint8 [T, 2 n]."""
    most = torch.finfo(torch.float16).max
    return torch.stack(factors, -1).clamp(-most, most).half().view(torch.uint8)


def unpack_factors(stored: Tensor) -> Tensor:
    """Return the numbers of bytes [T, 2 n], float32 [T, n]."""
    return stored.contiguous().view(torch.float16).float()
