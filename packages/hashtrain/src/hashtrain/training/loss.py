"""Training losses: the Bradley-Terry ranking loss (docs/algorithm.md, eq. 10) and its ablations."""

import torch
from torch import Tensor
from torch.nn import functional as F

LOSSES = ("ranking", "reconstruction", "mse")
"""Names of the losses; `mse` is `squared_error`."""


def ranking_loss(top: Tensor, rest: Tensor, valid: Tensor, beta: float = 1.0, alpha: float = 3.0) -> Tensor:
    """Average softplus(-(beta (top - rest) - alpha)) over all valid pairs.

    Args:
        top: scores of tokens that should win, [..., A], in units of +-bits (2 matches - bits).
        rest: scores of tokens that should lose, [..., C]; valid: bool [..., C], which of them count.
        beta, alpha: slope and margin; the defaults are the paper's.
    Returns: a scalar; 0 if no pair is valid. On the CPU float32 scores go through one kernel, four times as fast.
    Source: docs/algorithm.md, eq. 10; paper, section 3.3.
    """
    valid = valid.expand(rest.shape)
    if top.device.type == rest.device.type == "cpu" and top.dtype == rest.dtype == torch.float32:
        from hashtrain.training.pair_loss import pair_loss  # brings numba, which the commands' --help need not wait for

        return pair_loss(top, rest, valid, beta, alpha)
    losses = F.softplus(alpha - beta * (top[..., :, None] - rest[..., None, :]))
    weight = valid[..., None, :].to(losses.dtype)
    return (losses * weight).sum() / (weight.sum() * top.shape[-1]).clamp(min=1)


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
