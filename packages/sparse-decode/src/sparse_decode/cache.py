"""Cache layers that carry codes besides keys and values, through all operations of Hugging Face's caches.

A layer is re-typed in place, so that the cache and all references to it stay valid; `drop_codes` restores its type. The
codes are those of the keys when they arrived: quantising a layer changes its keys, but not its codes.

Others may change keys and values: a press prunes them, a caller crops them. Each layer therefore remembers its tensors
and their versions, which torch increments with every write. If they differ from what it left, it rebuilds its codes.
Two kinds of writes are not noticed, because torch does not count them: writes in compiled graphs and writes through
`tensor.data`.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakSet

import torch
import transformers
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, QuantizedLayer, StaticLayer

from sparse_decode.buffer import CodeBuffer, GrowingBuffer, keeps_first_words
from sparse_decode.growing import GrowingLayer, stop_growing
from sparse_decode.modes import no_autocast, ordinary_tensors, readable
from sparse_decode.opaque import register, write_codes
from sparse_decode.remainder import RunningMoments, StaticMoments

if TYPE_CHECKING:
    from transformers.cache_utils import BaseQuantizedLayer
else:  # before transformers 5.21 there is a single class of quantised layers, without this base class
    BaseQuantizedLayer = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)

QUANTISED = hasattr(cache_utils, "BaseQuantizedLayer")
"""Whether quantised layers work in this transformers: before 5.21, `reset` and beam search ignored quantised tokens."""

Encode = Callable[[Tensor], Tensor]
"""Keys [B, Hkv, T, D] -> int32 codes [B, H, T, W]."""

Into = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], bool]
"""Keys, codes, token, first words -> whether one operator has written the codes, as `Encoder.write` does."""

_LATER = 16  # an update of at most this many tokens is hashed only when its codes are needed
_CHUNK = 1 << 26  # bytes of float32 temporaries when hashing a chunk of tokens, at any batch size and context length
_WIDTHS = 8  # temporary numbers per number or bit of a key, whichever are more: itself, hidden layer, bits, their sums
_MOST_BITS = 8  # assumed bits of a code per number of its key, until the first code is known


class Encoder:
    """Hashes the keys of one layer of one attachment, and tracks the cache layers that carry its codes.

    Deep copies of a cache layer share its encoder.
    """

    def __init__(
        self,
        encode: Encode,
        into: Into | None = None,
        traceable: Callable[[Tensor], bool] = lambda keys: False,
        lists: bool = False,
    ):
        self._encode = encode
        self.lists: bool = lists
        """Whether searches use a shortlist, so that caches on a GPU also keep the first words of codes."""
        self._into = into
        self.traceable: Callable[[Tensor], bool] = traceable
        """Whether keys [B, Hkv, 1, D] are hashed by operators that a compiled graph can contain."""
        self._shape: tuple[int, int] | None = None
        self._layers = WeakSet[CacheLayerMixin]()
        self.number: int = register(self)

    def __call__(self, keys: Tensor, device: torch.device | None = None) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, H, T, W], on `device` if given."""
        device, n = keys.device if device is None else device, keys.shape[2]
        with no_autocast(device):
            first = self._learn(self._encode(keys[:, :, : self._tokens_at_once(keys)].to(device)))
            if (done := first.shape[2]) == n:
                return first
            # Allocated once: pieces between temporaries would fragment the memory, which could then not be freed.
            codes = first.new_empty(*first.shape[:2], n, first.shape[3])
            codes[:, :, :done] = first
            while done < n:
                end = min(n, done + self._tokens_at_once(keys))
                codes[:, :, done:end] = self._encode(keys[:, :, done:end].to(device))
                done = end
        return codes

    def code_shape(self, keys: Tensor, device: torch.device | None = None) -> tuple[int, int]:
        """Return the heads and int32 words of codes of keys [B, Hkv, T, D]; the first call hashes a key of zeros."""
        if self._shape is None:
            device = keys.device if device is None else device
            with no_autocast(device):
                self._learn(self._encode(keys.new_zeros(1, keys.shape[1], 1, keys.shape[3], device=device)))
        assert self._shape is not None
        return self._shape

    @property
    def has_hashed(self) -> bool:
        """Whether the size of a code is known."""
        return self._shape is not None

    def temporaries(self, keys: Tensor) -> int:
        """Return the peak bytes of temporaries when hashing keys [B, Hkv, T, D], which may be meta tensors.

        The size of a code must be known: hash keys or call `code_shape` first.
        """
        return min(keys.shape[2], self._tokens_at_once(keys)) * self._bytes_per_token(keys)

    def _learn(self, codes: Tensor) -> Tensor:
        self._shape = codes.shape[1], codes.shape[3]
        return codes

    def _tokens_at_once(self, keys: Tensor) -> int:
        return max(1, _CHUNK // (self._bytes_per_token(keys) + 1))

    def _bytes_per_token(self, keys: Tensor) -> int:
        """Return the bytes of temporaries per token; until the size of a code is known, an upper bound."""
        batch, heads, _, dim = keys.shape
        bits = _MOST_BITS * heads * dim if self._shape is None else 32 * math.prod(self._shape)
        return batch * max(heads * dim, bits) * 4 * _WIDTHS

    def write(self, codes: Tensor, keys: Tensor, at: Tensor | None = None, first: Tensor | None = None) -> None:
        """Hash keys [B, Hkv, t, D] into codes [B, H, N, W], from token `at` on; None: into all of them.

        Args: first: for a copy of the codes' first words, [B, H, N], or None.
        """
        if self._into is not None and self._into(keys, codes, at, first):
            return
        found = self(keys)
        for room, new in ((codes, found), *(() if first is None else ((first, found[..., 0]),))):
            if at is None:
                room.copy_(new)
            elif readable(at):
                room[:, :, int(at) : int(at) + keys.shape[2]] = new
            else:
                room.index_copy_(2, at + torch.arange(keys.shape[2], device=at.device), new)

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoder:
        return self

    def adopt(self, layer: CacheLayerMixin) -> None:
        """Track a layer that now carries these codes."""
        self._layers.add(layer)

    def release(self) -> None:
        """Turn the layers that carry these codes back into plain ones."""
        for layer in list(self._layers):
            if getattr(layer, "encoder", None) is self:  # another attachment may have taken it over
                drop_codes(layer)
        self._layers.clear()


class CodedLayer(Protocol):
    """A cache layer that carries codes, as the attention function needs it."""

    encoder: Encoder

    @property
    def codes(self) -> Tensor:
        """Codes of the cached keys, int32 [B, H, T, W]."""
        ...


class _Coded(CacheLayerMixin):
    """Base class of the layers below. Never constructed: `carry_codes` re-types a layer."""

    _layer_type = None  # keeps Hugging Face from registering a re-typed class in place of the plain one
    encoder: Encoder
    plain: type[CacheLayerMixin]
    """The original class of the layer."""
    _watched = ("keys", "values")
    """Attributes that others may change."""

    def begin(self) -> None:
        """Create the codes of the keys in the layer."""
        raise NotImplementedError

    def end(self) -> None:
        """Restore the attributes that the plain class expects."""
        raise NotImplementedError

    def mark(self) -> None:
        """Record the layer's tensors and versions, after its own changes."""
        if not torch.compiler.is_compiling():
            self._marks = self._stamps()

    def settle(self) -> None:
        """Rebuild the codes if the layer's tensors were changed from outside since `mark`."""
        if torch.compiler.is_compiling():
            return
        for (held, version), (was, before) in zip(self._stamps(), self._marks, strict=True):
            if held is not was or version != before:
                self.begin()
                return self.mark()

    def _stamps(self) -> list[tuple[Any, int]]:
        found = [getattr(self, name) for name in self._watched]
        return [(x, x._version if isinstance(x, Tensor) and not x.is_inference() else 0) for x in found]

    def plainly(self) -> CacheLayerMixin:
        """Return a plain layer with the same keys and values, without codes."""
        self.settle()
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        drop_codes(twin)
        for name in self._watched:  # without spare room
            if isinstance(held := getattr(twin, name), Tensor):
                setattr(twin, name, held.clone())
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self.plainly(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Coded:
        self.settle()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        twin.mark()
        self.encoder.adopt(twin)
        return twin


def _itself(layer: CacheLayerMixin) -> CacheLayerMixin:
    return layer


class CodedDynamicLayer(_Coded, DynamicLayer):
    """A `DynamicLayer` with codes, which also appends keys and values in place; the plain one copies all at each step.

    Keys of decode steps are hashed when their codes are first needed, so that dense steps do not hash.
    """

    plain: type[CacheLayerMixin] = DynamicLayer
    keys: Tensor | None
    values: Tensor | None
    moments: RunningMoments
    on_host = False
    """Whether keys and values are in host memory, even if the model is on a GPU."""

    def begin(self) -> None:
        self.moments = RunningMoments()
        self._keys, self._values = GrowingBuffer(self.on_host), GrowingBuffer(self.on_host)
        self._codes = CodeBuffer(self.encoder.lists)
        if self.get_seq_length():
            keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
            if keys.shape[:3] != values.shape[:3]:
                raise ValueError(
                    f"a cache layer needs as many keys as values, got {tuple(keys.shape)} and {tuple(values.shape)}; "
                    "change both together"
                )
            self._codes.append(self.encoder(keys, self.device))
            if self.on_host and self.device.type == "cuda" and keys.device.type == "cpu" and not keys.is_pinned():
                keys, values = keys.pin_memory(), values.pin_memory()
            self._keys.adopt(keys)
            self._values.adopt(values)
            self.keys, self.values = self._keys.view(), self._values.view()

    def end(self) -> None:
        if self.get_seq_length():
            self.keys, self.values = (cast(Tensor, x).to(self.device) for x in (self.keys, self.values))
        del self._keys, self._values, self._codes, self.moments

    @property
    def codes(self) -> Tensor:
        """Codes of the cached keys, int32 [B, H, T, W]."""
        self.settle()
        if len(self._codes) < len(self._keys):
            self._hash(self._keys.view()[:, :, len(self._codes) :])
        return self._codes.view()

    @property
    def first_words(self) -> Tensor | None:
        """The copy of the codes' first words, int32 [B, H, T], after `codes` has been read; None if there is none."""
        return self._codes.first

    def room_for_code(self) -> tuple[Tensor, bool]:
        """Return the codes, int32 [B, H, T or more, W], and whether the code of the last key is missing.

        If it is, the buffer has room for it: write it there and call `wrote_code`.
        """
        self.settle()
        if len(self._keys) - len(self._codes) == 1 and (room := self._codes.room(1)) is not None:
            return room, True
        return self.codes, False

    def wrote_code(self) -> None:
        """Record that the code of the last key has been written."""
        self._codes.advance(1)

    def _hash(self, keys: Tensor) -> None:
        """Append the codes of keys [B, Hkv, t, D]; on a GPU, few keys are hashed directly into the buffer."""
        if keys.shape[2] > _LATER or not self.encoder.has_hashed or readable(keys):
            return self._codes.append(self.encoder(keys))
        heads, words = self.encoder.code_shape(keys)
        like = keys.new_empty(keys.shape[0], heads, keys.shape[2], words, dtype=torch.int32)
        codes, first = self._codes.extend_both(like)
        self.encoder.write(codes, keys, None, first)

    def memory(self) -> tuple[int, int]:
        """Return the bytes of keys and values, and of codes and sums."""
        self.settle()
        _ = self.codes if self.get_seq_length() else None  # hash what is not hashed yet
        return self._keys.nbytes + self._values.nbytes, self._codes.nbytes + self.moments.nbytes

    def _buffers(self) -> tuple[GrowingBuffer, GrowingBuffer, GrowingBuffer]:
        return self._keys, self._values, self._codes

    def _show(self) -> None:
        """Point `keys` and `values`, which Hugging Face reads, at the buffers."""
        self.keys, self.values = self._keys.view(), self._values.view()
        self.mark()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, Hkv, t, D] and hash the new keys; few keys on the device are hashed later."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.settle()
        if self.on_host or key_states.shape[2] > _LATER:
            if len(self._codes) < len(self._keys):
                _ = self.codes  # hash earlier keys first
            self._hash(key_states)
        self._keys.append(key_states)
        self._values.append(value_states)
        self._show()
        return cast(Tensor, self.keys), cast(Tensor, self.values)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens from the end, with their codes."""
        self.settle()
        keys, values = self.keys, self.values
        super().crop(tokens_to_remove)
        if keys is not None and values is not None:
            self.moments.drop(keys, values, self.get_seq_length())
        for buffer in self._buffers():
            buffer.truncate(self.get_seq_length())
        self.mark()

    def reset(self) -> None:
        """Empty the layer."""
        self.keys = self.values = None  # transformers before 5.21 would keep zeros of full length
        self.is_initialized = False
        super().reset()
        self.moments = RunningMoments()
        for buffer in self._buffers():
            buffer.truncate(0)
        self.mark()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the batch rows `beam_idx`, as beam search asks."""
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the batch rows `indices`."""
        self._map_batch(lambda x: x[indices.to(x.device), ...])

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self.settle()
        if self.get_seq_length():
            for buffer in self._buffers():
                buffer.map_batch(change)
            self.moments.map_batch(change)
            self._show()


class CodedStaticLayer(_Coded, StaticLayer):
    """A `StaticLayer` with a static buffer of codes, so that a compiled step appends to it in place."""

    plain: type[CacheLayerMixin] = StaticLayer
    _watched = ("keys", "values", "cumulative_length")
    _codes: Tensor | None = None
    first_words: Tensor | None = None
    """A copy of the codes' first words, int32 [B, H, N], for searches with a shortlist on a GPU."""
    moments: StaticMoments | None = None

    def begin(self) -> None:
        if not self.is_initialized:
            return self.end()
        keys, codes = cast(Tensor, self.keys), self._codes
        if codes is None or self.moments is None or len(codes) != len(keys) or codes.device != keys.device:
            codes = self._allocate()
        else:
            self.moments.reset()
        n = int(self.cumulative_length)
        codes[:, :, :n] = self.encoder(keys[:, :, :n])
        if self.first_words is not None:
            self.first_words.copy_(codes[..., 0])

    def end(self) -> None:
        for name in ("_codes", "first_words", "moments"):
            vars(self).pop(name, None)

    @property
    def codes(self) -> Tensor | None:
        """Codes of the whole key buffer, int32 [B, H, N, W]; None before it is allocated."""
        self.settle()
        return self._codes

    def memory(self) -> tuple[int, int]:
        """Return the bytes of the static buffers: of keys and values, and of codes and sums."""
        if not self.is_initialized:
            return 0, 0
        words = 0 if self.first_words is None else self.first_words.nbytes
        ours = cast(Tensor, self._codes).nbytes + words + cast(StaticMoments, self.moments).nbytes
        return cast(Tensor, self.keys).nbytes + cast(Tensor, self.values).nbytes, ours

    def _allocate(self) -> Tensor:
        """Allocate codes and sums."""
        if torch.compiler.is_compiling():
            raise ValueError("a static cache must be allocated before it is compiled; call its early_initialization()")
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        heads, width = self.encoder.code_shape(keys)
        with ordinary_tensors():
            codes = torch.zeros(len(keys), heads, self.max_cache_len, width, dtype=torch.int32, device=keys.device)
            self._codes, self.moments = codes, StaticMoments.empty(keys, values)
            if keeps_first_words(self.encoder.lists, keys.device):
                self.first_words = codes.new_zeros(codes.shape[:3])
        words = () if self.first_words is None else (self.first_words,)
        for x in (codes, *words, *self.moments.tensors):
            torch._dynamo.mark_static_address(x)
        return codes

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys, values, codes and sums."""
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
            write_codes(codes, key_states, self.cumulative_length, self.encoder.number, self.first_words)
        else:
            self.encoder.write(codes, key_states, self.cumulative_length, self.first_words)
        found = super().update(key_states, value_states, *args, **kwargs)
        self.mark()
        return found

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()
        if self._codes is not None and self.moments is not None:
            self._codes.zero_()
            if self.first_words is not None:
                self.first_words.zero_()
            self.moments.reset()
        self.mark()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the batch rows `beam_idx`, as beam search asks."""
        self.settle()
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        if self._codes is not None and self.moments is not None and self.get_seq_length() > 0:
            self._codes = self._codes.index_select(0, beam_idx.to(self._codes.device))
            if self.first_words is not None:
                self.first_words = self.first_words.index_select(0, beam_idx.to(self._codes.device))
            self.moments.map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))
        self.mark()


