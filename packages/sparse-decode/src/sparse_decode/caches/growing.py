"""Cache layers of our classes in place of plain ones, and the simplest of them: a dynamic layer that grows in place.

transformers' `DynamicLayer` copies all keys and values at each step. `grow` re-types a layer that stays dense, so that
its tokens have spare room behind them; `cache.carry_codes` one that also carries codes.

Others may change keys and values: a press prunes them, a caller crops them. Each layer therefore remembers its tensors
and their versions, which torch increments with every write. If they differ from what it left, it begins anew with what
is there. Two kinds of writes are not noticed, because torch does not count them: writes in compiled graphs and writes
through `tensor.data`.
"""

from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from sparse_decode.caches.buffer import GrowingBuffer

FROM = 512
"""Below this many tokens, copying all of them takes less time than the Python code that avoids it."""
FEW = 16
"""An update of at most this many tokens is appended in few calls, and hashed only when its codes are needed."""


class Retyped(CacheLayerMixin):
    """A layer of one of our classes. Never constructed: `grow` and `carry_codes` re-type a plain layer."""

    _layer_type = None  # keeps Hugging Face from registering a re-typed class in place of the plain one
    plain: type[CacheLayerMixin]
    """The original class of the layer."""
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
    for name in ("encoder", "_marks"):
        vars(layer).pop(name, None)
    layer.__class__ = layer.plain


class GrowingLayer(Retyped, DynamicLayer):
    """A `DynamicLayer` whose keys and values have spare room for later tokens."""

    plain: type[CacheLayerMixin] = DynamicLayer
    keys: Tensor | None
    values: Tensor | None
    on_host = False
    """Whether keys and values are in host memory, even if the model is on a GPU."""

    def begin(self) -> None:
        self._keys, self._values = GrowingBuffer(self.on_host), GrowingBuffer(self.on_host)
        if self.get_seq_length():
            self._keys.adopt(cast(Tensor, self.keys))
            self._values.adopt(cast(Tensor, self.values))
            self.keys, self.values = self._keys.view(), self._values.view()

    def end(self) -> None:
        del self._keys, self._values

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
        found = None
        if type(key_states) is Tensor and key_states.is_cpu and not torch.compiler.is_dynamo_compiling():
            (_, keys, at), (_, values, then) = self._marks  # a step as below, in few calls
            same = keys is self.keys and values is self.values and at is not None and then is not None
            same = same and keys._version == at and values._version == then
            grad = key_states.requires_grad or value_states.requires_grad
            if same and not grad and not self.on_host and key_states.shape[2] <= FEW:
                found = _append_both(self._keys, self._values, key_states, value_states)
        if found is None:
            return self._update(key_states, value_states)
        self.keys, self.values = keys, values = found
        # Views of the buffers' own tensors, whose writes torch counts.
        self._marks = [("keys", keys, keys._version), ("values", values, values._version)]
        return found

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        alike = not torch.compiler.is_dynamo_compiling()
        for x, held in ((key_states, self.keys), (value_states, self.values)):
            alike = alike and type(x) is Tensor and not x.requires_grad and held is not None and held.dim() == 4
            alike = alike and x.dtype == held.dtype and x.shape[:2] == held.shape[:2]  # pyright: ignore[reportOptionalMemberAccess]
        if not alike:  # torch concatenates them, or raises the error
            return DynamicLayer.update(self, key_states, value_states)
        self.settle()
        self.keys, self.values = found = self._keys.append(key_states), self._values.append(value_states)
        self.mark()
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheLayerMixin:
        memo[id(self)] = twin = self.plainly()
        return twin


def _append_both(
    first: GrowingBuffer, second: GrowingBuffer, rows: Tensor, more: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Append the rows of the same tokens to two buffers that are not on the host, as two calls of `append`.

    Returns: their filled parts; None if there is no room for rows like these: nothing was done.
    """
    a, b, n, tokens = first._data, second._data, first.length, rows.shape[2]
    if a is None or b is None or not first._own or not second._own or second.length != n or more.shape[2] != tokens:
        return None
    end = n + tokens
    if end > a.shape[2] or end > b.shape[2] or rows.dtype != a.dtype or more.dtype != b.dtype:
        return None
    if rows.device != a.device or rows.shape[:2] != a.shape[:2] or more.shape[:2] != b.shape[:2]:
        return None
    a.narrow(2, n, tokens).copy_(rows)
    b.narrow(2, n, tokens).copy_(more)
    first.length = second.length = end
    return a.narrow(2, 0, end), b.narrow(2, 0, end)


def may_grow(hidden: Tensor) -> bool:
    """Whether the cache of a layer with these hidden states may be written in place."""
    return hidden.device.type == "cpu" and not hidden.requires_grad and not torch.compiler.is_compiling()


def grow(layer: CacheLayerMixin, layers: WeakSet[CacheLayerMixin]) -> GrowingLayer:
    """Make a plain dynamic layer grow in place, and add it to `layers`. Returns: the same object."""
    layer.__class__ = GrowingLayer
    layers.add(layer)
    growing = cast(GrowingLayer, layer)
    growing.begin()
    growing.mark()
    return growing
