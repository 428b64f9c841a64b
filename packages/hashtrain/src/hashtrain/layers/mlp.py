"""A linear map plus a small MLP, with separate weights per head: the hash functions of our variants."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hashtrain.layers.base import Draw, normal

Sizes = dict[str, tuple[int, ...]]


class SkipMlp(nn.Module):
    """x R + SiLU(x W1 + b1) W2 + b2 for x [B, heads, T, d]; close to x R at the start.

    Args:
        start: R, float32 [heads, d, out].
        hidden: width of the MLP.
    """

    def __init__(self, start: Tensor, hidden: int, generator: Draw):
        super().__init__()
        heads, d, out = start.shape
        self.r: nn.Parameter = nn.Parameter(start.clone())
        self.w1: nn.Parameter = nn.Parameter(normal((heads, d, hidden), generator) / math.sqrt(d))
        self.b1: nn.Parameter = nn.Parameter(torch.zeros(heads, 1, hidden))
        self.w2: nn.Parameter = nn.Parameter(normal((heads, hidden, out), generator) * 0.01)
        self.b2: nn.Parameter = nn.Parameter(torch.zeros(heads, 1, out))

    @staticmethod
    def shapes(prefix: str, heads: int, d: int, hidden: int, out: int) -> Sizes:
        """Return the shape of each tensor by its name below `prefix`."""
        w1, w2 = (heads, d, hidden), (heads, hidden, out)
        sizes = {"r": (heads, d, out), "w1": w1, "b1": (heads, 1, hidden), "w2": w2, "b2": (heads, 1, out)}
        return {f"{prefix}.{name}": size for name, size in sizes.items()}

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x @ self.r + F.silu(x @ self.w1 + self.b1) @ self.w2 + self.b2
