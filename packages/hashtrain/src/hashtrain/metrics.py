"""How well a selection matches the target: IoU, recall and attention mass (docs/algorithm.md, eq. 12).

Everything here goes through hashcore's integer codes, scores and top-k: the path that is deployed.
"""

from __future__ import annotations

from typing import NamedTuple

import hashcore
import torch
from torch import Tensor

from hashtrain.layers import LayerHasher
from hashtrain.target import attention, top_count


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
        scaling: the model's factor on attention logits.
        per_query_head: one selection per query head against that head's attention, instead of one per KV head.
    """
    counts = top_count(positions + 1, fraction)
    unseen = torch.arange(k.shape[2]) > positions[:, None]
    selected = best(layer.scores(q, k, per_query_head), unseen, counts)
    p = attention(q, k, positions, scaling, heads="query" if per_query_head else "kv")
    return quality(p, selected, counts)


def best(scores: Tensor, unseen: Tensor, counts: Tensor) -> Tensor:
    """Select the best `counts` [R] of each row of scores [..., R, T] (eq. 6): int64 [..., R, K], -1 in unused slots."""
    if scores.is_floating_point():  # an ablation's: hashcore selects integers
        most = int(counts.max())
        chosen = scores.masked_fill(unseen, -torch.inf).topk(most, dim=-1).indices
        return chosen.masked_fill(torch.arange(most, device=counts.device) >= counts[:, None], -1)
    counts = counts.expand(scores.shape[:-1]).contiguous()
    return hashcore.topk(scores.masked_fill(unseen, -1), counts)[1]


def quality(p: Tensor, selected: Tensor, counts: Tensor) -> Quality:
    """Compare selections with the target sets of attention probabilities.

    Args:
        p: [B, H, R, T], unseen tokens -1.
        selected: int64 indices [B, H, R, K], -1 in unused slots.
        counts: int64 [R], the budget of each row.
    """
    best = p.topk(int(counts.max()), dim=-1)
    wanted = torch.arange(best.indices.shape[-1], device=p.device) < counts[:, None]
    target = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
    target = target.scatter_(-1, best.indices, wanted.expand_as(best.indices))
    used = selected >= 0
    safe = selected.clamp(min=0)
    hits = (target.gather(-1, safe) & used).sum(-1)
    union = wanted.sum(-1) + used.sum(-1) - hits
    mass = (p.gather(-1, safe) * used).sum(-1) / (best.values * wanted).sum(-1)
    return Quality(hits / union, hits / wanted.sum(-1), mass)
