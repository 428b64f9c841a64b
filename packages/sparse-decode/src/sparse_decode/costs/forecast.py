"""Predicts the memory of a run: caches, and the peak of temporaries.

Sizes come from tensors on torch's meta device, created by the methods that create the real ones.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, cast

import torch
from hashcore.cpu.threads import most
from hashtrain import ModelShape
from torch import Tensor
from transformers import DynamicCache

from sparse_decode.caches.buffer import keeps_first_words, spare_rows
from sparse_decode.layer.blocks import rows_at_once
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.unselected.sums import Moments, Rounded, summing_bytes

Plans = Mapping[int, LayerPlan]
_SCRATCH = 1 << 23  # bytes of candidates per thread of a search, unless one row needs more
_ENTRY = 24  # bytes of a selected token: score, index, and the index again merged with sink and recent
_SLOT = 24  # bytes of a candidate in a search, in two buffers


class Forecast(NamedTuple):
    """Bytes of tensors and buffers for a batch of sequences, in all layers.

    Freed memory that the allocator keeps is not included; 41 MiB were measured with glibc's defaults (docs/log.md).
    """

    keys_values: int
    """Keys and values, as in a dense model; in host memory with kv="host"."""
    codes: int
    """Codes of the keys in the sparse layers."""
    sums: int
    """Sums for the remainder."""
    spare: int
    """Maximal spare room of dynamic caches for later tokens."""
    step: int
    """Peak of temporaries in a decode step, in one layer."""
    prompt: int
    """Peak of temporaries when hashing a prompt, in one layer."""

    @property
    def beyond(self) -> int:
        """Peak bytes beyond the model, its own activations, and `keys_values`."""
        return self.codes + self.sums + self.spare + max(self.step, self.prompt)


class Layer(NamedTuple):
    """The cache of one layer: meta tensors of keys and values, [B, Hkv, T, D], and the number of query heads."""

    keys: Tensor
    values: Tensor
    query_heads: int

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


def forecast(
    model: Any, shape: ModelShape, plans: Plans, batch: int, tokens: int, growing: Collection[int] = ()
) -> Forecast:
    """Predict the memory of `batch` sequences of `tokens` tokens each.

    Args: shape: of the model's heads in this process; growing: dense layers whose caches also grow in place.
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
            exact = Moments.none(layer.keys, layer.values)
            kept = sum(x.nbytes for x in (*exact, *Rounded.of(exact.spread)))
            sums, summing = sums + kept, summing_bytes(layer.keys, layer.values) + 8 * kept
        moving = max(layer.nbytes, own)  # a buffer exists twice while it grows
        prompt = max(prompt, hashing + 2 * own)
        step = max(step, _selecting(plan, layer, tokens) + max(moving, hashing, summing))
    spare += sum(layers[index].nbytes // tokens * spare_rows(tokens) for index in growing if index in layers)
    if plans and next(iter(plans.values())).rule.start is not None:  # prompts are sparse, too
        prompt = max(prompt, step)
    return Forecast(sum(x.nbytes for x in layers.values()), codes, sums, spare, step, prompt)


def _layers(model: Any, shape: ModelShape, batch: int, tokens: int) -> dict[int, Layer]:
    """Return the cached tensors by layer: sliding layers keep a window, recurrent ones no keys."""
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
    """Return the bytes of a layer's codes, 0 if the selector stores none."""
    if not plan.selector.needs_codes:
        return 0
    one = torch.zeros(1, keys.shape[1], 1, keys.shape[3], dtype=keys.dtype, device=device)
    heads, words = plan.encoder.code_shape(one)
    words += keeps_first_words(plan.encoder.lists, device)
    return keys.shape[0] * keys.shape[2] * 4 * heads * words


def _weights(plan: LayerPlan, index: int) -> int:
    """Return the bytes of the largest weight tensor: torch's batched product copies it for each sequence."""
    hasher: Any = getattr(plan.selector, "hasher", None)
    hasher = getattr(hasher, "hasher", hasher)  # per query head
    layer = hasher.layer(index) if hasattr(hasher, "layer") else None
    return max((x.nbytes for x in layer.state_dict().values()), default=0) if layer is not None else 0


def _selecting(plan: LayerPlan, layer: Layer, tokens: int) -> int:
    """Return the peak bytes of selecting tokens and attending to them."""
    (batch, _, _, dim), hq = layer.keys.shape, layer.query_heads
    rows = tokens if plan.rule.start is not None else min(tokens, plan.rule.max_decode_rows)
    at_once, chosen = min(rows, rows_at_once(batch, hq, tokens)), plan.budget.most(tokens)
    masks = at_once * batch * hq * tokens * 12  # scores, and masks if there is padding
    selected = at_once * batch * hq * (chosen * _ENTRY + 12 * dim * 4)  # query, its hash, result
    return masks + selected + most() * max(_SCRATCH, chosen * _SLOT)
