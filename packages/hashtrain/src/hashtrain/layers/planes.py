"""Small MLPs beside a rotation: one per KV head for keys, one per query head for queries."""

from __future__ import annotations

import math

import hashcore
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hashtrain.config import HasherConfig
from hashtrain.layers.base import Draw, LayerHasher, normal, rotation, uniform
from hashtrain.surrogate import quantised


class Planes(LayerHasher):
    """Bits of a rotation plus a small MLP per KV head; queries of a group summed, then quantised to bit planes."""

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        self.planes = config.planes
        r = torch.stack([rotation(self.d, self.bits, generator) for _ in range(self.hkv)])
        self.key = _SkipMlp(r, config, generator)
        self.query = _SkipMlp(r.repeat_interleave(self.group, 0), config, generator)

    @classmethod
    def shapes(cls, config: HasherConfig) -> dict[str, tuple[int, ...]]:
        parts = {"key": config.shape.num_kv_heads, "query": config.shape.num_query_heads}
        found = {
            f"{part}.{name}": size for part, n in parts.items() for name, size in _SkipMlp.shapes(n, config).items()
        }
        return {**super().shapes(config), **found}

    def query_weight(self, q: Tensor) -> Tensor:
        """Sum the group's query functions: [B, Hq, T, D] -> [B, Hkv, T, bits]."""
        return self.by_group(self.query(q)).sum(2)

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        codes = hashcore.pack(self.key(k))
        return codes.repeat_interleave(self.group, 1) if per_query_head else codes

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        return hashcore.planes(self.query(q) if per_query_head else self.query_weight(q), self.planes)

    def soft_queries(self, q: Tensor) -> Tensor:
        return quantised(self.query_weight(q), self.planes)

    def soft_keys(self, k: Tensor) -> Tensor:
        return self.sign(self.key(k))


class GroupXnor(Planes):
    """The functions of `planes`, with one bit a query head as in the paper: the group's codes are summed by eq. 3."""

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        codes = hashcore.pack(self.query(q))  # [B, Hq, T, W]
        if per_query_head:
            return codes.unsqueeze(-2), (1,)
        return hashcore.group_planes(self.by_group(codes).transpose(2, 3))

    def soft_queries(self, q: Tensor) -> Tensor:
        return self.by_group(self.sign(self.query(q))).mean(2)


class _SkipMlp(nn.Module):
    """x R + SiLU(x W1 + b1) W2 + b2, a set of weights per head; starts as the rotation R."""

    def __init__(self, rotations: Tensor, config: HasherConfig, generator: Draw):
        super().__init__()
        heads, d, bits = rotations.shape
        start = rotations if config.init == "rotation" else uniform((heads, d, bits), d, generator)
        self.r = nn.Parameter(start.clone())
        self.w1 = nn.Parameter(normal((heads, d, config.hidden), generator) / math.sqrt(d))
        self.b1 = nn.Parameter(torch.zeros(heads, 1, config.hidden))
        self.w2 = nn.Parameter(normal((heads, config.hidden, bits), generator) * 0.01)
        self.b2 = nn.Parameter(torch.zeros(heads, 1, bits))

    @staticmethod
    def shapes(heads: int, config: HasherConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor."""
        d, hidden, bits = config.shape.head_dim, config.hidden, config.bits
        w1, w2 = (heads, d, hidden), (heads, hidden, bits)
        return {"r": (heads, d, bits), "w1": w1, "b1": (heads, 1, hidden), "w2": w2, "b2": (heads, 1, bits)}

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x @ self.r + F.silu(x @ self.w1 + self.b1) @ self.w2 + self.b2
