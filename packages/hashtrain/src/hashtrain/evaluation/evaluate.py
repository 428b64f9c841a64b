"""Evaluate a hasher on held-out rows, per KV head as deployed and per query head as in the paper."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hashtrain.data.captured import Capture
from hashtrain.evaluation.metrics import quality_of_scores
from hashtrain.layers import LayerHasher
from hashtrain.settings.train_command import TrainCommand
from hashtrain.training.target import by_heads, logits

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
