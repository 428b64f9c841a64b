"""The class of a cache layer that carries codes, for every class of Hugging Face's layers, and how a layer gets it."""

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
    QuantizedLayer,
    StaticLayer,
)

from sparse_decode.caches.buffer import CodeBuffer
from sparse_decode.caches.cache import Coded, CodedDynamicLayer, CodedStaticLayer
from sparse_decode.caches.cache_encoder import Encoder, drop_codes
from sparse_decode.caches.growing import GrowingLayer, stop_growing
from sparse_decode.unselected.remainder import RunningMoments

if TYPE_CHECKING:
    from transformers.cache_utils import BaseQuantizedLayer
else:  # before transformers 5.21 there is a single class of quantised layers, without this base class
    BaseQuantizedLayer = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)

QUANTISED = hasattr(cache_utils, "BaseQuantizedLayer")
"""Whether quantised layers work in this transformers: before 5.21, `reset` and beam search ignored quantised tokens."""


class CodedQuantisedLayer(Coded, BaseQuantizedLayer):
    """A quantised layer with the codes and moments of its keys and values before quantisation (`_quantised`)."""

    moments: RunningMoments
    _watched = ("keys", "values", "_quantized_keys", "_quantized_values")

    def begin(self) -> None:
        self.moments = RunningMoments()
        self._codes = CodeBuffer(self.encoder.lists)
        if self.is_initialized:
            self._codes.append(self.encoder(self._all_keys()))

    def end(self) -> None:
        del self._codes, self.moments

    @property
    def codes(self) -> Tensor:
        """Codes of the cached keys, int32 [B, H, T, W]."""
        self.settle()
        return self._codes.view()

    @property
    def first_words(self) -> Tensor | None:
        """The copy of the codes' first words, int32 [B, H, T]; None if there is none."""
        return self._codes.first

    def memory(self) -> tuple[int, int]:
        """Return the bytes of keys and values as stored, and of codes and sums."""
        stored = (self.keys, self.values, self._quantized_keys, self._quantized_values)
        return sum(map(_nbytes, stored)), self._codes.nbytes + self.moments.nbytes

    def _all_keys(self) -> Tensor:
        keys = cast(Tensor, self._dequantize(self._quantized_keys))
        if isinstance(self, QuantizedLayer):
            keys = torch.cat([self._apply_pending_reorder(keys, keys)[0], cast(Tensor, self.keys)], dim=-2)
        return keys

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, Hkv, t, D] and hash the new keys."""
        self.settle()
        self._codes.append(self.encoder(key_states))
        found = super().update(key_states, value_states, *args, **kwargs)
        self.mark()
        return found

    def reset(self) -> None:
        super().reset()
        self._codes.truncate(0)
        self.moments = RunningMoments()
        self.mark()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.settle()
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        for held in (self._codes, self.moments):
            held.map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))
        self.mark()

    # Hugging Face's versions of these three methods would change only the unquantised tokens.
    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(f"a quantised cache cannot drop {-tokens_to_remove} tokens; use DynamicCache()")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ValueError("a quantised cache cannot repeat its rows; use DynamicCache()")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ValueError("a quantised cache cannot select rows; use DynamicCache()")


def _nbytes(stored: Any) -> int:
    """Bytes of a tensor, or of the tensors in a tuple, list or dictionary."""
    if isinstance(stored, Tensor):
        return stored.nbytes
    parts = stored.values() if isinstance(stored, dict) else stored if isinstance(stored, tuple | list) else ()
    return sum(map(_nbytes, parts))


CODED = (CodedDynamicLayer, CodedStaticLayer, CodedQuantisedLayer)


@functools.cache
def _quantised(plain: type[BaseQuantizedLayer]) -> type[CodedQuantisedLayer]:
    return cast(
        "type[CodedQuantisedLayer]", type(f"Coded{plain.__name__}", (CodedQuantisedLayer, plain), {"plain": plain})
    )


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


def is_quantised(layer_type: type) -> bool:
    """Whether a layer class stores keys and values quantised."""
    return issubclass(layer_type, BaseQuantizedLayer)


def coded_type(plain: type) -> type[Coded] | None:
    """Return the class that carries codes for a plain layer class; None for a class that is not supported.

    Raises: ValueError for quantised layers in transformers before 5.21 (see `QUANTISED`).
    """
    if plain in (DynamicLayer, GrowingLayer):
        return CodedDynamicLayer
    if plain is StaticLayer:
        return CodedStaticLayer
    if plain in HYBRIDS:
        return _hybrid(plain)
    if not is_quantised(plain):
        return None
    if not QUANTISED:
        raise ValueError(
            f"a quantised cache needs transformers 5.21 or newer, got {transformers.__version__}; use DynamicCache()"
        )
    return _quantised(plain)


def carry_codes(layer: CacheLayerMixin, encoder: Encoder, coded: type[Coded] | None = None) -> Any:
    """Make a cache layer, plain or with another encoder's codes, carry the codes of its present and future keys.

    Args: coded: the new class; by default `coded_type` of the layer's class.
    Returns: the same object, re-typed.
    Raises: ValueError if there is no such class.
    """
    if isinstance(layer, Coded):
        drop_codes(layer)
    stop_growing(layer)
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
            f"cache layers must be of type DynamicLayer or StaticLayer, hybrid or quantised, got "
            f"{type(held).__name__} in layer {layer}; use DynamicCache(config=model.config), the default of generate"
        )
    return cast(CacheLayerMixin, held)
