"""A rotation plus a small MLP: one per KV head for keys, one per query head for queries."""

import hashcore
from torch import Tensor

from hashtrain.config import HasherConfig
from hashtrain.layers.base import Draw, LayerHasher, SkipMlp, rotations
from hashtrain.layers.surrogate import quantised, signs


class Planes(LayerHasher):
    """Signs of a rotation plus a small MLP per KV head; a group's queries are summed, then quantised to bit planes."""

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        self.planes: int = config.planes
        r = rotations(self.hkv, self.d, self.bits, generator)
        self.key: SkipMlp = SkipMlp(r, config.hidden, generator)
        self.query: SkipMlp = SkipMlp(r.repeat_interleave(self.group, 0), config.hidden, generator)

    def query_weight(self, q: Tensor) -> Tensor:
        """Sum the group's query functions: [B, Hq, T, D] -> [B, Hkv, T, bits]."""
        return self.by_group(self.query(q)).sum(2)

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        codes = hashcore.pack(self.key(k))
        return codes.repeat_interleave(self.group, 1) if per_query_head else codes

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        weight = self.query(q) if per_query_head else self.query_weight(q)
        return hashcore.planes(weight, self.planes, check=False)

    def soft_queries(self, q: Tensor) -> Tensor:
        rounded, largest = quantised(self.query_weight(q), self.planes)
        return rounded / largest

    def soft_keys(self, k: Tensor) -> Tensor:
        return signs(self.key(k))
