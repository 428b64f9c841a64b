"""Training losses: the Bradley-Terry ranking loss (docs/algorithm.md, eq. 10) and its ablations."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOSSES = ("ranking", "reconstruction", "mse")
"""Names of the losses; `mse` is `squared_error`."""
_FACTORS = 64
"""Most factors of a product, each at least 1/2: more than 126 might underflow."""


def ranking_loss(top: Tensor, rest: Tensor, valid: Tensor, beta: float = 1.0, alpha: float = 3.0) -> Tensor:
    """Average softplus(-(beta (top - rest) - alpha)) over all valid pairs.

    Args:
        top: scores of tokens that should win, [..., A], in units of +-bits (2 matches - bits).
        rest: scores of tokens that should lose, [..., C]; valid: bool [..., C], which of them count.
        beta, alpha: slope and margin; the defaults are the paper's.
    Returns: a scalar; 0 if no pair is valid.
    Source: docs/algorithm.md, eq. 10; paper, section 3.3.
    """
    wide = torch.promote_types(rest.dtype, torch.float32)  # products and counts need more than 16 bits
    return _RankingLoss.apply(top.to(wide), rest.to(wide), valid.expand(rest.shape), beta, alpha)


class _RankingLoss(torch.autograd.Function):
    """In fewer passes over all pairs than torch's own derivative, which takes twice as long."""

    @staticmethod
    def forward(ctx: Any, top: Tensor, rest: Tensor, valid: Tensor, beta: float, alpha: float) -> Tensor:
        count = (valid.sum() * top.shape[-1]).clamp(min=1).to(rest.dtype)
        others = (beta * rest + alpha).masked_fill(~valid, -torch.inf)  # their terms and slopes are 0
        x = others[..., None, :] - (beta * top)[..., :, None]
        slope = torch.sigmoid(x)
        ctx.save_for_backward(slope.sum(-1).mul_(-beta / count), slope.sum(-2).mul_(beta / count))
        # softplus(x) = max(x, 0) - log max(s, 1 - s) for s = sigmoid(x): one logarithm for a product of many pairs.
        total = x.clamp_(min=0).sum()
        larger = torch.maximum(slope, torch.sub(1, slope, out=x), out=x)
        for some in cast("tuple[Tensor, ...]", larger.split(_FACTORS, -2)):
            total = total - some.prod(-2).log_().sum()
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] of one result
        top, rest = ctx.saved_tensors
        return top * grad, rest * grad, None, None, None


def reconstruction_loss(scores: Tensor, logits: Tensor, valid: Tensor) -> Tensor:
    """Return the share of the exact logits' variance that the scores do not explain: a reconstruction ablation.

    The paper uses the mean squared error of estimated scores (`squared_error`). Here the scores of each row are first
    scaled and shifted optimally, which leaves `1 - correlation^2`, so the choice of units cannot hurt the baseline.

    Args:
        scores: estimated, [..., C]; logits: exact, [..., C]; valid: bool [..., C], which of them count.
    Returns: a scalar, the mean over rows. Source: docs/algorithm.md, eq. 17; paper, section 3.3 and its ablation.
    """
    weight = valid.to(scores.dtype)
    count = weight.sum(-1, keepdim=True).clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(valid, x, 0.0)
        return (x - x.sum(-1, keepdim=True) / count) * weight

    s, y = centred(scores), centred(logits)
    explained = (s * y).sum(-1).square() / ((s * s).sum(-1) * (y * y).sum(-1)).clamp(min=1e-12)
    return (1 - explained).mean()


def squared_error(scores: Tensor, products: Tensor, valid: Tensor) -> Tensor:
    """Average (score - q . k)^2: the paper's reconstruction loss, without scaling or shifting.

    Args: as for `reconstruction_loss`.
    Returns: a scalar, the mean over rows. Source: docs/algorithm.md, eq. 17; paper, section 3.3 and its ablation.
    """
    weight = valid.to(scores.dtype)
    return ((scores - products).square() * weight).sum(-1).div(weight.sum(-1).clamp(min=1)).mean()
