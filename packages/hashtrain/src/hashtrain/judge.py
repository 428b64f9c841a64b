"""Judge a hasher on held-out rows, per KV head as deployed and per query head as in the paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import hashcore
import torch
from torch import Tensor

from hashtrain.capture import Capture
from hashtrain.layers import LayerHasher
from hashtrain.metrics import hash_quality
from hashtrain.plan import TrainCommand
from hashtrain.remainder import measure, share_errors


def judge_layer(command: TrainCommand, hasher: LayerHasher, layer: int, held: Capture) -> dict[str, dict[str, Any]]:
    """Mean quality of one layer and of its heads on held-out rows.

    `remainder` is the share of the softmax that a selection leaves out, and the root mean square error of its estimate;
    `bits` is `bit_statistics` of the first context's keys.
    """
    generator = torch.Generator().manual_seed(command.seed)  # the same rows for every hasher and layer
    device = hasher.remainder.device
    samples: dict[str, list[list[Tensor]]] = {"kv_head": [], "query_head": []}
    shares, errors = [], []
    for context in range(len(held)):
        q, k, scaling = held.read(context, layer)
        rows = torch.randint(
            command.first_row, command.context, (command.held_out_rows,), generator=generator, device="cpu"
        )
        q, k, rows = q.to(device), k.to(device), rows.to(device)
        for heads, rows_of in samples.items():
            found = hash_quality(hasher, q[:, :, rows], k, rows, command.fraction, scaling, heads == "query_head")
            rows_of.append([m.double().mean(-1)[0] for m in found])  # per head, mean over rows
        ((evidence, exact),) = measure(hasher, q[:, :, rows], k, rows, scaling, [command.fraction])
        share, error = share_errors(hasher, evidence, exact)
        shares.append(share.double())
        errors.append(error.double())
    error = torch.stack(errors).square().mean().sqrt().item()
    bits = bit_statistics(hasher, held.read(0, layer)[1]) if hasher.has_codes else {}
    remainder = {"share": torch.stack(shares).mean().item(), "error": error}
    return {"remainder": remainder, "bits": bits, **{heads: _summary(rows_of) for heads, rows_of in samples.items()}}


def summarise(layers: Sequence[dict[str, dict[str, Any]]], dense_layers: int) -> dict[str, Any]:
    """Put the figures of `judge_layer` side by side, with their means over the layers that will be sparse."""
    by_heads = {heads: [layer[heads] for layer in layers] for heads in ("kv_head", "query_head", "remainder", "bits")}
    return {heads: {"layers": found, "mean": _mean(found[dense_layers:])} for heads, found in by_heads.items()}


def bit_statistics(hasher: LayerHasher, k: Tensor) -> dict[str, Any]:
    """Say how well the codes of keys [1, Hkv, T, D] use their bits.

    Returns: `ones`, each bit's share of ones, sorted, of all heads; `balance`, the mean of `2 min(ones, 1 - ones)`, 1
        at best; `correlation`, the mean absolute correlation of two bits of a head, 0 at best.
    """
    codes = hashcore.unpack(hasher.encode_keys(k))[0].float()  # [H, T, bits]
    ones = codes.mean(1)
    centred = codes - ones[:, None]
    spread = centred.square().mean(1).sqrt().clamp(min=1e-6)
    correlation = (centred.mT @ centred / codes.shape[1] / (spread[:, :, None] * spread[:, None])).abs()
    others = ~torch.eye(codes.shape[2], dtype=torch.bool)
    return {
        "balance": (2 * torch.minimum(ones, 1 - ones)).mean().item(),
        "correlation": correlation[:, others].mean().item(),
        "ones": [round(share, 4) for share in ones.flatten().sort().values.tolist()],
    }


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
    found = [layer for layer in layers if layer]
    if not found:
        return {}
    names = [name for name, value in found[0].items() if isinstance(value, float)]
    return {name: sum(layer[name] for layer in found) / len(found) for name in names}
