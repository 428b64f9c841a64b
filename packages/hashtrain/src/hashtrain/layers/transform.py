"""Keys as levels of a few coordinates, whose binary digits form the code; started by transform coding, then trained."""

from typing import NamedTuple

import hashcore
import torch
from torch import Tensor, nn

from hashtrain.config import MAX_DIGITS, HasherConfig
from hashtrain.data.captured import Capture
from hashtrain.layers import transform_coding
from hashtrain.layers.base import Draw, LayerHasher, rotation
from hashtrain.layers.mlp import SkipMlp
from hashtrain.layers.surrogate import digits, quantised

CONTEXTS = 16
"""Number of contexts that a start is computed from."""


class Layout(NamedTuple):
    """The digit that each bit of a code stands for, per KV head."""

    coordinate: Tensor
    """int64 [Hkv, bits]."""
    power: Tensor
    """float32 [Hkv, bits]: 1, 2, 4, ..., in descending order."""
    limit: Tensor
    """float32 [Hkv, C]: levels are odd integers from -limit to limit."""


class Transform(LayerHasher):
    """Binary digits of a key's coordinates, more where keys vary more; a query weighs each digit by its power.

    Source: docs/algorithm.md, eq. 18, 19.
    """

    estimates_products = True
    digits: Tensor
    """Binary digits of each coordinate, float32 [Hkv, C]: integers that sum to `bits`. Set only by loading a state."""
    coordinate: Tensor
    power: Tensor
    limit: Tensor

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        self.planes: int = config.planes
        coordinates = _coordinates(config)
        r = torch.stack([rotation(self.d, coordinates, generator) for _ in range(self.hkv)])
        self.key: SkipMlp = SkipMlp(r, config.hidden, generator)
        self.query: SkipMlp = SkipMlp(r.repeat_interleave(self.group, 0), config.hidden, generator)
        shared = transform_coding.even(coordinates, self.bits)
        self.register_buffer("digits", shared.repeat(self.hkv, 1))
        for name in Layout._fields:
            self.register_buffer(name, None, persistent=False)
        self._lay_out()
        self.register_load_state_dict_post_hook(lambda loaded, _: loaded._lay_out())

    @classmethod
    def shapes(cls, config: HasherConfig) -> dict[str, tuple[int, ...]]:
        shape, coordinates = config.shape, _coordinates(config)
        size = (shape.head_dim, config.hidden, coordinates)
        key = SkipMlp.shapes("key", shape.num_kv_heads, *size)
        query = SkipMlp.shapes("query", shape.num_query_heads, *size)
        return {**super().shapes(config), "digits": (shape.num_kv_heads, coordinates), **key, **query}

    @torch.no_grad()
    def start(self, data: Capture, layer: int, most_digits: int = MAX_DIGITS) -> None:
        contexts = (data.read(context, layer)[:2] for context in range(min(len(data), CONTEXTS)))
        device = self.digits.device
        with torch.device("cpu"):  # the sums run on the device; small matrices and the loop over bits are faster here
            found = transform_coding.moments((q.to(device), k.to(device)) for q, k in contexts)
            key, bias, query, shared = transform_coding.start(found, self.bits, self.digits.shape[1], most_digits)
        self.digits.copy_(shared)
        self._lay_out()
        self.key.r.copy_(key)
        self.key.b2.copy_(bias)
        self.query.r.copy_(query.repeat_interleave(self.group, 0))

    def query_parameters(self) -> list[nn.Parameter]:
        return list(self.query.parameters())

    def _lay_out(self) -> None:
        """Derive from `digits` which digit each bit stands for. Raises: ValueError if they are invalid."""
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

    def layout(self) -> Layout:
        """Return which digit each bit stands for."""
        return Layout(self.coordinate, self.power, self.limit)

    def query_weight(self, q: Tensor, per_query_head: bool = False) -> Tensor:
        """Return the weight of each bit: [B, Hq, T, D] -> [B, Hkv, T, bits], or [B, Hq, T, bits] per query head."""
        found, laid = self.query(q), self.layout()
        found = found if per_query_head else self.by_group(found).sum(2)
        repeats = found.shape[1] // self.hkv
        coordinate, power = (x.repeat_interleave(repeats, 0) for x in (laid.coordinate, laid.power))
        return found.gather(-1, _spread(coordinate, found)) * power[:, None]

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        codes = hashcore.pack(self.soft_keys(k))
        return codes.repeat_interleave(self.group, 1) if per_query_head else codes

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        return hashcore.planes(self.query_weight(q, per_query_head), self.planes, check=not q.is_cuda)

    def soft_queries(self, q: Tensor) -> Tensor:
        return quantised(self.query_weight(q), self.planes)[0]

    def soft_keys(self, k: Tensor) -> Tensor:
        with torch.autocast(k.device.type, enabled=False):  # keys are centred after the product: too fine for bfloat16
            z, laid = self.key(k), self.layout()
        return digits(z, _spread(laid.coordinate, z), laid.power[:, None], laid.limit[:, None])


def _coordinates(config: HasherConfig) -> int:
    return min(config.shape.head_dim, config.bits)


def _spread(coordinate: Tensor, x: Tensor) -> Tensor:
    """Expand [H, bits] over the batch rows and tokens of x [B, H, T, C], to index its last dimension."""
    return coordinate[None, :, None].expand(x.shape[0], -1, x.shape[2], -1)
