"""The memory of a run, said beforehand: what caches hold, and the most that is held beside them for a moment.

Sizes are those of tensors on torch's meta device, by the methods that will make the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, cast

import torch
from hashcore.cpu.threads import most
from hashtrain import ModelShape
from torch import Tensor
from transformers import DynamicCache

from sparse_decode.buffer import spare_rows
from sparse_decode.plan import LayerPlan
from sparse_decode.remainder import Moments, summing_bytes

_SCRATCH = 1 << 23  # bytes that each thread of a search keeps its best in, unless one row needs more
_ENTRY = 24  # bytes of a selected token: its score, its index, and that again beside sink and recent
_SLOT = 24  # bytes of such a row on its way through a search: kept twice


class Forecast(NamedTuple):
    """Bytes of tensors and buffers that a batch of sequences takes, in all layers.

    What an allocator keeps of freed memory comes on top: with glibc's settings 41 MiB were seen (docs/log.md).
    """

    keys_values: int
    """Keys and values, as a dense model keeps them; in host memory with kv="host"."""
    codes: int
    """Codes of the keys in the sparse layers."""
    sums: int
    """Sums for the remainder."""
    spare: int
    """Room that dynamic caches hold ahead for later tokens, at most."""
    step: int
    """Most that a decode step holds for a moment, in one layer."""
    prompt: int
    """Most that hashing a prompt holds for a moment, in one layer."""

    @property
    def beyond(self) -> int:
        """Most bytes beyond the model, its own activations, and `keys_values`."""
        return self.codes + self.sums + self.spare + max(self.step, self.prompt)


class Layer(NamedTuple):
    """What one layer keeps: meta tensors of the keys [B, Hkv, T, D] and the values [B, Hkv, T, D], and query heads."""

    keys: Tensor
    values: Tensor
    query_heads: int

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


def forecast(
    model: Any,
    shape: ModelShape,
    plans: Mapping[int, LayerPlan],
    batch: int,
    tokens: int,
    growing: Collection[int] = (),
) -> Forecast:
    """Say what a batch of sequences of so many tokens each takes.

    Args:
        model: the attached model; shape: that of its heads in this process.
        plans: those of its sparse layers; growing: dense layers whose caches grow in place, too.
    Raises: ValueError if batch or tokens is below 1.
    """
    for name, value in (("batch", batch), ("tokens", tokens)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be an integer of 1 or more, got {value!r}")
    layers = _layers(model, shape, batch, tokens)
    codes = sums = spare = step = prompt = 0
    for index, plan in plans.items():
        layer = layers[index]
        own = _codes(plan, layer.keys, model.device)
        codes, spare = codes + own, spare + (layer.nbytes + own) // tokens * spare_rows(tokens)
        weights = batch * _weights(plan, index)
        hashing = weights + (plan.encoder.temporaries(layer.keys) if own else 0)
        summing = 0
        if plan.remainder is not None:
            kept = sum(x.nbytes for x in Moments.none(layer.keys, layer.values))
            sums, summing = sums + kept, summing_bytes(layer.keys, layer.values) + 8 * kept
        moving = max(layer.nbytes, own)  # a buffer that grows is there twice
        prompt = max(prompt, hashing + 2 * own)
        step = max(step, _selecting(plan, layer, tokens) + max(moving, hashing, summing))
    spare += sum(layers[index].nbytes // tokens * spare_rows(tokens) for index in growing if index in layers)
    if plans and next(iter(plans.values())).rule.start is not None:  # a prompt is attended to like a step
        prompt = max(prompt, step)
    return Forecast(sum(x.nbytes for x in layers.values()), codes, sums, spare, step, prompt)


def _layers(model: Any, shape: ModelShape, batch: int, tokens: int) -> dict[int, Layer]:
    """Say what the layers of a dynamic cache keep: windows their last tokens, recurrent states no keys."""
    found: dict[int, Layer] = {}
    for index, layer in enumerate(cast("list[Any]", DynamicCache(config=model.config).layers)):
        if hasattr(layer, "keys") and index < shape.num_layers:
            heads, window = shape.at(index), getattr(layer, "sliding_window", None)
            n = tokens if window is None else min(tokens, max(1, window - 1))
            size = batch, heads.num_kv_heads, n, heads.head_dim
            keys, values = torch.empty(2, *size, dtype=model.dtype, device="meta").unbind()
            found[index] = Layer(keys, values, heads.num_query_heads)
    return found


def _codes(plan: LayerPlan, keys: Tensor, device: torch.device) -> int:
    """Return the bytes of a layer's codes, 0 if the selector keeps none."""
    if not plan.selector.needs_codes:
        return 0
    one = torch.zeros(1, keys.shape[1], 1, keys.shape[3], dtype=keys.dtype, device=device)
    return keys.shape[0] * keys.shape[2] * 4 * math.prod(plan.encoder.code_shape(one))


def _weights(plan: LayerPlan, index: int) -> int:
    """Return the bytes of the largest weights: torch repeats those of a batched product for each sequence."""
    hasher: Any = getattr(plan.selector, "hasher", None)
    hasher = getattr(hasher, "hasher", hasher)  # per query head
    layer = hasher.layer(index) if hasattr(hasher, "layer") else None
    return max((x.nbytes for x in layer.state_dict().values()), default=0) if layer is not None else 0


def _selecting(plan: LayerPlan, layer: Layer, tokens: int) -> int:
    """Return the most bytes that choosing tokens and reading them takes."""
    (batch, _, _, dim), hq = layer.keys.shape, layer.query_heads
    rows = tokens if plan.rule.start is not None else min(tokens, plan.rule.max_decode_rows)
    at_once, chosen = plan.rows_at_once(batch, hq, rows, tokens), plan.budget.count_row(tokens)
    masks = at_once * batch * hq * tokens * 12  # scores, and what each row sees, where there is padding
    selected = at_once * batch * hq * (chosen * _ENTRY + 12 * dim * 4)  # its query, hashed, and its result
    return masks + selected + most() * max(_SCRATCH, chosen * _SLOT)
