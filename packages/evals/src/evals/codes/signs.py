"""Codes of signs after a rotation: ITQ, RaBitQ and TurboQuant."""

import math

import torch
from torch import Tensor

from evals.codes.base import (
    BYTES,
    Training,
    orthonormal,
    pack_factors,
    pack_signs,
    principal,
    unpack_factors,
    unpack_signs,
)

_ROUNDS = 50
_FACTOR = 2  # bytes
_LEVEL = math.sqrt(2 / math.pi)  # of the 1-bit Lloyd-Max quantiser of a standard normal number


class ItqCode:
    """Iterative quantisation (Gong, Lazebnik, Gordo and Perronnin 2013): signs of principal coordinates, rotated so
    that they lose least. What these signs leave is coded in the same way, until all bits are spent. Keys are decoded by
    least squares from all signs, and queries are real numbers (its asymmetric form).

    Not in the queries' metric, and not from several starts: both find less (docs/log.md, 2026-11-25).
    """

    def __init__(self, training: Training):
        self.mean: Tensor = training.keys.mean(0)
        y = training.keys - self.mean
        self.blocks: list[tuple[Tensor, Tensor]] = []
        """Directions [D, n] of the signs of one round, and the decoder [n, D] of these signs alone."""
        rest, left, signs = y, 8 * BYTES, y[:, :0]
        while left:
            directions = principal(rest)[1][:, :left]
            directions = directions @ itq_rotation(rest @ directions, training.generator)
            found = unpack_signs(pack_signs(rest @ directions))
            self.blocks.append((directions, least_squares(found, rest)))
            rest = rest - found @ self.blocks[-1][1]
            signs, left = torch.cat([signs, found], 1), left - directions.shape[1]
        self.decoder: Tensor = least_squares(signs, y)

    def encode(self, k: Tensor) -> Tensor:
        rest, stored = k.float() - self.mean, []
        for directions, decoder in self.blocks:
            stored.append(pack_signs(rest @ directions))
            rest = rest - unpack_signs(stored[-1]) @ decoder
        return torch.cat(stored, 1)

    def decode(self, stored: Tensor) -> Tensor:
        return unpack_signs(stored) @ self.decoder

    def query(self, q: Tensor) -> Tensor:
        """See `Code.query`: not rounded."""
        return q.float()


def least_squares(signs: Tensor, y: Tensor) -> Tensor:
    """Return the matrix [n, D] for which signs [T, n] times it is closest to y [T, D]."""
    signs = signs.double()
    gram = signs.mT @ signs
    gram.diagonal().add_(1e-6 * len(y))  # two signs may agree in all keys
    return torch.linalg.solve(gram, signs.mT @ y.double()).to(y)


def itq_rotation(y: Tensor, generator: torch.Generator, rounds: int = _ROUNDS) -> Tensor:
    """Return a rotation R [d, d] that makes |sign(y R) - y R| small, for centred rows y [T, d]."""
    rotation = orthonormal(y.shape[1], y.shape[1], generator).to(y)
    for _ in range(rounds):
        signs = torch.where(y @ rotation > 0, 1.0, -1.0)
        u, _, v = torch.linalg.svd(y.mT @ signs)
        rotation = u @ v
    return rotation


class Rotated:
    """Keys that are centred, padded with zeros and rotated at random to `bits` coordinates."""

    bits: int = 8 * (BYTES - _FACTOR)

    def __init__(self, training: Training):
        self.mean: Tensor = training.keys.mean(0)
        self.rotation: Tensor = orthonormal(len(self.mean), self.bits, training.generator).to(training.keys)

    def rotated(self, k: Tensor) -> Tensor:
        return (k.float() - self.mean) @ self.rotation

    def query(self, q: Tensor) -> Tensor:
        """See `Code.query`: not rounded."""
        return q.float() @ self.rotation


