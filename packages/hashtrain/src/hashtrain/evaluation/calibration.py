"""Calibration of a trained hasher on captured rows: its remainder's coefficients, and what its selections cost.

The remainder (`hashtrain.evaluation.remainder`) has six numbers for each query head, fitted in closed form.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hashtrain.data.captured import Capture
from hashtrain.evaluation.remainder import (
    Evidence,
    by_head,
    estimated_share,
    features,
    grouped_product,
    linear_values,
    measure,
    taken_values,
)
from hashtrain.layers import LayerHasher
from hashtrain.training.target import logits

FRACTIONS = (0.005, 0.01, 0.02, 0.05)
"""Budgets of the rows used in calibration; the fit holds between them."""
MAX_CONTEXTS, _ROWS, _LEAST_ROWS, _FIRST_ROW = 32, 32, 480, 64
"""Contexts that calibration reads at most; rows that are read at a time; how many at least; the first."""
_ROUNDS, _LEAST_LOGIT = 12, -16.0
"""Rounds of the fit of the weight; the least share that it tells from none: float32 sums do not know smaller ones."""


@torch.no_grad()
def calibrate(hasher: LayerHasher, layer: int, data: Capture, seed: int = 0, output: Tensor | None = None) -> Tensor:
    """Fit `hasher.remainder` on captured queries, keys and values, and measure what each KV head's selection costs.

    One pass over rows of the first `MAX_CONTEXTS` contexts, at `FRACTIONS`: for each query head the weight, then the
    slope by weighted least squares, where all rows count alike, whatever the norm of their output; then the errors.

    Args:
        data: contexts as long as those that the hasher is for: what is fitted to short ones does not hold at others.
        output: the layer's output projection, [Hq Dv, hidden]; None: errors are those of attention itself.
    Returns: the squared errors of the layer's output through each KV head alone, at each budget, summed over the rows
        in the last three quarters of their contexts: float64 [2, Hkv, 4], without the remainder and with it.
    """
    samples = list(_samples(hasher, layer, data, seed))
    hasher.remainder[:, :-1] = fit_weight([(rows.evidence, rows.exact) for rows in samples])
    hasher.remainder[:, -1] = _fit_slope(hasher, samples)
    slopes = by_head(hasher, hasher.remainder[:, -1])[..., None]
    errors = torch.zeros(2, hasher.hkv, len(FRACTIONS), dtype=torch.float64, device="cpu")
    for number, rows in enumerate(samples):  # by context, then by budget
        share = estimated_share(hasher, rows.evidence)[..., None]
        both = rows.selected, torch.lerp(rows.selected, rows.mean + slopes * rows.tilt, share)
        found = torch.stack([_squared((out - rows.dense) * rows.late[:, None], output) for out in both])
        errors[:, :, number % len(FRACTIONS)] += found.cpu()
    return errors


def _squared(gap: Tensor, output: Tensor | None) -> Tensor:
    """Return the squared norm of what each KV head adds to the layer's output, [Hkv, G, R, Dv]: float64 [Hkv]."""
    added = gap.transpose(1, 2).flatten(2)
    if output is not None:
        added = added @ cast(Tensor, output.unflatten(0, (len(gap), -1)))
    return added.double().square().sum((1, 2))


class _Rows(NamedTuple):
    """Rows of a context at one budget, all [Hkv, G, R] or with one more dimension.

    `exact` is the exact `log_weight`; `selected` and `dense` are attention to the selection alone and to all tokens,
    `mean` is the mean value, and `tilt` what a slope of 1 adds to it; `late`, bool [R], says which rows are in the last
    three quarters, where budgets are of more than a few tokens.
    """

    evidence: Evidence
    exact: Tensor
    selected: Tensor
    dense: Tensor
    mean: Tensor
    tilt: Tensor
    late: Tensor