class CodedQuantisedLayer(_Coded, BaseQuantizedLayer):
    """A quantised layer with the codes and moments of its keys and values before quantisation.

    `_quantised` creates its subclasses.
    """

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
        """Empty the layer."""
        super().reset()
        self._codes.truncate(0)
        self.moments = RunningMoments()
        self.mark()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the batch rows `beam_idx`, as beam search asks."""
        self.settle()
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        for held in (self._codes, self.moments):
            held.map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))
        self.mark()

    # Hugging Face's versions of these three methods would change only the unquantised tokens.
    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: quantised tokens cannot be dropped."""
        if tokens_to_remove:
            raise ValueError(f"a quantised cache cannot drop {-tokens_to_remove} tokens; use DynamicCache()")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise ValueError: quantised rows cannot be repeated."""
        raise ValueError("a quantised cache cannot repeat its rows; use DynamicCache()")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Raise ValueError: quantised rows cannot be selected."""
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
def _hybrid(plain: type[CacheLayerMixin]) -> type[_Coded]:
    coded = CodedDynamicLayer if issubclass(plain, DynamicLayer) else CodedStaticLayer

    def reorder_cache(layer: Any, beam_idx: Tensor) -> None:
        """Take the batch rows `beam_idx` of both parts, as beam search asks."""
        if coded is CodedDynamicLayer:  # the static class calls `super`, which reorders both parts
            cache_utils.LinearAttentionLayer.reorder_cache(layer, beam_idx)  # pyright: ignore[reportArgumentType]
        coded.reorder_cache(layer, beam_idx)

    own = {"plain": plain, "reorder_cache": reorder_cache}
    return cast("type[_Coded]", type(f"Coded{plain.__name__}", (coded, plain), own))


