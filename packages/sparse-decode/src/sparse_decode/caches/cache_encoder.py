"""Hashes the keys of one layer, some at a time; also as a custom operator, which `torch.compile` treats as opaque.

A compiled decode step so stays one graph, although it runs Python that the compiler cannot trace. A graph refers to the
Python object by the number under which it is registered; numbers are never reused.
"""

import itertools
import math
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparse_decode.modes import no_autocast, readable
from sparse_decode.select import HashSelector, Selector

_CHUNK = 1 << 26  # bytes of float32 temporaries when hashing a chunk of tokens, at any batch size and context length
_WIDTHS = 8  # temporary numbers per number or bit of a key, whichever are more: itself, hidden layer, bits, their sums
_MOST_BITS = 8  # assumed bits of a code per number of its key, until the first code is known
_numbers = itertools.count(1)
registered: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(worker: Any) -> int:
    """Register an `Encoder` or a `SparseLayer` for operators and return its number; the reference is weak."""
    number = next(_numbers)
    registered[number] = worker
    return number


@torch.library.custom_op("sparse_decode::write_codes", mutates_args=("codes",))
def write_codes(codes: Tensor, keys: Tensor, at: Tensor, writer: int) -> None:
    """Hash keys [B, Hkv, t, D] into codes [B, H, N, W], from token `at` on, an integer."""
    registered[writer].write(codes, keys, at)


write_codes.register_fake(lambda *given, **named: None)


class Encoder:
    """Hashes the keys of one layer of one attachment. Deep copies of a cache layer share its encoder."""

    def __init__(self, selector: Selector, layer: int):
        self._selector, self._layer = selector, layer
        self._hashes = selector if isinstance(selector, HashSelector) else None
        self._shape: tuple[int, int] | None = None
        self.number: int = register(self)

    def __call__(self, keys: Tensor, device: torch.device | None = None) -> Tensor:
        """Hash keys [B, Hkv, T, D] to int32 codes [B, H, T, W], on `device` if given."""
        device, (batch, heads, n, dim) = keys.device if device is None else device, keys.shape
        codes, done = None, 0
        with no_autocast(device):
            while True:
                bits = _MOST_BITS * heads * dim if self._shape is None else 32 * math.prod(self._shape)
                end = min(n, done + max(1, _CHUNK // (batch * max(heads * dim, bits) * 4 * _WIDTHS + 1)))
                part = self._selector.encode_keys(self._layer, keys[:, :, done:end].to(device))
                self._shape = part.shape[1], part.shape[3]
                if end - done == n:
                    return part
                # Allocated once: pieces between temporaries would fragment the memory, which could then not be freed.
                codes = part.new_empty(*part.shape[:2], n, part.shape[3]) if codes is None else codes
                codes[:, :, done:end] = part
                if (done := end) == n:
                    return codes

    def code_shape(self, keys: Tensor) -> tuple[int, int]:
        """Return the heads and int32 words of codes of keys [B, Hkv, T, D]; the first call hashes a key of zeros."""
        if self._shape is None:
            self(keys.new_zeros(1, keys.shape[1], 1, keys.shape[3]))
        assert self._shape is not None
        return self._shape

    def write(self, codes: Tensor, keys: Tensor, at: Tensor | None = None) -> None:
        """Hash keys [B, Hkv, t, D] into codes [B, H, N, W], from token `at` on; None: into all."""
        if self._hashes is not None and self._hashes.write_codes(self._layer, keys, codes, at):
            return
        found = self(keys)
        if at is None:
            codes.copy_(found)
        elif readable(at):
            codes[:, :, int(at) : int(at) + keys.shape[2]] = found
        else:
            codes.index_copy_(2, at + torch.arange(keys.shape[2], device=at.device), found)

    def traceable(self, keys: Tensor) -> bool:
        """Whether keys [B, Hkv, 1, D] are hashed by operators that a compiled graph can contain."""
        return self._hashes is not None and self._hashes.traceable(self._layer, keys)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Encoder":
        return self
