"""The paper's ablation: vectors are projected down and compared by inner products instead of bits."""

import torch
from torch import Tensor, nn

from hashtrain.config import HasherConfig
from hashtrain.layers.base import Draw, LayerHasher, rotation

COMPRESSION = 16  # as in the paper: 8 bfloat16 numbers for a head of 128, the same bytes as 128 bits

_NO_CODES = "down-proj keeps numbers instead of bits: it can be evaluated, but not decode; use another variant"


class DownProjection(LayerHasher):
    """`D / 16` bfloat16 numbers per key and KV head; scores are inner products with the group's summed queries."""

    has_codes = False

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        size = down_size(config)
        r = torch.stack([rotation(self.d, size, generator) for _ in range(self.hkv)])
        self.key: nn.Parameter = nn.Parameter(r.clone())
        self.query: nn.Parameter = nn.Parameter(r.repeat_interleave(self.group, 0))

    @classmethod
    def shapes(cls, config: HasherConfig) -> dict[str, tuple[int, ...]]:
        hq, hkv, d = config.shape.num_query_heads, config.shape.num_kv_heads, config.shape.head_dim
        size = down_size(config)
        return {**super().shapes(config), "key": (hkv, d, size), "query": (hq, d, size)}

    @property
    def key_bits(self) -> int:
        return 16 * self.key.shape[-1]

    def scores(self, q: Tensor, k: Tensor, per_query_head: bool = False) -> Tensor:
        down = q.float() @ self.query
        keys = (k.float() @ self.key).bfloat16().float()
        if per_query_head:
            return down @ keys.repeat_interleave(self.group, 1).mT
        return self.by_group(down).sum(2) @ keys.mT

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        raise ValueError(_NO_CODES)

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        raise ValueError(_NO_CODES)

    def soft_queries(self, q: Tensor) -> Tensor:
        return self.by_group(q.float() @ self.query).sum(2)

    def soft_keys(self, k: Tensor) -> Tensor:
        return k.float() @ self.key


def down_size(config: HasherConfig) -> int:
    """Return the number of values per key."""
    return max(1, config.shape.head_dim // COMPRESSION)
