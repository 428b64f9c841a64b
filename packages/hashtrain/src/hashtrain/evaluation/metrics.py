"""Compare a selection with the target: IoU, recall and attention mass (docs/algorithm.md, eq. 12).

All functions use hashcore's integer codes, scores and top-k, as in deployment.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import hashcore
import torch
from torch import Tensor

from hashtrain.layers import LayerHasher
from hashtrain.training.target import always_read, attention, top_count


class Quality(NamedTuple):
    """One value per row: each [B, H, R]."""

    iou: Tensor
    recall: Tensor
    mass: Tensor


@torch.no_grad()
def hash_quality(
    layer: LayerHasher,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    fraction: float,
    scaling: float,
    per_query_head: bool = False,
) -> Quality:
    """Measure a layer's hash selection on some rows.

    Args:
        layer: the hash functions.
        q: queries of the rows, [B, Hq, R, D]; k: all keys, [B, Hkv, T, D].
        positions: int64 [R]; row r sees tokens 0 ... positions[r].
        fraction: the budget, of each row's visible tokens (eq. 7).
        scaling: the model's attention scaling.
        per_query_head: one selection per query head against that head's attention, instead of one per KV head.
    """
    counts, always = top_count(positions + 1, fraction), always_read(positions, k.shape[2])
    unseen = torch.arange(k.shape[2]) > positions[:, None]
    selected = best(layer.scores(q, k, per_query_head), unseen | always, (counts - always.sum(-1)).clamp(min=0))
    p = attention(q, k, positions, scaling, heads="query" if per_query_head else "kv")
    return quality(p, selected, counts, always)


def best(scores: Tensor, unseen: Tensor, counts: Tensor) -> Tensor:
    """Select the best `counts` [R] of each row of scores [..., R, T] (eq. 6), excluding `unseen` tokens [R, T].

    Returns: int64 [..., R, K], -1 in unused slots.
    """
    if scores.is_floating_point():  # an ablation without codes: hashcore selects by integers only
        most = int(counts.max())
        chosen = scores.masked_fill(unseen, -torch.inf).topk(most, dim=-1).indices
        return chosen.masked_fill(torch.arange(most, device=counts.device) >= counts[:, None], -1)
    counts = counts.expand(scores.shape[:-1]).contiguous()
    return hashcore.topk(scores.masked_fill(unseen, -1), counts)[1]


def reading(selected: Tensor, always: Tensor) -> Tensor:
    """Return the tokens that rows read: those selected, and those `always` read.

    Args:
        selected: int64 [..., R, K], -1 in unused slots; always: bool [R, T].
    Returns: bool [..., R, T].
    """
    t = always.shape[-1]
    taken = torch.zeros(*selected.shape[:-1], t + 1, dtype=torch.bool, device=selected.device)
    return taken.scatter_(-1, selected.masked_fill(selected < 0, t), True)[..., :t] | always


def quality(p: Tensor, selected: Tensor, counts: Tensor, always: Tensor | None = None) -> Quality:
    """Compare selections with the targets given by attention probabilities.

    IoU and recall cover the tokens that are searched for; the mass covers all tokens that a row reads, divided by that
    of the best `counts` tokens.

    Args:
        p: [B, H, R, T], -1 for invisible tokens.
        selected: int64 indices [B, H, R, K], -1 in unused slots.
        counts: int64 [R], number of tokens that each row reads; more if more are always read.
        always: bool [R, T], those that are read without a search; None for none.
    """
    t = p.shape[-1]
    always = torch.zeros(t, dtype=torch.bool, device=p.device) if always is None else always
    counts = counts.maximum(always.sum(-1).expand_as(counts))
    searched = counts - always.sum(-1)
    taken = reading(selected, always.expand(p.shape[-2], t))
    mass = (p * taken).sum(-1)
    taken = taken & ~always
    target = torch.zeros_like(taken)
    sizes = torch.stack([searched.max(), counts.max()])  # one wait for the device instead of two
    wanted, most = cast("list[int]", sizes.tolist())  # pyright: ignore[reportUnknownMemberType]
    if wanted:
        found = p.masked_fill(always, -1.0).topk(wanted, dim=-1).indices
        target.scatter_(
            -1, found, (torch.arange(found.shape[-1], device=p.device) < searched[:, None]).expand_as(found)
        )
    hits = (target & taken).sum(-1)
    union = (target | taken).sum(-1)
    top = p.topk(most, dim=-1).values
    best_mass = (top * (torch.arange(top.shape[-1], device=p.device) < counts[:, None])).sum(-1)
    mass = mass / best_mass
    whole = union == 0  # nothing was searched for
    iou, recall = hits / union.clamp(min=1), hits / target.sum(-1).clamp(min=1)
    return Quality(iou.masked_fill(whole, 1.0), recall.masked_fill(target.sum(-1) == 0, 1.0), mass)
