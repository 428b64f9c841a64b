"""The remainder: what the tokens that were not selected would have added, as one token (docs/algorithm.md, eq. 15, 16).

A selection drops a tenth to a half of the softmax. Its value is close to the mean value of all visible tokens, which a
cache can keep; its weight is predicted from the selected logits and the logit of the mean key, by five numbers per
query head. They are fitted here, in closed form, on captured rows.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hashtrain.capture import Capture
from hashtrain.layers import LayerHasher
from hashtrain.metrics import best, reading
from hashtrain.target import always_read, top_count

FRACTIONS = (0.005, 0.01, 0.02, 0.05)
"""Budgets of the rows that the fit sees: what is fitted holds between them."""
MAX_CONTEXTS, _ROWS, _FIRST_ROW = 32, 32, 64


class Evidence(NamedTuple):
    """What sparse attention knows of each row and query head after it has attended: tensors that broadcast."""

    mean: Tensor
    """Mean logit of the selected tokens."""
    lse: Tensor
    """log sum exp of their logits."""
    mean_key: Tensor
    """Logit of the mean of all visible keys: scaling q . mean(k)."""
    visible: Tensor
    """Tokens the row sees."""
    selected: Tensor
    """Tokens it selected."""


def log_weight(coefficients: Tensor, e: Evidence) -> Tensor:
    """Estimate the log of the summed exp(logit) of all tokens that a row sees and did not select.

    Args:
        coefficients: `LayerHasher.remainder`, [..., 5], broadcast against the evidence.
        e: see `Evidence`; every row has selected at least one token.
    Returns: float32; -inf for rows that selected all they see. An unselected token is never taken to weigh more than
        the mean selected one.
    Source: docs/algorithm.md, eq. 15.
    """
    selected = e.selected.float()
    typical = (_features(e) * coefficients).sum(-1)
    return torch.minimum(typical, e.lse - selected.log()) + (e.visible - e.selected).float().log()


def add_remainder(out: Tensor, lse: Tensor, mean_value: Tensor, log_weight: Tensor) -> Tensor:
    """Add the remainder to softmax attention over a selection, as one more token of that value and weight.

    Args:
        out: attention over the selection, [..., D]; mean_value: mean of all visible values, broadcast against it.
        lse: log sum exp of the selected logits, [...]; log_weight: `log_weight`, [...].
    Returns: float32 [..., D].
    Source: docs/algorithm.md, eq. 16.
    """
    return torch.lerp(out.float(), mean_value.float(), torch.sigmoid(log_weight - lse)[..., None])


@torch.no_grad()
def calibrate(hasher: LayerHasher, layer: int, data: Capture, seed: int = 0) -> None:
    """Fit `hasher.remainder` on captured queries and keys: weighted least squares of eq. 15, for each query head.

    A row counts by what its estimate can change: share (1 - share), the slope of the remainder's share in the softmax.
    """
    generator, device = torch.Generator().manual_seed(seed * 1_000_003 + layer), hasher.remainder.device
    features: list[Tensor] = []
    logs: list[Tensor] = []
    weights: list[Tensor] = []
    for context in range(min(len(data), MAX_CONTEXTS)):
        q, k, scaling = data.read(context, layer)
        rows = torch.randint(min(_FIRST_ROW, k.shape[2] - 1), k.shape[2], (_ROWS,), generator=generator, device="cpu")
        q, k, rows = q.to(device), k.to(device), rows.to(device)
        for e, exact in measure(hasher, q[:, :, rows], k, rows, scaling, FRACTIONS):
            share = torch.sigmoid(exact - e.lse)
            features.append(_features(e).flatten(0, 1))
            logs.append((exact - (e.visible - e.selected).log()).flatten(0, 1))
            weights.append((share * (1 - share)).flatten(0, 1))
    x, y, w = (torch.cat(found, dim=1).double().cpu() for found in (features, logs, weights))
    known = y.isfinite()  # not where nothing was left unselected
    root = torch.where(known, w, 0.0).sqrt()[..., None]
    y = torch.where(known, y, 0.0)[..., None]
    # gelsd: the columns may depend on each other, as when every context is short or every count is 1.
    solution = cast(Tensor, torch.linalg.lstsq(x * root, y * root, driver="gelsd").solution)
    hasher.remainder.copy_(solution[..., 0])


@torch.no_grad()
def measure(
    hasher: LayerHasher, q: Tensor, k: Tensor, positions: Tensor, scaling: float, fractions: Sequence[float]
) -> list[tuple[Evidence, Tensor]]:
    """Select for some rows and look at all of their logits.

    Args:
        q: queries of the rows, [1, Hq, R, D]; k: all keys, [1, Hkv, T, D]; positions: int64 [R].
        fractions: budgets, of each row's visible tokens (eq. 7).
    Returns: for each fraction the evidence, each [Hkv, G, R] or broadcast to it, and the exact `log_weight`.
    """
    hkv, t = k.shape[1], k.shape[2]
    scores = hasher.scores(q, k)[0]
    unseen = torch.arange(t, device=positions.device) > positions[:, None]
    grouped = cast(Tensor, q[0].float().unflatten(0, (hkv, -1)))  # [Hkv, G, R, D]
    keys = k[0].float()
    logits = (grouped @ keys[:, None].mT * scaling).masked_fill(unseen, -torch.inf)
    visible = positions + 1
    mean_keys = keys.cumsum(1)[:, positions] / visible[:, None]
    mean_key = (grouped * mean_keys[:, None]).sum(-1) * scaling
    found: list[tuple[Evidence, Tensor]] = []
    for fraction in fractions:
        taken = tokens_read(hasher, q, k, positions, fraction, scores)[:, None]
        exact = logits.masked_fill(taken, -torch.inf).logsumexp(-1)
        found.append((evidence(logits, taken, mean_key, visible), exact))
    return found


def tokens_read(
    hasher: LayerHasher, q: Tensor, k: Tensor, positions: Tensor, fraction: float, scores: Tensor | None = None
) -> Tensor:
    """Say which tokens some rows read: those that are always read and the best of the others, bool [Hkv, R, T].

    Args:
        q: queries of the rows, [1, Hq, R, D]; k: all keys, [1, Hkv, T, D]; positions: int64 [R].
        fraction: the budget, of each row's visible tokens (eq. 7).
        scores: `hasher.scores(q, k)[0]`, if known.
    """
    t = k.shape[2]
    scores = hasher.scores(q, k)[0] if scores is None else scores
    always = always_read(positions, t)
    searched = (top_count(positions + 1, fraction) - always.sum(-1)).clamp(min=0)
    unseen = torch.arange(t, device=positions.device) > positions[:, None]
    chosen = best(scores, unseen | always, searched)
    return reading(chosen, always)


def evidence(logits: Tensor, taken: Tensor, mean_key: Tensor, visible: Tensor) -> Evidence:
    """Gather what attention over the tokens `taken` knows of each row.

    Args:
        logits: [..., R, T], -inf where a row does not see; taken: bool, broadcast against them.
        mean_key: logit of the mean key, [..., R]; visible: tokens each row sees, [R].
    """
    read = taken.sum(-1)
    mean = logits.masked_fill(~taken, 0).sum(-1) / read
    return Evidence(mean, logits.masked_fill(~taken, -torch.inf).logsumexp(-1), mean_key, visible, read)


def share_errors(hasher: LayerHasher, e: Evidence, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the remainder's exact share of the softmax and the estimate's error of it, each [Hkv, G, R]."""
    coefficients = cast(Tensor, hasher.remainder.unflatten(0, (exact.shape[0], -1)))[:, :, None]
    share = torch.sigmoid(exact - e.lse)
    return share, torch.sigmoid(log_weight(coefficients, e) - e.lse) - share


def _features(e: Evidence) -> Tensor:
    """[..., 5]: one, mean selected logit, logit of the mean key, log visible, log selected."""
    columns = (torch.ones_like(e.mean), e.mean, e.mean_key, e.visible.float().log(), e.selected.float().log())
    return torch.stack(cast("tuple[Tensor, ...]", torch.broadcast_tensors(*columns)), -1)
