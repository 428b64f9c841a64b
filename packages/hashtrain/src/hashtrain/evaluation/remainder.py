"""The remainder: the contribution of the unselected tokens, added back as one token (docs/algorithm.md, eq. 15, 16).

A selection drops a tenth to a half of the softmax, in some layers three quarters. If keys were normally distributed and
values linear in them, the value of the dropped tokens would be the mean value plus the covariance of values and keys
times the query, as in linear attention; a cache can maintain both. The weight is predicted from the selected logits and
the logit of the mean key. Each query head has five coefficients, fitted here in closed form on captured rows.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hashtrain.data.captured import Capture
from hashtrain.evaluation.metrics import best_searched
from hashtrain.layers import LayerHasher
from hashtrain.training.target import always_read_tokens, logits

FRACTIONS = (0.005, 0.01, 0.02, 0.05)
"""Budgets of the rows used in calibration; the fit holds between them."""
MAX_CONTEXTS, _ROWS, _LEAST_ROWS, _FIRST_ROW = 32, 32, 480, 64
"""Contexts that calibration reads at most; rows that are read at a time; how many at least; the first."""
_ROUNDS, _LEAST_LOGIT = 12, -16.0
"""Rounds of the fit of the weight; the least share that it tells from none: float32 sums do not know smaller ones."""


class Evidence(NamedTuple):
    """Per-row, per-query-head statistics that sparse attention has after attending: tensors that broadcast."""

    mean: Tensor
    """Mean logit of the selected tokens."""
    lse: Tensor
    """log sum exp of their logits."""
    mean_key: Tensor
    """Logit of the mean of all visible keys: scaling q . mean(k)."""
    visible: Tensor
    """Number of visible tokens."""
    selected: Tensor
    """Number of selected tokens."""


def log_weight(coefficients: Tensor, e: Evidence) -> Tensor:
    """Estimate the log of the summed exp(logit) of a row's visible but unselected tokens.

    Args:
        coefficients: all but the last of `LayerHasher.remainder`, [..., 5], broadcast against the evidence.
        e: see `Evidence`; every row has selected at least one token.
    Returns: float32; -inf for rows that selected everything visible. An unselected token never weighs more than the
        mean selected one.
    Source: docs/algorithm.md, eq. 15.
    """
    selected = e.selected.float()
    typical = (_features(e) * coefficients).sum(-1)
    return torch.minimum(typical, e.lse - selected.log()) + (e.visible - e.selected).float().log()


def linear_values(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate the value of what each row leaves out: mean v + slope cov(v, k) q, over the visible tokens.

    Args:
        q: queries of the rows, [B, Hq, R, D]; k: [B, Hkv, T, D]; v: [B, Hkv, T, Dv]; positions: int64 [R].
        slopes: one per query head, multiplied by the attention scaling: [Hq].
    Returns: the two terms, float32 [B, Hkv, 1, R, Dv] and [B, Hkv, G, R, Dv]. Source: docs/algorithm.md, eq. 16.
    """
    hkv, t = k.shape[1], k.shape[2]
    steep = cast(Tensor, (q.float() * slopes[:, None, None]).unflatten(1, (hkv, -1)))  # [B, Hkv, G, R, D]
    visible = (positions + 1)[:, None].float()
    unseen = torch.arange(t, device=positions.device) > positions[:, None]
    mean_k, mean_v = (prefix_means(x, positions)[:, :, None] for x in (k, v))
    products = grouped_product(steep, k.float().mT).masked_fill_(unseen, 0)
    tilt = grouped_product(products, v.float()) / visible - (steep * mean_k).sum(-1, keepdim=True) * mean_v
    return mean_v, tilt


def prefix_means(x: Tensor, positions: Tensor) -> Tensor:
    """Return the mean of the first positions[r] + 1 rows of x [..., T, D], summed in float64: float32 [..., R, D]."""
    return x.double().cumsum(-2)[..., positions, :].div((positions + 1)[:, None]).float()


