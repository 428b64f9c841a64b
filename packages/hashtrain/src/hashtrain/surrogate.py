"""The slopes that training uses where the deployed function has none (docs/algorithm.md, eq. 11)."""

from __future__ import annotations

from collections.abc import Callable

import hashcore
import torch
from torch import Tensor

SOFTSIGN_GAMMA = 64.0  # the paper's value, appendix


def softsign(x: Tensor, gamma: float = SOFTSIGN_GAMMA) -> Tensor:
    """Return gamma x / (1 + gamma |x|): a smooth sign, in training only."""
    scaled = gamma * x
    return scaled / (1 + scaled.abs())


def signs(x: Tensor) -> Tensor:
    """Return +-1 as `hashcore.pack` decides it, with the slope 1 / (1 + |x|)^2 going back."""
    return _StraightThroughSign.apply(x)


def quantised(w: Tensor, planes: int) -> Tensor:
    """Return the levels of eq. 5 over their maximum, in [-1, 1]; the slope going back is the quantiser's mean one.

    The levels are those of `hashcore.quantise`, which is deployed: training sees its rounding and clipping.
    """
    top = 2**planes - 1
    levels, scale = hashcore.quantise(w.detach(), planes)
    bound = scale * top
    smooth = torch.minimum(torch.maximum(w, -bound), bound) / bound
    return smooth + (levels.to(w.dtype) / top - smooth).detach()


def estimator(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that stands for the sign in training. Raises: KeyError for another name."""
    return {"straight-through": signs, "softsign": softsign}[name]


class _StraightThroughSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (1 + x.abs()) ** 2
