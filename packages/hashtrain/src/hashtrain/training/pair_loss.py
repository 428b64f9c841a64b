"""The ranking loss of all pairs and its gradient in one pass on the CPU, compiled by numba.

A pair's term needs exp(alpha - beta (t - r)) = exp(alpha - beta t) exp(beta r): one exponential for each token instead
of one for each pair. The logarithms of a token's pairs are taken together, as the logarithm of a product.
"""

from typing import Any

import numba
import numpy as np
import torch
from hashcore.cpu.threads import compiled
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

_LARGE, _FAR, _TERMS = 85.0, 300.0, 8
"""Above _LARGE softplus(x) = x in float64, and a product of _TERMS terms below it is finite, as are products of two
exponentials of numbers below _FAR."""

Doubles = NDArray[np.float64]


def pair_loss(top: Tensor, rest: Tensor, valid: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute the ranking loss of float32 scores on the CPU, with its gradient, in float64.

    Args: as for `loss.ranking_loss`. Returns: float32 scalar. Source: docs/algorithm.md, eq. 10.
    """
    return _PairLoss.apply(top, rest, valid, beta, alpha)


class _PairLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, top: Tensor, rest: Tensor, valid: Tensor, beta: float, alpha: float) -> Tensor:
        any_score = top[..., :1].double()
        a = (alpha - beta * (top - any_score)).reshape(-1, top.shape[-1])
        b = (beta * (rest - any_score)).reshape(-1, rest.shape[-1])
        weight = valid.double().reshape(b.shape)
        product, excess, by_rest, by_top = (torch.empty_like(x) for x in (b, b, b, a))
        grown = b.clamp(max=2 * _FAR).exp_()
        arrays = (x.numpy() for x in (a, b, grown, weight, product, excess, by_top, by_rest))
        compiled(compare)(*arrays)
        count = (weight.sum() * top.shape[-1]).clamp(min=1)
        slopes = -beta * by_top / count, beta * by_rest / count
        ctx.save_for_backward(*(s.float().view(x.shape) for s, x in zip(slopes, (top, rest), strict=True)))
        return (((product.log() + excess) * weight).sum() / count).float()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride] of one result
        top, rest = ctx.saved_tensors
        return top * grad, rest * grad, None, None, None


def compare(
    top: Doubles, rest: Doubles, grown: Doubles, valid: Doubles, product: Doubles, excess: Doubles, by_top: Doubles,
    by_rest: Doubles,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Compare each row's A tokens of the target with its C others; all arrays are contiguous.

    With x = top + rest of a pair, its term is softplus(x) and its slope 1 / (1 + exp(-x)).

    Args:
        top: alpha - beta times the score, [N, A]; rest: beta times the score, [N, C]; both relative to any score;
            grown: exp(rest), of at most exp(2 _FAR), [N, C]; valid: 1 or 0, [N, C].
        product, excess: written: the terms of each token of `rest` sum to log(product) + excess, [N, C].
        by_top, by_rest: written: summed slopes of the valid pairs of each token, [N, A] and [N, C].
    """
    for row in range(len(top)):
        product[row] = 1.0
        excess[row] = 0.0
        by_rest[row] = 0.0
        for a in range(top.shape[1]):
            parts = product[row], excess[row], by_rest[row]
            by_top[row, a] = _one(top[row, a], rest[row], grown[row], valid[row], *parts)
            if a % _TERMS == _TERMS - 1 and a + 1 < top.shape[1]:
                excess[row] += np.log(product[row])
                product[row] = 1.0


@numba.njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _one(
    z: float, rest: Any, grown: Any, valid: Any, product: Any, excess: Any, by_rest: Any
) -> float:  # pragma: no cover - compiled
    """Add the pairs of one token of the target."""
    own, total = np.exp(z), 0.0
    if abs(z) > _FAR:
        own, grown = 1.0, np.exp(np.minimum(z + rest, 2 * _FAR))
    for c in range(len(rest)):
        large = z + rest[c] > _LARGE
        term = 1.0 if large else 1.0 + own * grown[c]
        slope = valid[c] * (1.0 if large else 1.0 - 1.0 / term)
        product[c] *= term
        excess[c] += z + rest[c] if large else 0.0
        by_rest[c] += slope
        total += slope
    return total