def grouped_product(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply [..., G, R, N] by [..., N, M], which the rows of a group share: [..., G, R, M].

    By broadcasting, torch would copy the second for each of the G.
    """
    return cast(Tensor, (rows.flatten(-3, -2) @ shared).unflatten(-2, rows.shape[-3:-1]))


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


def by_head(hasher: LayerHasher, x: Tensor) -> Tensor:
    """View numbers of query heads, [Hq, ...], beside rows: [Hkv, G, 1, ...]."""
    return cast(Tensor, x.unflatten(0, (hasher.hkv, hasher.group)))[:, :, None]


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
    for context in [*range(count)] * max(1, _LEAST_ROWS // (_ROWS * count)):
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
            selected = torch.einsum("hgrk,hrkd->hgrd", shown.softmax(-1), _taken(values, tokens))
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
        parts.append(tuple(x.flatten(0, 1) for x in (_features(e), exact - e.lse, offset.expand_as(exact))))
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


@torch.no_grad()
def attend(
    hasher: LayerHasher,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scaling: float,
    fraction: float,
    exact: Tensor,
    own: Tensor,
) -> Tensor:
    """Attend from some rows to what they select, with the remainder if it is fitted: [Hkv, G, R, Dv].

    Args:
        v: all values, [1, Hkv, T, Dv]; own: each row's own value in place of the one in `v`, [Hkv, R, Dv].
        others: as for `measure`.
    """
    e, _, shown, tokens = next(measure(hasher, q, k, positions, scaling, (fraction,), exact))
    taken = torch.where((tokens == positions[:, None])[..., None], own[:, :, None], _taken(v[0].float(), tokens))
    out = torch.einsum("hgrk,hrkd->hgrd", shown.softmax(-1), taken)
    if not hasher.calibrated:
        return out
    value = torch.add(*linear_values(q, k, v, positions, hasher.remainder[:, -1] * scaling))[0]
    return torch.lerp(out, value, estimated_share(hasher, e)[..., None])


def _taken(values: Tensor, tokens: Tensor) -> Tensor:
    """Return the values [Hkv, T, Dv] of tokens [Hkv, R, K]: [Hkv, R, K, Dv]."""
    return values[torch.arange(len(values), device=values.device)[:, None, None], tokens]


@torch.no_grad()
def measure(
    hasher: LayerHasher,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    scaling: float,
    fractions: Sequence[float],
    exact: Tensor | None = None,
) -> Iterator[tuple[Evidence, Tensor, Tensor, Tensor]]:
    """Select tokens for the given rows and compare their logits with those of all tokens.

    Args:
        q: queries of the rows, [1, Hq, R, D]; k: all keys, [1, Hkv, T, D]; positions: int64 [R].
        fractions: budgets, of each row's visible tokens (eq. 7).
        exact: the rows' `hashtrain.training.target.logits` [Hkv, G, R, T], if known.
    Yields: for each fraction the evidence, each [Hkv, G, R] or broadcast to it; the exact `log_weight`; the logits of
        the tokens read [Hkv, G, R, K], -inf in unused slots; and these tokens, int64 [Hkv, R, K], 0 in unused slots.
    """
    scores = hasher.scores(q, k)[0]
    exact = logits(q, k, positions, scaling)[0] if exact is None else exact
    grouped = cast(Tensor, q[0].float().unflatten(0, (k.shape[1], -1)))  # [Hkv, G, R, D]
    mean_key = (grouped * prefix_means(k[0], positions)[:, None]).sum(-1) * scaling
    whole = exact.logsumexp(-1)
    for fraction in fractions:
        searched, ends = best_searched(scores, positions, fraction), always_read_tokens(positions)
        tokens = torch.cat([ends.expand(*searched.shape[:-1], -1), searched], -1)
        unused, tokens = (tokens < 0)[:, None], tokens.clamp(min=0)
        found, read = exact.gather(-1, tokens[:, None].expand(*exact.shape[:3], -1)), (~unused).sum(-1)
        mean, shown = found.masked_fill(unused, 0).sum(-1) / read, found.masked_fill(unused, -torch.inf)
        e = Evidence(mean, shown.logsumexp(-1), mean_key, positions + 1, read)
        # float32 leaves a share below 1e-7 unknown; it has no weight in any sum here.
        rest = whole + torch.log1p(-torch.exp(e.lse - whole).clamp(max=1))
        yield e, rest.masked_fill(e.selected >= e.visible, -torch.inf), shown, tokens


def estimated_share(hasher: LayerHasher, e: Evidence) -> Tensor:
    """Return the remainder's estimated share of the softmax, [Hkv, G, R]."""
    return torch.sigmoid(log_weight(by_head(hasher, hasher.remainder[:, :-1]), e) - e.lse)


def _features(e: Evidence) -> Tensor:
    """[..., 5]: one, mean selected logit, logit of the mean key, logs of the mean selected weight and of the number.

    Budgets and lengths both vary the number selected, so that the fit holds between them and a little beyond. With the
    number of visible tokens, too, fits to contexts of 8,192 tokens failed at 32,768 (docs/log.md, 2026-11-27).
    """
    number = e.selected.float().log()
    columns = torch.ones_like(e.mean), e.mean, e.mean_key, e.lse - number, number
    return torch.stack(cast("tuple[Tensor, ...]", torch.broadcast_tensors(*columns)), -1)
