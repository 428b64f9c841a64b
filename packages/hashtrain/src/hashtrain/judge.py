"""Judge a hasher on held-out rows, per KV head as deployed and per query head as in the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hashtrain.capture import Capture
from hashtrain.hasher import Hasher
from hashtrain.metrics import hash_quality
from hashtrain.plan import TrainCommand
from hashtrain.remainder import measure, share_errors


def judge(
    command: TrainCommand, hasher: Hasher, held: Capture, on_layer: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Mean quality of each layer and head on held-out rows, and the means over the layers that will be sparse.

    `remainder` is the share of the softmax that a selection leaves out, and the root mean square error of its estimate.
    """
    layers: dict[str, list[dict[str, Any]]] = {"kv_head": [], "query_head": [], "remainder": []}
    for layer in range(len(hasher.layers)):
        generator = torch.Generator().manual_seed(command.seed)  # the same rows for every hasher and layer
        samples: dict[str, list[list[Tensor]]] = {"kv_head": [], "query_head": []}
        shares, errors = [], []
        for context in range(len(held)):
            q, k, scaling = held.read(context, layer)
            rows = torch.randint(command.first_row, command.context, (command.held_out_rows,), generator=generator)
            for heads, rows_of in samples.items():
                found = hash_quality(
                    hasher.layer(layer), q[:, :, rows], k, rows, command.fraction, scaling, heads == "query_head"
                )
                rows_of.append([m.double().mean(-1)[0] for m in found])  # per head, mean over rows
            ((evidence, exact),) = measure(hasher.layer(layer), q[:, :, rows], k, rows, scaling, [command.fraction])
            share, error = share_errors(hasher.layer(layer), evidence, exact)
            shares.append(share.double())
            errors.append(error.double())
        for heads, rows_of in samples.items():
            layers[heads].append(_summary(rows_of))
        error = torch.stack(errors).square().mean().sqrt().item()
        layers["remainder"].append({"share": torch.stack(shares).mean().item(), "error": error})
        on_layer()
    sparse = slice(command.dense_layers, None)
    return {h: {"layers": ls, "mean": _mean(ls[sparse])} for h, ls in layers.items()}


def _summary(contexts_of: list[list[Tensor]]) -> dict[str, Any]:
    """Means over contexts, and per head; one document is one sample."""
    iou, recall, mass = (torch.stack([c[i] for c in contexts_of]) for i in range(3))
    return {
        "iou": iou.mean().item(),
        "recall": recall.mean().item(),
        "mass": mass.mean().item(),
        "iou_by_head": iou.mean(0).tolist(),
    }


def _mean(layers: Iterable[dict[str, Any]]) -> dict[str, float]:
    found = list(layers)
    names = [name for name, value in found[0].items() if isinstance(value, float)]
    return {name: sum(layer[name] for layer in found) / len(found) for name in names}
