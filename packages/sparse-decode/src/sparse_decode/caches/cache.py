"""The static cache layer that carries codes, and how a layer of Hugging Face's caches becomes one of ours."""

import functools
from typing import Any, cast

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache, StaticLayer

from sparse_decode.caches.cache_encoder import Encoder, write_codes
from sparse_decode.caches.growing import GrowingLayer, Owned, Retyped, revert
from sparse_decode.modes import ordinary_tensors
from sparse_decode.sums import Sums


class CodedStaticLayer(Retyped, StaticLayer):
    """A `StaticLayer` with a static buffer of codes, so that a compiled step appends to it in place."""

    plain: type[CacheLayerMixin] = StaticLayer
    encoder: Encoder  # pyright: ignore[reportIncompatibleVariableOverride]
    _watched = ("keys", "values", "cumulative_length")
    _codes: Tensor | None = None
    sums: Sums | None = None

    def begin(self) -> None:
        if not self.is_initialized:
            return self.end()
        keys, codes = cast(Tensor, self.keys), self._codes
        if codes is None or self.sums is None or len(codes) != len(keys) or codes.device != keys.device:
            codes = self._allocate()
        else:
            self.sums.forget()
        n = int(self.cumulative_length)
        codes[:, :, :n] = self.encoder(keys[:, :, :n])

    def end(self) -> None:
        for name in ("_codes", "sums"):
            vars(self).pop(name, None)

    @property
    def codes(self) -> Tensor | None:
        """Codes of the whole key buffer, int32 [B, H, N, W]; None before it is allocated."""
        self.settle()
        return self._codes

    def room_for_code(self) -> tuple[Tensor, None]:
        """Return the codes of the whole key buffer, of which none is missing."""
        return cast(Tensor, self.codes), None

    def _allocate(self) -> Tensor:
        """Allocate codes and sums."""
        if torch.compiler.is_compiling():
            raise ValueError("a static cache must be allocated before it is compiled; call its early_initialization()")
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        heads, width = self.encoder.code_shape(keys)
        with ordinary_tensors():
            codes = torch.zeros(len(keys), heads, self.max_cache_len, width, dtype=torch.int32, device=keys.device)
            self._codes, self.sums = codes, Sums.static(keys, values)
        for x in (codes, *self.sums.tensors):
            torch._dynamo.mark_static_address(x)
        return codes

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)
        if self.is_initialized and self._codes is None:  # a hybrid layer initialises its two parts one by one
            self._allocate()
        self.mark()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, t, D] at the current length, and the codes of the new keys."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        codes = cast(Tensor, self.codes)  # settled
        if torch.compiler.is_compiling() and (key_states.shape[2] > 1 or not self.encoder.traceable(key_states)):
            write_codes(codes, key_states, self.cumulative_length, self.encoder.number)
        else:
            self.encoder.write(codes, key_states, self.cumulative_length)
        found = super().update(key_states, value_states, *args, **kwargs)
        self.mark()
        return found

    def reset(self) -> None:
        super().reset()
        if self._codes is not None and self.sums is not None:
            self._codes.zero_()
            self.sums.forget()
        self.mark()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.settle()
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        if self._codes is not None and self.sums is not None and self.get_seq_length() > 0:
            self._codes = self._codes.index_select(0, beam_idx.to(self._codes.device))
            self.sums.map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))
        self.mark()


class Uncached:
    """What a step asks of a cache layer, for a call without one that carries codes.

    Args: codes: of all keys, int32 [B, H, N, W]; None if the selector needs none. sums: None: they are made now.
    """

    def __init__(self, codes: Tensor | None, sums: Sums | None = None):
        self.codes = codes
        self.sums: Sums = sums or Sums()

    def room_for_code(self) -> tuple[Tensor | None, None]:
        """Return the codes, of which none is missing."""
        return self.codes, None


# ---- Our class for every class of Hugging Face's, and how a layer gets it --------------------------------------------

_NAMES = "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"
HYBRIDS = tuple(getattr(cache_utils, name) for name in _NAMES if hasattr(cache_utils, name))
"""Layer classes that also store a recurrent state."""


@functools.cache
def _hybrid(plain: type[CacheLayerMixin]) -> type[Retyped]:
    coded = GrowingLayer if issubclass(plain, DynamicLayer) else CodedStaticLayer

    def reorder_cache(layer: Any, beam_idx: Tensor) -> None:
        """Take the batch rows `beam_idx` of both parts, as beam search asks."""
        if coded is GrowingLayer:  # the static class calls `super`, which reorders both parts
            cache_utils.LinearAttentionLayer.reorder_cache(layer, beam_idx)  # pyright: ignore[reportArgumentType]
        coded.reorder_cache(layer, beam_idx)

    own = {"plain": plain, "reorder_cache": reorder_cache}
    return cast("type[Retyped]", type(f"Coded{plain.__name__}", (coded, plain), own))


def our_type(plain: type) -> type[Retyped] | None:
    """Return our class for a plain layer class; None for a class that is not supported."""
    if plain in (DynamicLayer, GrowingLayer):
        return GrowingLayer
    if plain is StaticLayer:
        return CodedStaticLayer
    return _hybrid(plain) if plain in HYBRIDS else None


def retype(layer: CacheLayerMixin, owner: Owned, encoder: Encoder | None = None, on_host: bool = False) -> Any:
    """Make a cache layer, plain or one of ours, carry the codes of its present and future keys, and grow in place.

    Args: owner: the layers to which it belongs then; encoder: hashes keys; None for a dynamic layer without codes.
        on_host: as in `GrowingLayer`.
    Returns: the same object, re-typed.
    Raises: ValueError if we have no class for it.
    """
    if isinstance(layer, Retyped):
        revert(layer)
    ours = our_type(type(layer))
    if ours is None:
        raise ValueError(f"expected a cache layer that can carry codes, got {type(layer).__name__}")
    layer.__class__ = ours
    made = cast(Retyped, layer)
    made.owner, made.encoder = owner, encoder
    if on_host:
        made.on_host = True
    made.begin()
    made.mark()
    owner.add(made)
    return made


def cache_layer(cache: Any, layer: int) -> CacheLayerMixin:
    """Return one layer of a cache, created if the cache creates its layers lazily.

    Raises: ValueError if it cannot carry codes.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values must be a transformers Cache, got {type(cache).__name__}; use DynamicCache()"
        )
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if getattr(cache, "offloading", False):
        raise ValueError("a cache that offloads its layers is not supported yet; use DynamicCache()")
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= layer:
            cache.layers.append(cache.layer_class_to_replicate())
    held = cache.layers[layer]
    if not hasattr(held, "encoder") and our_type(type(held)) is None:
        raise ValueError(
            f"cache layers must be of type DynamicLayer or StaticLayer, or hybrid, got {type(held).__name__} in layer "
            f"{layer}; use DynamicCache(config=model.config), the default of generate"
        )
    return cast(CacheLayerMixin, held)