def _samples(hasher: LayerHasher, layer: int, data: Capture, seed: int) -> Iterator[_Rows]:
    generator, device = torch.Generator().manual_seed(seed * 1_000_003 + layer), hasher.remainder.device
    count = min(len(data), MAX_CONTEXTS)
    for context in [*range(count)] * -(-_LEAST_ROWS // (_ROWS * count)):
        k, scaling = data.keys(context, layer)
        drawn = _draw(k.shape[2], data.stride(context), generator)
        found = data.queries(context, layer, drawn), k, data.values(context, layer), drawn
        q, k, v, rows = (x.to(device) for x in found)
        slopes = torch.full((hasher.hq,), scaling, dtype=torch.float32, device=device)
        mean, tilt = (x[0] for x in linear_values(q, k, v, rows, slopes))
        values = v[0].float()
        found = logits(q, k, rows, scaling)[0]
        dense = grouped_product(found.softmax(-1), values)
        for e, exact, shown, tokens in measure(hasher, q, k, rows, scaling, FRACTIONS, found):
            selected = torch.einsum("hgrk,hrkd->hgrd", shown.softmax(-1), taken_values(values, tokens))
            yield _Rows(e, exact, selected, dense, mean, tilt, rows >= k.shape[2] // 4)


def _draw(tokens: int, apart: int, generator: torch.Generator) -> Tensor:
    """Draw rows of a context from a sixteenth of it on, multiples of `apart`, evenly over their roots: int64 [_ROWS].

    Drawn evenly, few would see the lengths at which most texts end; evenly over their logarithms, few the longest.
    """
    least = max(tokens // 16, min(_FIRST_ROW, tokens - 1)) ** 0.5
    part = torch.rand(_ROWS, generator=generator, dtype=torch.float64, device="cpu")
    return (least + part * (tokens**0.5 - least)).square().long().clamp(max=tokens - 1) // apart * apart


def fit_weight(samples: Sequence[tuple[Evidence, Tensor]]) -> Tensor:
    """Fit each query head's coefficients of `log_weight` (eq. 15) by logistic regression of the share r (eq. 16).

    1. Weighted least squares on the logit of the exact share, with weights r (1 - r), the sigmoid's slope there.
    2. Rows that leave nothing out have no weight then: overestimating their share is free, and whole heads are. With
       the sigmoid's secant, from the estimate to the exact logit, as weight, the normal equations say that the errors
       of the shares, not of their logits, sum to zero. Weights go half of the way there in each round: all of it, they
       may swing.

    Args: samples: the evidence of some rows and their exact `log_weight`, both [Hkv, G, R] or broadcast to it.
    Returns: float64 [Hq, 5].
    """
    parts = list[tuple[Tensor, ...]]()
    for e, exact in samples:
        offset = (e.visible - e.selected).log() - e.lse  # from the estimate of one token to the logit of the share
        parts.append(tuple(x.flatten(0, 1) for x in (features(e), exact - e.lse, offset.expand_as(exact))))
    x, wanted, offset = (torch.cat(found, dim=1).double().cpu() for found in zip(*parts, strict=True))
    counts = offset.isfinite()  # false where every visible token was selected
    offset, wanted = torch.where(counts, offset, 0.0), wanted.clamp(min=_LEAST_LOGIT)

    def solved(weight: Tensor) -> Tensor:
        root = torch.where(counts, weight, 0.0).sqrt()[..., None]
        # gelsd allows dependent columns, as when every context is short or every count is 1.
        return cast(Tensor, torch.linalg.lstsq(x * root, (wanted - offset)[..., None] * root, driver="gelsd").solution)

    weight = _slope(wanted)
    found = solved(weight)
    for _ in range(_ROUNDS):
        weight = (weight + _secant((x @ found)[..., 0] + offset, wanted)) / 2
        found = solved(weight)
    return found[..., 0]


def _slope(logit: Tensor) -> Tensor:
    """Return the derivative of the sigmoid."""
    return torch.sigmoid(logit) * torch.sigmoid(-logit)


def _secant(a: Tensor, b: Tensor) -> Tensor:
    """Return the slope of the sigmoid's secant between two logits; where they are equal, of its tangent."""
    near = (a - b).abs() < 1e-4
    return torch.where(near, _slope(b), (torch.sigmoid(a) - torch.sigmoid(b)) / torch.where(near, 1.0, a - b))


def _fit_slope(hasher: LayerHasher, samples: Sequence[_Rows]) -> Tensor:
    """Return the slope of each query head that brings attention closest to dense, float64 [Hq]."""
    product = square = torch.zeros(hasher.hkv, hasher.group, dtype=torch.float64, device=hasher.remainder.device)
    for e, _, selected, dense, mean, tilt, _ in samples:
        share = estimated_share(hasher, e)[..., None]
        missing = dense - torch.lerp(selected, mean, share)
        size = dense.square().sum(-1, keepdim=True).clamp(min=1e-12)
        product = product + (missing * share * tilt / size).double().sum((-1, -2))
        square = square + ((share * tilt).square() / size).double().sum((-1, -2))
    return (product / square.clamp(min=1e-12)).flatten()