class RaBitQCode(Rotated):
    """RaBitQ (Gao and Long 2024, arXiv 2405.12497, section 3): signs of a randomly rotated, centred, unit vector.

    <x, q> / <x, o> is an unbiased estimate of <o, q>, where x are the signs over sqrt(bits), o is the unit vector and q
    any query, both rotated. Its two factors per vector, the length and <x, o>, enter a ranking by inner products only
    as their quotient: 16 bits, which leaves 112 for signs. Vectors are padded with zeros before the rotation, as the
    authors do to spend more bits than dimensions. Queries are rounded to `query_bits` (section 3.3.1), here to the
    nearest level.
    """

    def __init__(self, training: Training, query_bits: int = 8):
        super().__init__(training)
        self.query_bits: int = query_bits

    def encode(self, k: Tensor) -> Tensor:
        y = self.rotated(k)
        signs = pack_signs(y)
        product = (unpack_signs(signs) * y).sum(-1) / math.sqrt(self.bits)  # <x, o> |y|
        return torch.cat([signs, pack_factors(y.square().sum(-1) / product.clamp(min=1e-20))], -1)

    def decode(self, stored: Tensor) -> Tensor:
        return unpack_signs(stored[:, :-_FACTOR]) / math.sqrt(self.bits) * unpack_factors(stored[:, -_FACTOR:])

    def query(self, q: Tensor) -> Tensor:
        return round_evenly(super().query(q), self.query_bits)


def round_evenly(x: Tensor, bits: int) -> Tensor:
    """Round each row of x [..., C] to 2^bits evenly spaced levels from its least to its greatest number."""
    least = x.amin(-1, keepdim=True)
    step = ((x.amax(-1, keepdim=True) - least) / (2**bits - 1)).clamp(min=1e-30)
    return ((x - least) / step).round() * step + least


class TurboMseCode(Rotated):
    """TurboQuant (Zandieh, Daliri, Hadian and Mirrokni 2025, arXiv 2504.19874), algorithm 1, with 1 bit: the rotated
    unit vector by a 1-bit Lloyd-Max quantiser, and its length in 16 bits.
    """

    def encode(self, k: Tensor) -> Tensor:
        y = self.rotated(k)
        return torch.cat([pack_signs(y), pack_factors(y.norm(dim=-1))], -1)

    def decode(self, stored: Tensor) -> Tensor:
        signs, length = unpack_signs(stored[:, :-_FACTOR]), unpack_factors(stored[:, -_FACTOR:])
        return signs * length * (_LEVEL / math.sqrt(self.bits))


class TurboProductCode(Rotated):
    """TurboQuant's form for inner products (algorithm 2): 1-bit Lloyd-Max, then signs of random projections of what it
    leaves (QJL), which make the estimate unbiased. 64 and 32 bits, and 16 each for the length and that of the rest.
    """

    rest_bits = 32
    bits: int = 8 * (BYTES - 2 * _FACTOR) - rest_bits

    def __init__(self, training: Training):
        super().__init__(training)
        drawn = torch.randn(self.bits, self.rest_bits, generator=training.generator)
        self.projection: Tensor = drawn.to(training.keys)

    def _first(self, signs: Tensor) -> Tensor:
        return unpack_signs(signs) * (_LEVEL / math.sqrt(self.bits))

    def encode(self, k: Tensor) -> Tensor:
        y = self.rotated(k)
        length = y.norm(dim=-1)
        unit = y / length.clamp(min=1e-20)[:, None]
        signs = pack_signs(unit)
        rest = unit - self._first(signs)
        return torch.cat([signs, pack_signs(rest @ self.projection), pack_factors(length, rest.norm(dim=-1))], -1)

    def decode(self, stored: Tensor) -> Tensor:
        first, second = self.bits // 8, (self.bits + self.rest_bits) // 8
        length, of_rest = unpack_factors(stored[:, second:]).split(1, -1)
        rest = unpack_signs(stored[:, first:second]) @ self.projection.mT * math.sqrt(math.pi / 2) / self.rest_bits
        return length * (self._first(stored[:, :first]) + of_rest * rest)
