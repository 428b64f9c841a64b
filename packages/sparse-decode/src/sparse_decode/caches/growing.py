"""A dynamic cache layer that grows in place, for dense layers in decode steps on the CPU.

transformers' `DynamicLayer` copies all keys and values at each step. This subclass only overrides `update`. Anything
else that changes `keys` and `values` (crops, presses, beams) assigns new tensors, which the next update copies: others
may have kept what was returned before, so that it is never written again.
"""

import copy
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from sparse_decode.caches.buffer import GrowingBuffer, append_both
from sparse_decode.model import CACHE_NAMES, NO_COPY, Attention

FROM = 512
"""Below this many tokens, copying all of them takes less time than the Python code that avoids it."""


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values have spare room for later tokens. `grow` re-types a plain layer."""

    _layer_type = None  # keeps Hugging Face from registering it in place of the plain one
    keys: Tensor | None
    values: Tensor | None
    _buffers: tuple[GrowingBuffer, GrowingBuffer] | None = None
    _shown: tuple[Tensor | None, Tensor | None] = (None, None)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, Hkv, t, D]."""
        keys, values = self.keys, self.values
        plain = type(key_states) is not Tensor or torch.compiler.is_dynamo_compiling()
        plain = plain or key_states.requires_grad or value_states.requires_grad
        # Else, of another dtype or shape than the old ones, torch raises the error.
        if plain or keys is None or values is None or keys.dim() < 4 or key_states.dtype != keys.dtype:
            return super().update(key_states, value_states, *args, **kwargs)
        alike = key_states.shape[:2] == keys.shape[:2] and value_states.shape[:2] == values.shape[:2]
        if not alike or value_states.dtype != values.dtype:
            return super().update(key_states, value_states, *args, **kwargs)
        if self._buffers is None or keys is not self._shown[0] or values is not self._shown[1]:
            self._buffers = GrowingBuffer(), GrowingBuffer()
            for buffer, x in zip(self._buffers, (keys, values), strict=True):
                buffer.adopt(x)
        found = append_both(*self._buffers, key_states, value_states)
        found = found or (self._buffers[0].append(key_states), self._buffers[1].append(value_states))
        self.keys, self.values = self._shown = found
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicLayer:
        memo[id(self)] = twin = plainly(self)
        for name, value in vars(twin).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(plainly(self))


class GrowHook:
    """The forward pre-hook of the first layer of a model without sparse layers: its filled caches grow in place.

    Args: found: the attention module; grow: makes the layers of a cache grow.
    """

    def __init__(self, found: Attention, grow: Callable[[Any], None]):
        self._layer, self._arguments, self._grow = found.layer, found.arguments, grow
        self.handle: RemovableHandle = found.module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs} if args else kwargs
        cache: Any = given.get(CACHE_NAMES[0])
        if type(cache) is not DynamicCache or self._layer >= len(cache.layers) or not may_grow(given["hidden_states"]):
            return
        held = cache.layers[self._layer]
        if type(held) is DynamicLayer and held.is_initialized and held.keys is not None and held.keys.shape[2] >= FROM:
            self._grow(cache)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)


def may_grow(hidden: Tensor) -> bool:
    """Whether the cache of a layer with these hidden states may be written in place."""
    return hidden.device.type == "cpu" and not hidden.requires_grad and not torch.compiler.is_compiling()


def reduced(plain: CacheLayerMixin) -> tuple[type, tuple[int, ...], dict[str, Any]]:
    """Return what pickle stores of a plain layer: names of transformers alone."""
    return type(plain), (plain.max_cache_len,) if isinstance(plain, StaticLayer) else (), vars(plain)


def plainly(layer: GrowingLayer) -> DynamicLayer:
    """Return a plain layer with the same keys and values, without the spare room."""
    twin = object.__new__(DynamicLayer)
    vars(twin).update((name, value) for name, value in vars(layer).items() if name not in ("_buffers", "_shown"))
    if isinstance(layer.keys, Tensor) and isinstance(layer.values, Tensor):
        twin.keys, twin.values = layer.keys.clone(), layer.values.clone()
    return twin


def grow(layer: CacheLayerMixin, layers: WeakSet[CacheLayerMixin]) -> None:
    """Make a plain dynamic layer grow in place, and add it to `layers`."""
    layer.__class__ = GrowingLayer
    layers.add(layer)


def grow_in(layer: DynamicLayer, keys: Tensor, values: Tensor, tokens: int, layers: WeakSet[CacheLayerMixin]) -> None:
    """Make an empty layer hold the first tokens of buffers [B, H, N, D], and grow in their other rows."""
    layer.lazy_initialization(keys, values)
    grow(layer, layers)
    growing = cast(GrowingLayer, layer)
    growing._buffers = first, second = GrowingBuffer(), GrowingBuffer()
    growing.keys, growing.values = growing._shown = first.hold(keys, tokens), second.hold(values, tokens)


def stop_growing(layer: CacheLayerMixin) -> None:
    """Turn a layer back into a plain one, without copying its keys and values."""
    if isinstance(layer, GrowingLayer):
        for name in ("_buffers", "_shown"):
            vars(layer).pop(name, None)
        cast(Any, layer).__class__ = DynamicLayer
