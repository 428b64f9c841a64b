"""The class of a cache layer that carries codes, for every class of Hugging Face's layers, and how a layer gets it."""

import functools
from typing import Any, cast

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
    StaticLayer,
)

from sparse_decode.caches.cache import Coded, CodedDynamicLayer, CodedStaticLayer
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.growing import GrowingLayer, Retyped, revert

CODED = (CodedDynamicLayer, CodedStaticLayer)


HYBRIDS = tuple(
    getattr(cache_utils, name)
    for name in ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer")
    if hasattr(cache_utils, name)
)
"""Layer classes that also store a recurrent state."""


@functools.cache
def _hybrid(plain: type[CacheLayerMixin]) -> type[Coded]:
    coded = CodedDynamicLayer if issubclass(plain, DynamicLayer) else CodedStaticLayer

    def reorder_cache(layer: Any, beam_idx: Tensor) -> None:
        """Take the batch rows `beam_idx` of both parts, as beam search asks."""
        if coded is CodedDynamicLayer:  # the static class calls `super`, which reorders both parts
            cache_utils.LinearAttentionLayer.reorder_cache(layer, beam_idx)  # pyright: ignore[reportArgumentType]
        coded.reorder_cache(layer, beam_idx)

    own = {"plain": plain, "reorder_cache": reorder_cache}
    return cast("type[Coded]", type(f"Coded{plain.__name__}", (coded, plain), own))


def coded_type(plain: type) -> type[Coded] | None:
    """Return the class that carries codes for a plain layer class; None for a class that is not supported."""
    if plain in (DynamicLayer, GrowingLayer):
        return CodedDynamicLayer
    if plain is StaticLayer:
        return CodedStaticLayer
    return _hybrid(plain) if plain in HYBRIDS else None


def carry_codes(layer: CacheLayerMixin, encoder: Encoder, coded: type[Coded] | None = None) -> Any:
    """Make a cache layer, plain or with another encoder's codes, carry the codes of its present and future keys.

    Args: coded: the new class; by default `coded_type` of the layer's class.
    Returns: the same object, re-typed.
    Raises: ValueError if there is no such class.
    """
    if isinstance(layer, Retyped):
        revert(layer)
    coded = coded or coded_type(type(layer))
    if coded is None:
        raise ValueError(f"expected a cache layer that can carry codes, got {type(layer).__name__}")
    layer.__class__ = coded
    assert isinstance(layer, Coded)
    layer.encoder = encoder
    layer.begin()
    layer.mark()
    encoder.adopt(layer)
    return layer


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
    if not hasattr(held, "encoder") and coded_type(type(held)) is None:
        raise ValueError(
            f"cache layers must be of type DynamicLayer or StaticLayer, or hybrid, got {type(held).__name__} in layer "
            f"{layer}; use DynamicCache(config=model.config), the default of generate"
        )
    return cast(CacheLayerMixin, held)
