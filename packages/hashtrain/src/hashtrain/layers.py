"""One layer's hash functions, a module per variant: what maps vectors to bits, and the soft scores that train it.

Every variant answers the same four calls. Per KV head is what is deployed: one code per key and KV head, one selection
per KV head. Per query head is the paper's quality protocol, kept for its tables.
"""

from __future__ import annotations

import math

import hashcore
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hashtrain.config import HasherConfig
from hashtrain.surrogate import quantised, signs, softsign

REMAINDER_TERMS = 5  # of eq. 15

Draw = torch.Generator | None
"""Where a start comes from; None leaves memory as it is, for tensors about to be loaded."""


def rotation(head_dim: int, bits: int, generator: Draw) -> Tensor:
    """Draw a random rotation in SO(head_dim), independent ones side by side when bits > head_dim.

    Returns: float32 [head_dim, bits]. Source: docs/algorithm.md, Variants; paper, appendix (angular LSH).
    """
    if generator is None:
        return torch.empty(head_dim, bits)
    blocks = []
    for _ in range(math.ceil(bits / head_dim)):
        q, r = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))
        q = q * r.diagonal().sign()  # makes the draw uniform over O(d)
        if torch.linalg.det(q) < 0:
            q[:, 0] = -q[:, 0]
        blocks.append(q)
    return torch.cat(blocks, dim=1)[:, :bits].contiguous()


class LayerHasher(nn.Module):
    """Base of the variants; subclasses give `key_values`, `query_values` and the three class facts below."""

    target_heads = "kv"
    """Which attention the training target sums: `kv` (over the group, as deployed) or `query` (each head alone)."""
    trainable = True
    remainder: Tensor
    """Coefficients of eq. 15, float32 [Hq, 5]; zeros until they are fitted."""

    def __init__(self, config: HasherConfig):
        super().__init__()
        shape = config.shape
        self.hq, self.hkv, self.d, self.bits = shape.num_query_heads, shape.num_kv_heads, shape.head_dim, config.bits
        self.group = shape.group
        self.register_buffer("remainder", torch.zeros(self.hq, REMAINDER_TERMS))

    @property
    def calibrated(self) -> bool:
        """Whether `remainder` has been fitted (`hashtrain.remainder.calibrate`)."""
        return bool(self.remainder.any())

    def by_group(self, x: Tensor) -> Tensor:
        """View [B, Hq, T, ...] as [B, Hkv, G, T, ...]."""
        return x.unflatten(1, (self.hkv, self.group))

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, Hkv, T, W], or [B, Hq, T, W] per query head."""
        raise NotImplementedError

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] to planes [B, Hkv, T, P, W] (or [B, Hq, T, P, W]) and the planes' weights."""
        raise NotImplementedError

    def soft_queries(self, q: Tensor) -> Tensor:
        """Hash queries [B, Hq, R, D] with a slope: [B, H, R, bits], H the target's heads."""
        raise NotImplementedError

    def soft_keys(self, k: Tensor) -> Tensor:
        """Hash keys [B, H, T, D], already those of the target's heads, with a slope: [B, H, T, bits].

        The inner product of soft queries and soft keys is the deployed score in units of +-bits.
        """
        raise NotImplementedError


class Lsh(LayerHasher):
    """Signs of a random rotation, one per KV head, shared by its queries. Untrained."""

    trainable = False
    rotation: Tensor

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        rotations = [rotation(self.d, self.bits, generator) for _ in range(self.hkv)]
        self.register_buffer("rotation", torch.stack(rotations))

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        codes = hashcore.pack(k.float() @ self.rotation)
        return codes.repeat_interleave(self.group, 1) if per_query_head else codes

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        codes = hashcore.pack(self.by_group(q.float()) @ self.rotation[:, None])  # [B, Hkv, G, T, W]
        if per_query_head:
            return codes.flatten(1, 2).unsqueeze(-2), (1,)
        return hashcore.group_planes(codes.transpose(2, 3))


