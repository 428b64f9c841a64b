"""Evaluate selections: IoU, recall and attention mass (docs/algorithm.md, eq. 12), of rows and of a whole layer.

All functions use hashcore's integer codes, scores and top-k, as in deployment. `evals iou` also measures per query
head, as in the paper.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, cast

import hashcore
import torch
from torch import Tensor

from hashtrain.config import RECENT, SINK
from hashtrain.data.captured import Capture
from hashtrain.layers import LayerHasher
from hashtrain.training.target import always_read, always_read_tokens, attention, top_count


class Quality(NamedTuple):
    """One value per row: each [B, H, R]."""

    iou: Tensor
    recall: Tensor
    mass: Tensor


@torch.no_grad()
def quality_of_scores(scores: Tensor, p: Tensor, positions: Tensor, fraction: float) -> Quality:
    """Measure the selection that scores [B, H, R, T] make, given `attention` of the same heads.

    Args: positions: int64 [R]; row r sees tokens 0 ... positions[r]. fraction: the budget, of these tokens (eq. 7).
    """
    counts, always = top_count(positions + 1, fraction), always_read(positions, p.shape[-1])
    return quality(p, best_searched(scores, positions, fraction), counts, always)


def best_searched(scores: Tensor, positions: Tensor, fraction: float) -> Tensor:
    """Select what rows search for: the best of the tokens that they see and do not always read.

    Args:
        scores: [..., R, T]; positions: int64 [R]; fraction: the budget, of each row's visible tokens (eq. 7).
    Returns: int64 [..., R, K], -1 in unused slots.
    """
    ends = (always_read_tokens(positions) >= 0).sum(-1)
    counts = (top_count(positions + 1, fraction) - ends).clamp(min=0)
    rows = scores.shape[:-1]
    counts, lengths = (x.expand(rows).contiguous() for x in (counts, positions + 1))
    return hashcore.topk(scores, counts, lengths=lengths, sink=SINK, recent=RECENT)[1]


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

    IoU and recall cover the tokens that are searched for, and are 1 in rows that search for none; the mass covers all
    tokens that a row reads, divided by that of the best `counts` tokens.

    Args:
        p: [B, H, R, T], -1 for invisible tokens.
        selected: int64 indices [B, H, R, K], distinct, -1 in unused slots.
        counts: int64 [R], number of tokens that each row reads; more if more are always read.
        always: bool [R, T], those that are read without a search; None for none.
    """
    t = p.shape[-1]
    always = torch.zeros(t, dtype=torch.bool, device=p.device) if always is None else always
    always = always.expand(*p.shape[-2:])
    number = always.sum(-1)
    counts = counts.maximum(number)
    searched = counts - number
    sizes = torch.stack([counts.max(), number.max()])  # one wait for the device instead of two
    most, ends = cast("list[int]", sizes.tolist())  # pyright: ignore[reportUnknownMemberType]
    # All sums are over lists of tokens: over whole rows of T tokens they would take most of the time.
    top = p.topk(most, dim=-1)
    unasked = _at(always, top.indices)
    target = ~unasked & ((~unasked).cumsum(-1) <= searched[:, None])
    wanted = torch.zeros(*p.shape[:-1], t + 1, dtype=torch.bool, device=p.device)
    wanted.scatter_(-1, top.indices.masked_fill(~target, t), True)
    slots = selected.clamp(min=0)
    taken = (selected >= 0) & ~_at(always, slots)
    hits = (wanted.gather(-1, slots) & taken).sum(-1, dtype=torch.float32)
    mass = (p.gather(-1, slots) * taken).sum(-1)
    if ends:
        first = always.int().topk(ends, dim=-1)
        mass += (p.gather(-1, first.indices.expand(*p.shape[:-1], ends)) * first.values).sum(-1)
    mass /= (top.values * (torch.arange(most, device=p.device) < counts[:, None])).sum(-1)
    size = target.sum(-1)
    union = size + taken.sum(-1) - hits
    iou, recall = hits / union.clamp(min=1), hits / size.clamp(min=1)
    return Quality(iou.masked_fill(union == 0, 1.0), recall.masked_fill(size == 0, 1.0), mass)


def _at(flags: Tensor, tokens: Tensor) -> Tensor:
    """Return the flags [R, T] of tokens [..., R, K]."""
    return flags.expand(*tokens.shape[:-1], flags.shape[-1]).gather(-1, tokens)


LEAST_LOW, MOST_LOST = 0.6, 0.001
"""A head fails if the 5th percentile of its rows' mass is below the first, or if the share of its rows that find less
than half of the oracle's mass is above the second, and there are at least two."""
_AT_ONCE = 32


@torch.no_grad()
def layer_quality(
    hashers: Sequence[LayerHasher], layer: int, data: Capture, rows_of: Iterable[Tensor], fraction: float
) -> list[Quality]:
    """Measure what hash functions of one layer select per KV head, all on the same rows of captured contexts.

    Args: rows_of: for each of the first contexts, the rows to measure, int64 [R].
    Returns: for each hasher float64 [Hkv, rows of all contexts], on the CPU.
    """
    device = hashers[0].remainder.device
    found: list[list[Quality]] = [[] for _ in hashers]
    for context, drawn in enumerate(rows_of):
        k, scaling = data.keys(context, layer)
        q, k, rows = (x.to(device) for x in (data.queries(context, layer, drawn), k, drawn))
        codes = [hasher.encode_keys(k) for hasher in hashers]  # once, not for each part of the rows
        parts_of = (cast("tuple[Tensor, ...]", x.split(_AT_ONCE, axis)) for x, axis in ((q, 2), (rows, 0)))
        for some, at in zip(*parts_of, strict=True):
            some = some.contiguous()
            p = attention(some, k, at, scaling)
            for hasher, keys, parts in zip(hashers, codes, found, strict=True):
                rows_quality = quality_of_scores(hasher.scores_of(some, keys), p, at, fraction)
                parts.append(Quality(*(x[0].double().cpu() for x in rows_quality)))
    return [Quality(*(torch.cat([part[n] for part in parts], 1) for n in range(3))) for parts in found]


def fails(mass: Tensor) -> bool:
    """Whether a head loses too much in its worst rows, given its rows' mass [R] as shares of the oracle's."""
    return bool(mass.quantile(0.05) < LEAST_LOW or (mass < 0.5).sum() > max(1, MOST_LOST * len(mass)))


def summary(found: Quality) -> dict[str, Any]:
    """Average `layer_quality` over rows, and by head. `low` is the 5th percentile of the rows' mass in the worst head;
    `lost` is the share of rows, over all heads, that find less than half of the oracle's mass."""
    low, lost = found.mass.quantile(0.05, dim=1), (found.mass < 0.5).double().mean(1)
    means = {**{name: x.mean() for name, x in found._asdict().items()}, "low": low.min(), "lost": lost.mean()}
    by_head = {"iou": found.iou.mean(1), "mass": found.mass.mean(1), "low": low, "lost": lost}
    return {
        **{name: value.item() for name, value in means.items()},
        **{f"{name}_by_head": values.tolist() for name, values in by_head.items()},
        "failing": [head for head, mass in enumerate(found.mass) if fails(mass)],
    }


def means(layers: Sequence[dict[str, Any]], dense: Collection[int]) -> dict[str, float]:
    """Average the summaries of all layers that will be sparse."""
    sparse = [layer for number, layer in enumerate(layers) if number not in dense]
    names = [name for name, value in sparse[0].items() if isinstance(value, float)]
    return {name: sum(layer[name] for layer in sparse) / len(sparse) for name in names}
