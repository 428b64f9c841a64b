"""Cache layers that carry codes besides keys and values, through all operations of Hugging Face's caches.

`carry_codes` re-types a layer in place, so that the cache and all references to it stay valid; `revert` restores its
type. If others change keys and values, a layer rebuilds its codes (`growing.Retyped`).
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache, StaticLayer

from sparse_decode.caches.buffer import GrowingBuffer
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.growing import FEW, GrowingLayer, Retyped, revert
from sparse_decode.compiled import write_codes
from sparse_decode.modes import ordinary_tensors, readable
from sparse_decode.sums import Sums


class Coded(Retyped):
    """Base class of the layers below."""

    encoder: Encoder

    def __deepcopy__(self, memo: dict[int, Any]) -> "Coded":
        self.wait()
        self.settle()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        twin.mark()
        self.encoder.adopt(twin)
        return twin


class CodedDynamicLayer(Coded, GrowingLayer):
    """A `GrowingLayer` with codes.

    Keys of decode steps are hashed when their codes are first needed, so that dense steps do not hash.
    """

    sums: Sums

    def begin(self) -> None:
        self.sums, self._codes = Sums(), GrowingBuffer()
        if self.get_seq_length():
            keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
            if keys.shape[:3] != values.shape[:3]:
                raise ValueError(
                    f"a cache layer needs as many keys as values, got {tuple(keys.shape)} and {tuple(values.shape)}; "
                    "change both together"
                )
            self._codes.append(self.encoder(keys, self.device))
            if self.on_host and self.device.type == "cuda" and keys.device.type == "cpu" and not keys.is_pinned():
                self.keys, self.values = keys.pin_memory(), values.pin_memory()
        super().begin()

    def end(self) -> None:
        if self.get_seq_length():
            self.keys, self.values = (cast(Tensor, x).to(self.device) for x in (self.keys, self.values))
        del self._codes, self.sums
        super().end()

    @property
    def codes(self) -> Tensor:
        """Codes of the cached keys, int32 [B, H, T, W]."""
        self.settle()
        if self._codes.length < self._keys.length:
            self._hash(self._keys.view()[:, :, self._codes.length :])
        return self._codes.view()

    def room_for_code(self) -> tuple[Tensor, GrowingBuffer | None]:
        """Return the codes, int32 [B, H, T or more, W], and their buffer if the code of the last key is missing.

        If it is, the buffer has room for it: write it there and add 1 to its `length`. Not for compiled graphs.
        """
        (_, keys, at), (_, values, then) = self._marks  # `settle`, without the call where nothing has changed
        same = keys is self.keys and values is self.values and at is not None and then is not None
        if not same or keys._version != at or values._version != then:
            self.settle()
        codes = self._codes
        if self._keys.length - codes.length == 1 and (room := codes.room(1)) is not None:
            return room, codes
        return self.codes, None

    def _hash(self, keys: Tensor) -> None:
        """Append the codes of keys [B, Hkv, t, D]; on a GPU, few keys are hashed directly into the buffer."""
        if keys.shape[2] > FEW or readable(keys):
            self._codes.append(self.encoder(keys))
            return
        heads, words = self.encoder.code_shape(keys)
        like = keys.new_empty(keys.shape[0], heads, keys.shape[2], words, dtype=torch.int32)
        self.encoder.write(self._codes.extend(like), keys)

    def memory(self) -> tuple[int, int]:
        """Return the bytes of keys and values, and of codes and sums."""
        self.settle()
        _ = self.codes if self.get_seq_length() else None  # hash what is not hashed yet
        return self._keys.nbytes + self._values.nbytes, self._codes.nbytes + self.sums.nbytes

    def _buffers(self) -> tuple[GrowingBuffer, GrowingBuffer, GrowingBuffer]:
        return self._keys, self._values, self._codes

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, Hkv, t, D] and hash the new keys; few keys on the device are hashed later."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.settle()
        if self.on_host or key_states.shape[2] > FEW:
            if self._codes.length < self._keys.length:
                _ = self.codes  # hash earlier keys first
            self._hash(key_states)
        self.keys, self.values = found = self._keys.append(key_states), self._values.append(value_states)
        self.mark()
        return found

    def crop(self, tokens_to_remove: int) -> None:
        self.settle()
        keys, values = self.keys, self.values
        super().crop(tokens_to_remove)
        if keys is not None and values is not None:
            self.sums.drop(keys, values, self.get_seq_length())
        for buffer in self._buffers():
            buffer.truncate(self.get_seq_length())
        self.mark()

    def reset(self) -> None:
        self.keys = self.values = None  # transformers before 5.21 would keep zeros of full length
        self.is_initialized = False
        super().reset()
        self.sums = Sums()
        for buffer in self._buffers():
            buffer.truncate(0)
        self.mark()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device), ...])

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self.settle()
        if self.get_seq_length():
            for held in (*self._buffers(), self.sums):
                held.map_batch(change)
            self.keys, self.values = self._keys.view(), self._values.view()
            self.mark()


class HostLayer(CodedDynamicLayer):
    """One whose keys and values are in host memory, pinned if the model is on a GPU, and which `update` returns there.

    The GPU's attention kernel reads selected rows from host memory, without a copy and without making the host wait.
    """

    on_host = True


class CodedStaticLayer(Coded, StaticLayer):
    """A `StaticLayer` with a static buffer of codes, so that a compiled step appends to it in place."""

    plain: type[CacheLayerMixin] = StaticLayer
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

    def memory(self) -> tuple[int, int]:
        """Return the bytes of the static buffers: of keys and values, and of codes and sums."""
        if not self.is_initialized:
            return 0, 0
        ours = cast(Tensor, self._codes).nbytes + cast(Sums, self.sums).nbytes
        return cast(Tensor, self.keys).nbytes + cast(Tensor, self.values).nbytes, ours

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


# ---- The class of a layer that carries codes, for every class of Hugging Face's, and how a layer gets it -------------

_NAMES = "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"
HYBRIDS = tuple(getattr(cache_utils, name) for name in _NAMES if hasattr(cache_utils, name))
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