class Paper(LayerHasher):
    """The paper's MLP, W2 SiLU(W1 x + b1), one per query head and shared by its queries and keys."""

    target_heads = "query"

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        h, d, hidden, bits = self.hq, self.d, config.hidden, self.bits
        self.w1 = nn.Parameter(_uniform((h, d, hidden), d, generator))
        self.b1 = nn.Parameter(_uniform((h, 1, hidden), d, generator))
        self.w2 = nn.Parameter(_uniform((h, hidden, bits), hidden, generator))
        if config.init == "rotation" and generator is not None:
            self._start_as_rotation(generator)

    @torch.no_grad()
    def _start_as_rotation(self, generator: torch.Generator) -> None:
        # SiLU(x) - SiLU(-x) = x: with W1 = [I, -I] and W2 = [R; -R] the MLP is exactly x R before it is trained.
        d, eye = self.d, torch.eye(self.d)
        r = torch.stack([rotation(d, self.bits, generator) for _ in range(self.hkv)]).repeat_interleave(self.group, 0)
        self.b1.zero_()
        self.w1[:, :, : 2 * d] = torch.cat([eye, -eye], dim=1)
        self.w2[:, :d], self.w2[:, d : 2 * d] = r, -r
        self.w2[:, 2 * d :] = 0

    def values(self, x: Tensor) -> Tensor:
        """Apply each query head's MLP to its own slice: [B, Hq, T, D] -> [B, Hq, T, bits]."""
        return F.silu(x.float() @ self.w1 + self.b1) @ self.w2

    def _codes(self, x: Tensor) -> Tensor:
        return hashcore.pack(self.values(x))

    def _concatenated(self, codes: Tensor) -> Tensor:
        """[B, Hq, T, W] -> [B, Hkv, T, G W]: XNOR of the concatenation is the sum over the group (eq. 2)."""
        return self.by_group(codes).transpose(2, 3).flatten(-2)

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        codes = self._codes(k.repeat_interleave(self.group, 1))
        return codes if per_query_head else self._concatenated(codes)

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        codes = self._codes(q)
        return (codes if per_query_head else self._concatenated(codes)).unsqueeze(-2), (1,)

    def soft_queries(self, q: Tensor) -> Tensor:
        return softsign(self.values(q))

    def soft_keys(self, k: Tensor) -> Tensor:
        return softsign(self.values(k))


class Planes(LayerHasher):
    """Bits of a rotation plus a small MLP per KV head; queries of a group summed, then quantised to bit planes."""

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        self.planes = config.planes
        r = torch.stack([rotation(self.d, self.bits, generator) for _ in range(self.hkv)])
        self.key = _SkipMlp(r, config, generator)
        self.query = _SkipMlp(r.repeat_interleave(self.group, 0), config, generator)

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
        return signs(self.key(k))


class _SkipMlp(nn.Module):
    """x R + SiLU(x W1 + b1) W2 + b2, a set of weights per head; starts as the rotation R."""

    def __init__(self, rotations: Tensor, config: HasherConfig, generator: Draw):
        super().__init__()
        heads, d, bits = rotations.shape
        start = rotations if config.init == "rotation" else _uniform((heads, d, bits), d, generator)
        self.r = nn.Parameter(start.clone())
        self.w1 = nn.Parameter(_normal((heads, d, config.hidden), generator) / math.sqrt(d))
        self.b1 = nn.Parameter(torch.zeros(heads, 1, config.hidden))
        self.w2 = nn.Parameter(_normal((heads, config.hidden, bits), generator) * 0.01)
        self.b2 = nn.Parameter(torch.zeros(heads, 1, bits))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x @ self.r + F.silu(x @ self.w1 + self.b1) @ self.w2 + self.b2


def _normal(size: tuple[int, ...], generator: Draw) -> Tensor:
    return torch.empty(size) if generator is None else torch.randn(size, generator=generator)


def _uniform(size: tuple[int, ...], fan_in: int, generator: Draw) -> Tensor:
    """torch's own start for linear layers: uniform within 1 / sqrt(fan_in)."""
    if generator is None:
        return torch.empty(size)
    return (torch.rand(size, generator=generator) * 2 - 1) / math.sqrt(fan_in)


def shapes(config: HasherConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of one layer, without making any: what a file must hold to be loaded."""
    hq, hkv, d = config.shape.num_query_heads, config.shape.num_kv_heads, config.shape.head_dim
    hidden, bits = config.hidden, config.bits
    common: dict[str, tuple[int, ...]] = {"remainder": (hq, REMAINDER_TERMS)}
    if config.variant == "lsh":
        return {**common, "rotation": (hkv, d, bits)}
    if config.variant == "paper":
        return {**common, "w1": (hq, d, hidden), "b1": (hq, 1, hidden), "w2": (hq, hidden, bits)}

    def skip_mlp(heads: int) -> dict[str, tuple[int, ...]]:
        w1, w2 = (heads, d, hidden), (heads, hidden, bits)
        return {"r": (heads, d, bits), "w1": w1, "b1": (heads, 1, hidden), "w2": w2, "b2": (heads, 1, bits)}

    parts = {"key": skip_mlp(hkv), "query": skip_mlp(hq)}
    return common | {f"{part}.{name}": size for part, tensors in parts.items() for name, size in tensors.items()}


BY_VARIANT: dict[str, type[Lsh] | type[Paper] | type[Planes]] = {"lsh": Lsh, "paper": Paper, "planes": Planes}
