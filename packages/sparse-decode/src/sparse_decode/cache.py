"""Cache layers that carry codes beside keys and values, through everything Hugging Face does to a cache.

A layer is re-typed in place, so that the cache and every reference to it stay valid; `drop_codes` turns it back. The
codes are those of the keys as they arrived: a quantised layer's keys change when it quantises them, its codes do not.

Keys and values are everybody's: a press prunes them, a caller crops them by hand. Each layer remembers the tensors that
it left, and their versions, which torch counts up with every write; where they differ, it begins anew with what it
finds. Two kinds of writes go unnoticed, because torch does not count them: those inside compiled graphs, and those
through `tensor.data`.
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

from sparse_decode.buffer import GrowingBuffer
from sparse_decode.growing import GrowingLayer, stop_growing
from sparse_decode.modes import no_autocast, ordinary_tensors
from sparse_decode.opaque import register, write_codes
from sparse_decode.positions import readable
from sparse_decode.remainder import RunningMoments, StaticMoments

if TYPE_CHECKING:
    from transformers.cache_utils import BaseQuantizedLayer
else:  # before transformers 5.21 there is one kind of quantised layers, and no name for what all kinds share
    BaseQuantizedLayer = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)

QUANTISED = hasattr(cache_utils, "BaseQuantizedLayer")
"""Whether transformers keeps quantised layers whole: before 5.21 `reset` and beam search forgot what is quantised."""

Encode = Callable[[Tensor], Tensor]
"""Keys [B, Hkv, T, D] -> int32 codes [B, H, T, W]."""

Into = Callable[[Tensor, Tensor, Tensor | None], bool]
"""Keys, codes and a token: `Encoder.write` in one operator, if it returns True."""

_LATER = 16  # tokens of an update that are hashed only when their codes are needed
_CHUNK = 1 << 26  # bytes of float32 temporaries of the tokens hashed at once, whatever the batch and the context
_WIDTHS = 8  # numbers that hashing a key makes, over those of the key or its bits: itself, hidden, bits, and their sums
_MOST_BITS = 8  # of a code for each number of its key


class Encoder:
    """Hashes the keys of one layer of one attachment, and knows the cache layers that it hashes for.

    Deep copies of a cache layer share its encoder.
    """

    def __init__(
        self, encode: Encode, into: Into | None = None, traceable: Callable[[Tensor], bool] = lambda keys: False
    ):
        self._encode = encode
        self._into = into
        self.traceable: Callable[[Tensor], bool] = traceable
        """Whether a compiled graph can hold the hashing of keys [B, Hkv, 1, D] as operators."""
        self._shape: tuple[int, int] | None = None
        self._layers = WeakSet[CacheLayerMixin]()
        self.number: int = register(self)

    def __call__(self, keys: Tensor, device: torch.device | None = None) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, H, T, W], on another device if one is named."""
        device, n = keys.device if device is None else device, keys.shape[2]
        with no_autocast(device):
            first = self._learn(self._encode(keys[:, :, : self._tokens_at_once(keys)].to(device)))
            if (done := first.shape[2]) == n:
                return first
            # Made at once: pieces that are kept would lie among temporaries, whose memory could then not be given back.
            codes = first.new_empty(*first.shape[:2], n, first.shape[3])
            codes[:, :, :done] = first
            while done < n:
                end = min(n, done + self._tokens_at_once(keys))
                codes[:, :, done:end] = self._encode(keys[:, :, done:end].to(device))
                done = end
        return codes

    def code_shape(self, keys: Tensor, device: torch.device | None = None) -> tuple[int, int]:
        """Return heads and int32 words of the codes of keys like these [B, Hkv, T, D]; hashes one of zeros at first."""
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
        """Return the most bytes that hashing keys [B, Hkv, T, D] holds beside its result; those may be meta tensors.

        It must have hashed before, or been asked for `code_shape`.
        """
        return min(keys.shape[2], self._tokens_at_once(keys)) * self._bytes_per_token(keys)

    def _learn(self, codes: Tensor) -> Tensor:
        self._shape = codes.shape[1], codes.shape[3]
        return codes

    def _tokens_at_once(self, keys: Tensor) -> int:
        return max(1, _CHUNK // (self._bytes_per_token(keys) + 1))

    def _bytes_per_token(self, keys: Tensor) -> int:
        """Count the bytes of temporaries; as if there were many bits until the first codes say how many."""
        batch, heads, _, dim = keys.shape
        bits = _MOST_BITS * heads * dim if self._shape is None else 32 * math.prod(self._shape)
        return batch * max(heads * dim, bits) * 4 * _WIDTHS

    def write(self, codes: Tensor, keys: Tensor, at: Tensor | None = None) -> None:
        """Hash keys [B, Hkv, t, D] into codes [B, H, N, W], from token `at` on; None: into all of them."""
        if self._into is not None and self._into(keys, codes, at):
            return
        if at is None:
            codes.copy_(self(keys))
        elif readable(at):
            codes[:, :, int(at) : int(at) + keys.shape[2]] = self(keys)
        else:
            codes.index_copy_(2, at + torch.arange(keys.shape[2], device=at.device), self(keys))

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoder:
        return self

    def adopt(self, layer: CacheLayerMixin) -> None:
        """Remember a layer that now carries these codes."""
        self._layers.add(layer)

    def release(self) -> None:
        """Turn the layers that carry these codes back into plain ones."""
        for layer in list(self._layers):
            if getattr(layer, "encoder", None) is self:  # another attachment may have taken it over
                drop_codes(layer)
        self._layers.clear()


class CodedLayer(Protocol):
    """What the attention function needs of a cache layer that carries codes."""

    encoder: Encoder

    @property
    def codes(self) -> Tensor:
        """Codes of the cached keys, int32 [B, H, T, W]."""
        ...


class _Coded(CacheLayerMixin):
    """What the layers below share. Never constructed: `carry_codes` re-types a layer."""

    _layer_type = None  # keeps Hugging Face from registering a re-typed class in place of the plain one
    encoder: Encoder
    plain: type[CacheLayerMixin]
    """The class that the layer had."""
    _watched = ("keys", "values")
    """Attributes that hold what others may change."""

    def begin(self) -> None:
        """Make the codes of what the layer holds already."""
        raise NotImplementedError

    def end(self) -> None:
        """Leave the layer as its plain class would have it."""
        raise NotImplementedError

    def mark(self) -> None:
        """Remember what the layer holds: all changes so far were its own."""
        if not torch.compiler.is_compiling():
            self._marks = self._stamps()

    def settle(self) -> None:
        """Begin anew with what the layer holds, if somebody else has changed that."""
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
        """Return a plain layer that holds the same, without the codes."""
        self.settle()
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        drop_codes(twin)
        for name in self._watched:  # without the spare room behind them
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
    """A `DynamicLayer` that also appends keys and values in place, where the plain one copies them all each step.

    The keys of single steps are hashed when their codes are first asked for: steps that stay dense do without.
    """

    plain: type[CacheLayerMixin] = DynamicLayer
    keys: Tensor | None
    values: Tensor | None
    moments: RunningMoments
    on_host = False
    """Whether keys and values live in host memory, whatever the device of the model."""

    def begin(self) -> None:
        self.moments = RunningMoments()
        self._keys, self._values = GrowingBuffer(self.on_host), GrowingBuffer(self.on_host)
        self._codes = GrowingBuffer()
        if self.get_seq_length():
            keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
            if keys.shape[:3] != values.shape[:3]:
                raise ValueError(
                    f"a cache layer needs as many keys as values, got {tuple(keys.shape)} and {tuple(values.shape)}; "
                    "who changes one must change the other"
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

    def room_for_code(self) -> tuple[Tensor, bool]:
        """Return the codes, int32 [B, H, T or more, W], and whether the last key still has none, but room for it.

        Who writes it there says so by `wrote_code`.
        """
        self.settle()
        if len(self._keys) - len(self._codes) == 1 and (room := self._codes.room(1)) is not None:
            return room, True
        return self.codes, False

    def wrote_code(self) -> None:
        """Take the code of the last key as written."""
        self._codes.advance(1)

    def _hash(self, keys: Tensor) -> None:
        """Append the codes of keys [B, Hkv, t, D]; on a GPU few are hashed to where they are to lie."""
        if keys.shape[2] > _LATER or not self.encoder.has_hashed or readable(keys):
            return self._codes.append(self.encoder(keys))
        heads, words = self.encoder.code_shape(keys)
        like = keys.new_empty(keys.shape[0], heads, keys.shape[2], words, dtype=torch.int32)
        self.encoder.write(self._codes.extend(like), keys)

    def memory(self) -> tuple[int, int]:
        """Return bytes of keys and values, and of codes and sums."""
        self.settle()
        ours = self.codes.nbytes if self.get_seq_length() else 0
        return self._keys.nbytes + self._values.nbytes, ours + self.moments.nbytes

    def _buffers(self) -> tuple[GrowingBuffer, GrowingBuffer, GrowingBuffer]:
        return self._keys, self._values, self._codes

    def _show(self) -> None:
        """Point `keys` and `values`, which Hugging Face reads, at the buffers."""
        self.keys, self.values = self._keys.view(), self._values.view()
        self.mark()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, Hkv, t, D] and hash the new keys, later if they are few and stay here."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.settle()
        if self.on_host or key_states.shape[2] > _LATER:
            if len(self._codes) < len(self._keys):
                _ = self.codes  # in the order of the keys
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
        self.keys = self.values = None  # dropped, where transformers before 5.21 would leave zeros of full length
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

    def end(self) -> None:
        for name in ("_codes", "moments"):
            vars(self).pop(name, None)

    @property
    def codes(self) -> Tensor | None:
        """Codes of the keys, int32 [B, H, N, W], of all the room; None before there is any."""
        self.settle()
        return self._codes

    def memory(self) -> tuple[int, int]:
        """Return bytes of keys and values, and of codes and sums: all of the static buffers."""
        if not self.is_initialized:
            return 0, 0
        ours = cast(Tensor, self._codes).nbytes + cast(StaticMoments, self.moments).nbytes
        return cast(Tensor, self.keys).nbytes + cast(Tensor, self.values).nbytes, ours

    def _allocate(self) -> Tensor:
        """Make room for the codes and the sums beside keys and values."""
        if torch.compiler.is_compiling():
            raise ValueError("a static cache needs its memory before it is compiled; call its early_initialization()")
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        heads, width = self.encoder.code_shape(keys)
        with ordinary_tensors():
            codes = torch.zeros(len(keys), heads, self.max_cache_len, width, dtype=torch.int32, device=keys.device)
            self._codes, self.moments = codes, StaticMoments.empty(keys, values)
        for x in (codes, *self.moments.tensors):
            torch._dynamo.mark_static_address(x)
        return codes

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys, values, codes and sums."""
        super().lazy_initialization(*args, **kwargs)
        if self.is_initialized and self._codes is None:  # a hybrid layer initialises its two parts one by one
            self._allocate()
        self.mark()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Hkv, t, D] at the present length, and the new keys' codes."""
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
        """Empty the layer."""
        super().reset()
        if self._codes is not None and self.moments is not None:
            self._codes.zero_()
            self.moments.reset()
        self.mark()

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the batch rows `beam_idx`, as beam search asks."""
        self.settle()
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        if self._codes is not None and self.moments is not None and self.get_seq_length() > 0:
            self._codes = self._codes.index_select(0, beam_idx.to(self._codes.device))
            self.moments.map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))
        self.mark()


class CodedQuantisedLayer(_Coded, BaseQuantizedLayer):
    """A quantised layer whose codes are those of the keys before quantisation. `_quantised` makes its subclasses.

    Its moments are those of keys and values as attention first saw them.
    """

    moments: RunningMoments
    _watched = ("keys", "values", "_quantized_keys", "_quantized_values")

    def begin(self) -> None:
        self.moments = RunningMoments()
        self._codes = GrowingBuffer()
        if self.is_initialized:
            self._codes.append(self.encoder(self._all_keys()))

    def end(self) -> None:
        del self._codes, self.moments

    @property
    def codes(self) -> Tensor:
        """Codes of the cached keys, int32 [B, H, T, W]."""
        self.settle()
        return self._codes.view()

    def memory(self) -> tuple[int, int]:
        """Return bytes of keys and values as they are stored, and of codes and sums."""
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

    # Hugging Face's own versions of these three change the unquantised rest alone.
    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: quantised tokens cannot be dropped."""
        if tokens_to_remove:
            raise ValueError(f"a quantised cache cannot drop {-tokens_to_remove} tokens; use DynamicCache()")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: quantised rows cannot be repeated."""
        raise ValueError("a quantised cache cannot repeat its rows; use DynamicCache()")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuse: quantised rows cannot be selected."""
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
"""Layers that keep a recurrent state, too."""


@functools.cache
def _hybrid(plain: type[CacheLayerMixin]) -> type[_Coded]:
    coded = CodedDynamicLayer if issubclass(plain, DynamicLayer) else CodedStaticLayer

    def reorder_cache(layer: Any, beam_idx: Tensor) -> None:
        """Take the batch rows `beam_idx` of both parts, as beam search asks."""
        if coded is CodedDynamicLayer:  # the other one calls `super`, which is both parts
            cache_utils.LinearAttentionLayer.reorder_cache(layer, beam_idx)  # pyright: ignore[reportArgumentType]
        coded.reorder_cache(layer, beam_idx)

    own = {"plain": plain, "reorder_cache": reorder_cache}
    return cast("type[_Coded]", type(f"Coded{plain.__name__}", (coded, plain), own))


def is_quantised(layer_type: type) -> bool:
    """Say whether layers of a class keep their keys and values quantised."""
    return issubclass(layer_type, BaseQuantizedLayer)


def coded_type(plain: type) -> type[_Coded] | None:
    """Return the class that carries codes for layers of a plain class; None for one that nobody told us about.

    Raises: ValueError for quantised layers of a transformers in which they are not whole.
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
    """Make a cache layer carry the codes that `encoder` gives, of the keys it holds and of those to come.

    Args:
        layer: a plain layer, or one that carries another encoder's codes.
        coded: the class it becomes, `coded_type` of its own by default.
    Returns: the same object, re-typed.
    """
    if isinstance(layer, _Coded):
        drop_codes(layer)
    stop_growing(layer)
    coded = coded or coded_type(type(layer))
    if coded is None:
        raise ValueError(f"a layer type that can carry codes is needed, got {type(layer).__name__}")
    layer.__class__ = coded
    assert isinstance(layer, _Coded)
    layer.encoder = encoder
    layer.begin()
    layer.mark()
    encoder.adopt(layer)
    return layer


def drop_codes(layer: Any) -> None:
    """Turn a layer back into what it was before `carry_codes`."""
    layer.end()
    del layer.encoder, layer._marks
    layer.__class__ = layer.plain
