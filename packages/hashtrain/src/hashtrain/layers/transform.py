"""Keys as levels of a few coordinates, whose binary digits form the code; started by transform coding, then trained.

Transform coding of keys for inner products with queries (docs/algorithm.md, eq. 18) maps them to uncorrelated
coordinates whose errors count equally, and each bit of the code goes to the coordinate where it removes the most error:
the textbook way to spend a fixed number of bits on a vector.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import hashcore
import torch
from torch import Tensor

from hashtrain.config import MAX_DIGITS, SINK, HasherConfig
from hashtrain.data.captured import Capture
from hashtrain.layers.base import Draw, LayerHasher, SkipMlp, rotations
from hashtrain.layers.surrogate import digits, quantised

CONTEXTS = 16
"""Number of contexts that a start is computed from."""


class Transform(LayerHasher):
    """Binary digits of a key's coordinates, more where keys vary more; a query weighs each digit by its power.

    Source: docs/algorithm.md, eq. 18, 19.
    """

    starts = True
    estimates_products = True
    digits: Tensor
    """Binary digits of each coordinate, float32 [Hkv, C]: integers that sum to `bits`. Set only by loading a state."""
    coordinate: Tensor
    """Of the digit that each bit of a code stands for, per KV head: int64 [Hkv, bits]."""
    power: Tensor
    """Its value: 1, 2, 4, ..., float32 [Hkv, bits], in descending order."""
    limit: Tensor
    """Levels are odd integers from -limit to limit: float32 [Hkv, C]."""

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        self.planes: int = config.planes
        coordinates = _coordinates(config)
        r = rotations(self.hkv, self.d, coordinates, generator)
        self.key: SkipMlp = SkipMlp(r, config.hidden, generator)
        self.query: SkipMlp = SkipMlp(r.repeat_interleave(self.group, 0), config.hidden, generator)
        shared = even(coordinates, self.bits)
        self.register_buffer("digits", shared.repeat(self.hkv, 1))
        for name in ("coordinate", "power", "limit"):
            self.register_buffer(name, None, persistent=False)
        self._lay_out()
        self.register_load_state_dict_post_hook(_lay_out)

    @torch.no_grad()
    def start(self, data: Capture, layer: int, most_digits: int = MAX_DIGITS) -> None:
        contexts = (data.read(context, layer)[:2] for context in range(min(len(data), CONTEXTS)))
        device = self.digits.device
        with torch.device("cpu"):  # the sums run on the device; small matrices and the loop over bits are faster here
            found = moments((q.to(device), k.to(device)) for q, k in contexts)
            key, bias, query, shared = start(found, self.bits, self.digits.shape[1], most_digits)
        self.digits.copy_(shared)
        self._lay_out()
        self.key.r.copy_(key)
        self.key.b2.copy_(bias)
        self.query.r.copy_(query.repeat_interleave(self.group, 0))

    def _lay_out(self) -> None:
        """Derive from `digits` which digit each bit stands for. Raises: ValueError if they are invalid."""
        if self.digits.is_meta:  # of a layer that has shapes alone
            return
        whole = self.digits == self.digits.round().clamp(0, MAX_DIGITS)  # NaN is not equal to itself
        if not (whole.all() and (self.digits.sum(-1) == self.bits).all()):
            raise ValueError(
                f"the digits of a head must be integers from 0 to {MAX_DIGITS} that sum to {self.bits}, got sums of "
                f"{self.digits.sum(-1).tolist()}"
            )

        powers = torch.arange(MAX_DIGITS - 1, -1, -1, device=self.digits.device)
        at = (self.digits[:, None, :] > powers[:, None]).nonzero()  # by head, descending power, coordinate
        self.coordinate = at[:, 2].view(self.hkv, -1).clone()
        self.power = (1 << powers)[at[:, 1]].view(self.hkv, -1).float()
        self.limit = ((1 << self.digits.long()) - 1).float()

    def query_weight(self, q: Tensor, per_query_head: bool = False) -> Tensor:
        """Return the weight of each bit: [B, Hq, T, D] -> [B, Hkv, T, bits], or [B, Hq, T, bits] per query head."""
        found = self.query(q)
        found = found if per_query_head else self.by_group(found).sum(2)
        repeats = found.shape[1] // self.hkv
        coordinate, power = (x.repeat_interleave(repeats, 0) for x in (self.coordinate, self.power))
        return found.gather(-1, _spread(coordinate, found)) * power[:, None]

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        codes = hashcore.pack(self.soft_keys(k))
        return codes.repeat_interleave(self.group, 1) if per_query_head else codes

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        return hashcore.planes(self.query_weight(q, per_query_head), self.planes, check=False)

    def soft_queries(self, q: Tensor) -> Tensor:
        return quantised(self.query_weight(q), self.planes)[0]

    def soft_keys(self, k: Tensor) -> Tensor:
        with torch.autocast(k.device.type, enabled=False):  # keys are centred after the product: too fine for bfloat16
            z = self.key(k)
        return digits(z, _spread(self.coordinate, z), self.power[:, None], self.limit[:, None])


def _lay_out(loaded: Any, _: object) -> None:
    """Lay out the digits that were loaded; a function with a name, so that hashers can be pickled."""
    loaded._lay_out()


def _coordinates(config: HasherConfig) -> int:
    return min(config.shape.head_dim, config.bits)


def _spread(coordinate: Tensor, x: Tensor) -> Tensor:
    """Expand [H, bits] over the batch rows and tokens of x [B, H, T, C], to index its last dimension."""
    return coordinate[None, :, None].expand(x.shape[0], -1, x.shape[2], -1)


STEPS = (1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.05687, 0.03076)
DISTORTIONS = (0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001040, 0.0003043, 0.00008769)
WIDER = 1.1
"""Keys have heavier tails than normal numbers: steps wider by this factor find more (log of d31aad51)."""
_SMALLEST = 1e-6  # of the largest eigenvalue: smallest allowed one, to avoid division by zero


class Start(NamedTuple):
    """Maps of one layer, per KV head: z = k key + bias, u = q query; sum over a key's levels in z times u is q . k.

    Coordinates are in descending order of variance; those without a digit come last.
    """

    key: Tensor
    """float32 [Hkv, D, C]: scaled so that half a quantiser step is 1."""
    bias: Tensor
    """float32 [Hkv, 1, C]: keys are centred."""
    query: Tensor
    """float32 [Hkv, D, C]: the inverse; 0 where a coordinate has no digit."""
    digits: Tensor
    """float32 [Hkv, C]: integers from 0 to `MAX_DIGITS` that sum to the bits of a code."""


class Moments(NamedTuple):
    """The statistics that determine a start, float64 on the CPU."""

    query: Tensor
    """Second moment of the queries, summed over each group: [Hkv, D, D]."""
    key: Tensor
    """Covariance of the keys, [Hkv, D, D]."""
    mean: Tensor
    """Mean key, [Hkv, D]."""


def moments(captured: Iterator[tuple[Tensor, Tensor]]) -> Moments:
    """Measure queries and keys of some contexts.

    Args:
        captured: queries [1, Hq, T, D] and keys [1, Hkv, T, D] of each context.
    The first tokens of a context are always read, so no bits are spent on them. Contexts with infinities or NaN are
    left out, as training stops at them.
    Raises: FloatingPointError if none is left.
    """
    query, key, mean, count = 0.0, 0.0, 0.0, 0
    for q, k in captured:
        grouped = q[0].float().unflatten(0, (k.shape[1], -1)).sum(1)
        keys = k[0, :, SINK:].float()
        if not (grouped.isfinite().all() and keys.isfinite().all()):
            continue
        query = query + (grouped.mT @ grouped).double().cpu() / grouped.shape[1]
        key = key + (keys.mT @ keys).double().cpu() / keys.shape[1]
        mean = mean + keys.double().mean(1).cpu()
        count += 1
    if not count:
        raise FloatingPointError(
            "expected a context with finite queries and keys to start from, got none; check the model's outputs"
        )
    query, key, mean = (torch.as_tensor(x) / count for x in (query, key, mean))
    return Moments(query, key - mean[:, :, None] * mean[:, None, :], mean)


def start(found: Moments, bits: int, coordinates: int, most: int = MAX_DIGITS) -> Start:
    """Compute the maps and the digits of each coordinate.

    Args:
        bits: of a code, at most `MAX_DIGITS` per coordinate; coordinates: at most D.
        most: digits per coordinate; exceeded only if all coordinates have as many and bits are left.
    Source: docs/algorithm.md, eq. 18.
    """
    heads = [_head(*parts, bits, coordinates, most) for parts in zip(*found, strict=True)]
    return Start(*(torch.stack(parts).float() for parts in zip(*heads, strict=True)))


def _head(query: Tensor, key: Tensor, mean: Tensor, bits: int, coordinates: int, most: int) -> tuple[Tensor, ...]:
    root, inverse = _roots(query)
    variances, vectors = torch.linalg.eigh(root @ key @ root)
    variances, vectors = variances.flip(0)[:coordinates], vectors.flip(1)[:, :coordinates]
    variances = variances.clamp(min=_SMALLEST**2 * variances.max().clamp(min=1e-30))
    digits = allocate(variances, bits, most)
    half = torch.tensor([STEPS[max(int(n), 1) - 1] for n in digits], dtype=torch.float64) * variances.sqrt() * WIDER / 2
    to_key = root @ vectors / half
    return to_key, -(mean @ to_key)[None], inverse @ vectors * half * (digits > 0), digits


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symmetric square root of a second moment, and its inverse."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=_SMALLEST * values.max().clamp(min=1e-30))
    return vectors * values.sqrt() @ vectors.mT, vectors * values.rsqrt() @ vectors.mT


def allocate(variances: Tensor, bits: int, most: int = MAX_DIGITS) -> Tensor:
    """Assign bits one by one, each to the coordinate where it removes the most error.

    Args:
        variances: float64 [C]; bits: at most `MAX_DIGITS` per coordinate.
        most: bits per coordinate; raised if they would not have room for all bits.
    Returns: float64 [C], integers that sum to `bits`.
    """
    most = max(most, math.ceil(bits / len(variances)))
    left = torch.tensor((1.0, *DISTORTIONS), dtype=torch.float64)
    saved = torch.cat([left[:-1] - left[1:], torch.zeros(1, dtype=torch.float64)])  # by the next digit
    digits = torch.zeros(len(variances), dtype=torch.int64)
    for _ in range(bits):
        digits[(variances * saved[digits]).where(digits < most, -1.0).argmax()] += 1
    return digits.double()


def even(coordinates: int, bits: int) -> Tensor:
    """Distribute bits evenly: float32 [C], for a hasher that has seen no data."""
    quotient, more = divmod(bits, coordinates)
    return torch.tensor([quotient + (i < more) for i in range(coordinates)], dtype=torch.float32)
