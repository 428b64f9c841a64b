"""The remainder: the contribution of the unselected tokens, added back as one token (docs/algorithm.md, eq. 15, 16).

A selection drops a tenth to a half of the softmax, in some layers three quarters. If keys were normally distributed and
values linear in them, the value of the dropped tokens would be the mean value plus the covariance of values and keys
times the query, as in linear attention; a cache can maintain both. The weight is predicted from the selected logits and
the logit of the mean key, with five coefficients for each query head (`hashtrain.evaluation.calibration`).
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hashtrain.evaluation.metrics import best_searched
from hashtrain.layers import LayerHasher
from hashtrain.training.target import always_read_tokens, logits


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
    typical = (features(e) * coefficients).sum(-1)
    return torch.minimum(typical, e.lse - selected.log()) + (e.visible - e.selected).float().log()


def features(e: Evidence) -> Tensor:
    """[..., 5]: one, mean selected logit, logit of the mean key, logs of the mean selected weight and of the number.

    Budgets and lengths both vary the number selected, so that the fit holds between them and a little beyond. With the
    number of visible tokens, too, fits to contexts of 8,192 tokens failed at 32,768 (docs/log.md, 2026-11-27).
    """
    number = e.selected.float().log()
    columns = torch.ones_like(e.mean), e.mean, e.mean_key, e.lse - number, number
    return torch.stack(cast("tuple[Tensor, ...]", torch.broadcast_tensors(*columns)), -1)


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


def by_head(hasher: LayerHasher, x: Tensor) -> Tensor:
    """View numbers of query heads, [Hq, ...], beside rows: [Hkv, G, 1, ...]."""
    return cast(Tensor, x.unflatten(0, (hasher.hkv, hasher.group)))[:, :, None]


def estimated_share(hasher: LayerHasher, e: Evidence) -> Tensor:
    """Return the remainder's estimated share of the softmax, [Hkv, G, R]."""
    return torch.sigmoid(log_weight(by_head(hasher, hasher.remainder[:, :-1]), e) - e.lse)


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
    taken = torch.where((tokens == positions[:, None])[..., None], own[:, :, None], taken_values(v[0].float(), tokens))
    out = torch.einsum("hgrk,hrkd->hgrd", shown.softmax(-1), taken)
    if not hasher.calibrated:
        return out
    value = torch.add(*linear_values(q, k, v, positions, hasher.remainder[:, -1] * scaling))[0]
    return torch.lerp(out, value, estimated_share(hasher, e)[..., None])


def taken_values(values: Tensor, tokens: Tensor) -> Tensor:
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
