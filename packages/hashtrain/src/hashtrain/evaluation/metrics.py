"""Evaluate selections: IoU, recall and attention mass (docs/algorithm.md, eq. 12), of rows and of a whole layer.

All functions use hashcore's integer codes, scores and top-k, as in deployment. A layer is evaluated on held-out rows,
per KV head as deployed and per query head as in the paper.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import hashcore
import torch
from torch import Tensor

from hashtrain.config import RECENT, SINK, Heads
from hashtrain.data.captured import Capture
from hashtrain.layers import LayerHasher
from hashtrain.run.settings import TrainCommand
from hashtrain.training.target import always_read, always_read_tokens, attention, by_heads, logits, top_count


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
    heads: Heads = "query" if per_query_head else "kv"
    p = attention(q, k, positions, scaling, heads)
    return quality_of_scores(layer.scores(q, k, per_query_head), p, positions, fraction)


def quality_of_scores(scores: Tensor, p: Tensor, positions: Tensor, fraction: float) -> Quality:
    """Measure the selection that scores [B, H, R, T] make, given `attention` of the same heads."""
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

    IoU and recall cover the tokens that are searched for; the mass covers all tokens that a row reads, divided by that
    of the best `counts` tokens.

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
    hits = (wanted.gather(-1, slots) & taken).sum(-1)
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
than half of the oracle's mass is above the second."""


def evaluate_layer(
    command: TrainCommand, hasher: LayerHasher, layer: int, validation: Capture
) -> dict[str, dict[str, Any]]:
    """Measure one layer and its heads on held-out rows: means, and how bad the worst rows are."""
    device = hasher.remainder.device
    samples: dict[str, list[list[Tensor]]] = {"kv_head": [], "query_head": []}
    for context, rows in enumerate(rows_of_contexts(command, len(validation))):
        k, scaling = validation.keys(context, layer)
        q, k, rows = (x.to(device) for x in (validation.queries(context, layer, rows), k, rows))
        p = logits(q, k, rows, scaling).softmax(-1)
        codes = hasher.encode_keys(k)
        scores = hasher.scores_of(q, codes)
        found = quality_of_scores(scores, by_heads(p, rows, "kv"), rows, command.fraction)
        samples["kv_head"].append([m[0].double().cpu() for m in found])  # per head and row
        scores = hasher.scores_of(q, hasher.by_query_head(codes), True)  # the same codes: not hashed again
        found = quality_of_scores(scores, by_heads(p, rows, "query"), rows, command.fraction)
        samples["query_head"].append([m[0].double().cpu() for m in found])
    return {heads: _summary(rows_of) for heads, rows_of in samples.items()}


def rows_of_contexts(command: TrainCommand, contexts: int) -> Iterator[Tensor]:
    """Draw the rows to evaluate in each held-out context, the same for every hasher and layer: int64 [rows]."""
    generator, last = torch.Generator("cpu").manual_seed(command.seed), command.context
    for _ in range(contexts):
        yield torch.randint(command.first_row, last, (command.held_out_rows,), generator=generator, device="cpu")


def summarise(layers: Sequence[dict[str, dict[str, Any]]], dense: Collection[int]) -> dict[str, Any]:
    """Collect the results of `evaluate_layer` for all layers, with means over the layers that will be sparse."""
    by_heads = {heads: [layer[heads] for layer in layers] for heads in ("kv_head", "query_head")}
    sparse = [number for number in range(len(layers)) if number not in dense]
    return {
        heads: {"layers": found, "mean": _mean(found[number] for number in sparse)} for heads, found in by_heads.items()
    }


def fails(mass: Tensor) -> bool:
    """Whether a head loses too much in its worst rows, given its rows' mass [R] as shares of the oracle's."""
    return bool(mass.quantile(0.05) < LEAST_LOW or (mass < 0.5).double().mean() > MOST_LOST)


def failing(layers: Sequence[dict[str, Any]], dense: Collection[int] = ()) -> list[tuple[int, int]]:
    """List the (layer, head) pairs whose worst rows lose too much, without layers that stay dense, given the results of
    `evaluate_layer` for one kind of head, by layer."""
    return [
        (number, head)
        for number, layer in enumerate(layers)
        if number not in dense
        for head, (low, lost) in enumerate(zip(layer["low_by_head"], layer["lost_by_head"], strict=True))
        if low < LEAST_LOW or lost > MOST_LOST
    ]


def _summary(contexts_of: list[list[Tensor]]) -> dict[str, Any]:
    """Average over contexts and rows, and by head. `low` is the 5th percentile of the rows' mass in the worst head;
    `lost` is the share of rows, over all heads, that find less than half of the oracle's mass."""
    iou, recall, mass = (torch.cat([c[i] for c in contexts_of], dim=1) for i in range(3))  # [H, rows]
    low, lost = mass.quantile(0.05, dim=1), (mass < 0.5).double().mean(1)
    means = {"iou": iou.mean(), "recall": recall.mean(), "mass": mass.mean(), "low": low.min(), "lost": lost.mean()}
    by_head = {"iou": iou.mean(1), "mass": mass.mean(1), "low": low, "lost": lost}
    return {
        **{name: value.item() for name, value in means.items()},
        **{f"{name}_by_head": values.tolist() for name, values in by_head.items()},
    }


def _mean(layers: Iterable[dict[str, Any]]) -> dict[str, float]:
    found = list(layers)
    names = [name for name, value in found[0].items() if isinstance(value, float)]
    return {name: sum(layer[name] for layer in found) / len(found) for name in names}
