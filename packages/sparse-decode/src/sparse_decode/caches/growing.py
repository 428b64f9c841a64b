"""Cache layers of our classes in place of plain ones, and the dynamic one: it grows in place, and may carry codes.

transformers' `DynamicLayer` copies all keys and values at each step. Ours has spare room behind them. `cache.retype`
re-types a layer in place, so that the cache and all references to it stay valid; `revert` restores its type.

Others may change keys and values: a press prunes them, a caller crops them. Each layer therefore remembers its tensors
and their versions, which torch increments with every write. If they differ from what it left, it begins anew with what
is there. Two kinds of writes are not noticed, because torch does not count them: writes in compiled graphs and writes
through `tensor.data`.
"""

import copy
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from sparse_decode.caches.buffer import GrowingBuffer
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.modes import readable
from sparse_decode.sums import Sums

FROM = 512
"""Below this many tokens, copying all of them takes less time than the Python code that avoids it."""
FEW = 16
"""An update of at most this many tokens is hashed only when its codes are needed."""


class Retyped(CacheLayerMixin):
    """A layer of one of our classes. Never constructed: `cache.retype` re-types a plain layer."""

    _layer_type = None  # keeps Hugging Face from registering a re-typed class in place of the plain one
    plain: type[CacheLayerMixin]
    """The original class of the layer."""
    encoder: Encoder | None = None
    """Hashes its keys; None if it carries no codes."""
    on_host = False
    """Whether keys and values are in host memory, even if the model is on a GPU."""
    owner: "Owned"
    _watched = ("keys", "values")
    """Attributes that others may change."""

    def begin(self) -> None:
        """Take over the keys and values in the layer."""
        raise NotImplementedError

    def end(self) -> None:
        """Restore the attributes that the plain class expects."""
        raise NotImplementedError

    def mark(self) -> None:
        """Record the layer's tensors and versions, after its own changes."""
        if torch.compiler.is_compiling():
            return
        self._marks: list[tuple[str, Any, int | None]] = []
        for name in self._watched:
            x = getattr(self, name)
            counted = isinstance(x, Tensor) and not x.is_inference()  # torch counts no writes in inference mode
            self._marks.append((name, x, x._version if counted else None))

    def settle(self) -> None:
        """Begin anew if the layer's tensors were changed from outside since `mark`."""
        for name, was, version in () if torch.compiler.is_compiling() else self._marks:
            if getattr(self, name) is not was or (version is not None and was._version != version):
                self.begin()
                return self.mark()

    def wait(self) -> None:
        """Wait until a GPU has written all keys and values, before they are read on the CPU."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Retyped":
        self.wait()
        self.settle()
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        if self.on_host:
            twin.begin()  # copies are not pinned
        twin.mark()
        self.owner.add(twin)
        return twin

    def plainly(self) -> CacheLayerMixin:
        """Return a plain layer with the same keys and values, without spare room and codes."""
        self.wait()
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        revert(twin)
        for name in self._watched:
            if isinstance(held := getattr(twin, name), Tensor):
                setattr(twin, name, held.clone())
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plainly()  # names of transformers alone
        return type(plain), (plain.max_cache_len,) if isinstance(plain, StaticLayer) else (), vars(plain)


def revert(layer: Any) -> None:
    """Restore a layer's class and attributes from before it was re-typed, without copying keys and values."""
    layer.end()
    for name in ("encoder", "on_host", "owner", "_marks"):
        vars(layer).pop(name, None)
    layer.__class__ = layer.plain


class Owned(WeakSet[CacheLayerMixin]):
    """The layers that one attachment has re-typed, and their copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Owned":
        return self

    def release(self) -> None:
        """Turn these layers back into plain ones."""
        for layer in list(self):
            if getattr(layer, "owner", None) is self:  # another attachment may have taken it over
                revert(layer)
        self.clear()


class GrowingLayer(Retyped, DynamicLayer):
    """A `DynamicLayer` whose keys and values have spare room for later tokens, and that carries codes with an encoder.

    Keys of decode steps are hashed when their codes are first needed, so that dense steps do not hash. With `on_host`,
    keys and values are in host memory, pinned if the model is on a GPU, and `update` returns them there: the GPU's
    attention kernel reads selected rows from host memory, without a copy and without making the host wait.
    """

    plain: type[CacheLayerMixin] = DynamicLayer
    keys: Tensor | None
    values: Tensor | None
    sums: Sums

    def begin(self) -> None:
        self.sums, self._codes = Sums(), GrowingBuffer()
        self._keys, self._values = GrowingBuffer(self.on_host), GrowingBuffer(self.on_host)
        if not self.get_seq_length():
            return
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        if self.encoder is not None:
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
        del self._keys, self._values, self._codes, self.sums

    def wait(self) -> None:
        self._keys.wait()
        self._values.wait()

    def hold(self, keys: Tensor, values: Tensor, length: int, device: torch.device) -> None:
        """Fill an empty layer of a model on `device` with the first tokens of buffers, whose others are room."""
        like = keys.new_empty(0, device=device)
        self.lazy_initialization(like, like)
        self.keys, self.values = self._keys.hold(keys, length), self._values.hold(values, length)
        self.mark()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, Hkv, t, D]."""
        if self.encoder is None and not self._is_alike(key_states, value_states):
            return DynamicLayer.update(self, key_states, value_states)  # concatenates them, or raises the error
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.settle()
        if self.encoder is not None and (self.on_host or key_states.shape[2] > FEW):  # few are hashed later
            if self._codes.length < self._keys.length:
                _ = self.codes  # hash earlier keys first
            self._hash(key_states)
        self.keys, self.values = found = self._keys.append(key_states), self._values.append(value_states)
        self.mark()
        return found

    def _is_alike(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether keys and values can be written behind those that are there."""
        alike = not torch.compiler.is_dynamo_compiling()
        for x, held in ((key_states, self.keys), (value_states, self.values)):
            alike = alike and type(x) is Tensor and not x.requires_grad and held is not None and held.dim() == 4
            alike = alike and x.dtype == held.dtype and x.shape[:2] == held.shape[:2]  # pyright: ignore[reportOptionalMemberAccess]
        return alike

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
        self.settle()
        codes = self._codes
        if self._keys.length - codes.length == 1 and (room := codes.room(1)) is not None:
            return room, codes
        return self.codes, None

    def _hash(self, keys: Tensor) -> None:
        """Append the codes of keys [B, Hkv, t, D]; on a GPU, few keys are hashed directly into the buffer."""
        encoder = cast(Encoder, self.encoder)
        if keys.shape[2] > FEW or readable(keys):
            self._codes.append(encoder(keys))
            return
        heads, words = encoder.code_shape(keys)
        like = keys.new_empty(keys.shape[0], heads, keys.shape[2], words, dtype=torch.int32)
        encoder.write(self._codes.extend(like), keys)

    def _buffers(self) -> tuple[GrowingBuffer, GrowingBuffer, GrowingBuffer]:
        return self._keys, self._values, self._codes

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


def may_grow(hidden: Tensor) -> bool:
    """Whether the cache of a layer with these hidden states may be written in place."""
    return hidden.device.type == "cpu" and not hidden.requires_grad and not torch.compiler.is_compiling()
