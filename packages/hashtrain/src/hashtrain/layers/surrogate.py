"""Surrogate gradients (docs/algorithm.md, eq. 11): what training uses where the deployed function has no slope."""

import hashcore
import torch
from torch import Tensor

from hashtrain.config import SOFTSIGN_GAMMA


def softsign(x: Tensor, gamma: float = SOFTSIGN_GAMMA) -> Tensor:
    """Return gamma x / (1 + gamma |x|), a smooth sign used only in training."""
    return _Softsign.apply(x, gamma)


def signs(x: Tensor) -> Tensor:
    """Return +-1, as `hashcore.pack` decides it; straight-through, with gradient 1 / (1 + |x|)^2."""
    return _StraightThroughSign.apply(x)


def quantised(w: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """Round weights as in eq. 5; straight-through, with gradient 1, or 0 where the quantiser clips.

    The levels are those of the deployed `hashcore.quantise`, so that training sees its rounding and clipping.

    Args:
        w: [..., bits]; non-finite values give non-finite results.
    Returns: the rounded weights, [..., bits], and the largest possible absolute weight of each row, [..., 1].
    """
    levels, scale = hashcore.quantise(w.detach(), planes, check=False)  # a check would wait for the device
    bound = scale * (2**planes - 1)
    smooth = torch.minimum(torch.maximum(w, -bound), bound)
    return smooth + (levels.to(w.dtype) * scale - smooth).detach(), bound


def digits(z: Tensor, coordinate: Tensor, power: Tensor, limit: Tensor) -> Tensor:
    """Return the binary digits of the levels of coordinates as +-1 (docs/algorithm.md, eq. 19).

    In the backward pass a coordinate gets the gradient of its level: the mean over its digits, weighted by their
    squared powers. That is 1 for a score that weighs digits by their powers, and 0 where the level clips.

    Args:
        z: float32 [B, H, T, C]; NaN has level -limit.
        coordinate: int64 [B, H, T, bits], the coordinate of each bit; power: float32 [H, 1, bits], 1, 2, 4, ...
        limit: float32 [H, 1, C]: levels are odd integers from -limit to limit.
    Returns: float32 [B, H, T, bits].
    """
    return _Digits.apply(z, coordinate, power, limit)


class _Softsign(torch.autograd.Function):
    """In fewer passes than torch's own derivative of a quotient."""

    @staticmethod
    def forward(ctx, x: Tensor, gamma: float) -> Tensor:
        scaled = gamma * x
        below = scaled.abs().add_(1)
        ctx.save_for_backward(below)
        ctx.gamma = gamma
        return scaled.div_(below)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] of one result
        (below,) = ctx.saved_tensors
        return (ctx.gamma * grad).div_(below.square()), None


class _StraightThroughSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] of one result
        (x,) = ctx.saved_tensors
        return grad / (1 + x.abs()) ** 2


class _Digits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, coordinate: Tensor, power: Tensor, limit: Tensor) -> Tensor:
        ctx.save_for_backward(z, coordinate, power, limit)
        levels = (2 * torch.floor(z.nan_to_num(nan=-torch.inf) / 2) + 1).maximum(-limit).minimum(limit)
        numbers = ((levels + limit) / 2).gather(-1, coordinate)
        halves = torch.floor(numbers.div_(power))
        return (halves - 2 * torch.floor(halves / 2)).mul_(2).sub_(1)  # `remainder` takes ten times as long

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] of one result
        z, coordinate, power, limit = ctx.saved_tensors
        by_level = torch.zeros_like(z).scatter_add_(-1, coordinate, grad * power)
        squares = ((limit + 1).square() - 1) / 3  # 1 + 4 + 16 + ...
        inside = z.abs() <= limit + 1
        return by_level / squares.clamp(min=1) * inside, None, None, None