def is_quantised(layer_type: type) -> bool:
    """Whether a layer class stores keys and values quantised."""
    return issubclass(layer_type, BaseQuantizedLayer)


def coded_type(plain: type) -> type[_Coded] | None:
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


def carry_codes(layer: CacheLayerMixin, encoder: Encoder, coded: type[_Coded] | None = None) -> Any:
    """Make a cache layer carry the codes of its present and future keys.

    Args:
        layer: a plain layer, or one that carries another encoder's codes.
        encoder: hashes the keys.
        coded: the new class; by default `coded_type` of the layer's class.
    Returns: the same object, re-typed.
    Raises: ValueError if there is no such class.
    """
    if isinstance(layer, _Coded):
        drop_codes(layer)
    stop_growing(layer)
    coded = coded or coded_type(type(layer))
    if coded is None:
        raise ValueError(f"expected a cache layer that can carry codes, got {type(layer).__name__}")
    layer.__class__ = coded
    assert isinstance(layer, _Coded)
    layer.encoder = encoder
    layer.begin()
    layer.mark()
    encoder.adopt(layer)
    return layer


def drop_codes(layer: Any) -> None:
    """Restore a layer's class and attributes from before `carry_codes`."""
    layer.end()
    del layer.encoder, layer._marks
    layer.__class__ = layer.plain
