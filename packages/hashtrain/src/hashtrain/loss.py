"""The Bradley-Terry ranking loss (docs/algorithm.md, eq. 10)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def ranking_loss(top: Tensor, rest: Tensor, valid: Tensor, beta: float = 1.0, alpha: float = 3.0) -> Tensor:
    """Average softplus(-(beta (top - rest) - alpha)) over all valid pairs.

    Args:
        top: scores of tokens that should win, [..., A], in units of +-bits (2 matches - bits).
        rest: scores of tokens that should lose, [..., C]; valid: bool [..., C], which of them count.
        beta, alpha: slope and margin; the defaults are the paper's.
    Returns: a scalar; 0 if no pair is valid. Source: docs/algorithm.md, eq. 10; paper, section 3.3.
    """
    losses = F.softplus(alpha - beta * (top[..., :, None] - rest[..., None, :]))
    weight = valid[..., None, :].to(losses.dtype)
    return (losses * weight).sum() / (weight.sum() * top.shape[-1]).clamp(min=1)
