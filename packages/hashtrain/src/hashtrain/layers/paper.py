"""The paper's hash function: one code per query head."""

from collections.abc import Callable

import hashcore
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hashtrain.config import START_STD, HasherConfig, Heads
from hashtrain.layers.base import Draw, LayerHasher, normal, uniform
from hashtrain.layers.surrogate import signs, softsign


class Paper(LayerHasher):
    """The paper's MLP, one per query head, shared by its queries and keys.

    `W2 SiLU(W1 x + b1)` is the paper's formula. With `residual` it matches the authors' published hashers:
    `h = SiLU(W1 x + b1) + x`, `W2 h + b2 + h`, each residual only where the sizes agree.
    """

    target_heads: Heads = "query"
    w1: nn.Parameter
    b1: nn.Parameter
    w2: nn.Parameter
    b2: nn.Parameter  # only with `residual`

    def __init__(self, config: HasherConfig, generator: Draw):
        super().__init__(config)
        h, d, hidden, bits = self.hq, self.d, config.hidden, self.bits
        self.residual: bool = config.residual
        self.sign: Callable[[Tensor], Tensor] = signs if config.estimator == "straight-through" else softsign
        gaussian = config.init == "gaussian"
        sizes = {"w1": (h, d, hidden), "b1": (h, 1, hidden), "w2": (h, hidden, bits)}
        for name, size in (sizes | ({"b2": (h, 1, bits)} if self.residual else {})).items():
            if not (self.residual or gaussian):
                start = uniform(size, hidden if name == "w2" else d, generator)
            elif gaussian or name.startswith("w"):
                start = normal(size, generator) * START_STD
            else:
                start = torch.zeros(size, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(start))

    @property
    def key_bits(self) -> int:
        return self.bits * self.group

    def values(self, x: Tensor) -> Tensor:
        """Apply each query head's MLP to its own slice: [B, Hq, T, D] -> [B, Hq, T, bits]."""
        x = x.float()
        h = F.silu(x @ self.w1 + self.b1)
        if not self.residual:
            return h @ self.w2
        if h.shape == x.shape:
            h = h + x
        y = h @ self.w2 + self.b2
        return y + h if y.shape == h.shape else y

    def _codes(self, x: Tensor) -> Tensor:
        return hashcore.pack(self.values(x))

    def _concatenated(self, codes: Tensor) -> Tensor:
        """[B, Hq, T, W] -> [B, Hkv, T, G W]: XNOR of concatenated codes sums over the group (eq. 2)."""
        return self.by_group(codes).transpose(2, 3).flatten(-2)

    def encode_keys(self, k: Tensor, per_query_head: bool = False) -> Tensor:
        codes = self._codes(k.repeat_interleave(self.group, 1))
        return codes if per_query_head else self._concatenated(codes)

    def encode_queries(self, q: Tensor, per_query_head: bool = False) -> tuple[Tensor, tuple[int, ...]]:
        codes = self._codes(q)
        return (codes if per_query_head else self._concatenated(codes)).unsqueeze(-2), (1,)

    def soft_queries(self, q: Tensor) -> Tensor:
        return self.sign(self.values(q))

    def soft_keys(self, k: Tensor) -> Tensor:
        return self.sign(self.values(k))
