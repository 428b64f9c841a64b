"""A tensor that grows along its token dimension without copying earlier tokens at each step."""

import ctypes
import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from sparse_decode.modes import ordinary_tensors

_SIZE = 1 << 21  # of a huge page
_ADVICE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE and MADV_COLLAPSE of Linux
_SLACK = 64  # rows, or an eighth of the tokens: growing then copies each row eight times on average
coming: ContextVar[int] = ContextVar("sparse_decode_coming", default=0)
"""Number of tokens that the sequence being run is known to get: room for all of them is made at once."""


class GrowingBuffer:
    """Rows of the tokens so far, [B, H, T, X].

    What was returned is never written again: callers may keep it. After `truncate`, the next rows therefore go to a new
    tensor, with a copy of those that are left.

    Args:
        host: store the rows in host memory, pinned if they come from a GPU. The GPU writes asynchronously; call `wait`
            before reading on the CPU. The rows of one token are contiguous, so that they are written in one copy.
    """

    def __init__(self, host: bool = False) -> None:
        self._data: Tensor | None = None
        self._own = True
        self.length: int = 0
        """Tokens so far."""
        self._host = host
        self._writer: torch.device | None = None  # a GPU that may still be writing

    def view(self) -> Tensor:
        """Return the filled part, [B, H, T, X], without a copy."""
        if self._data is None:
            raise ValueError("the buffer is empty; append rows first")
        return self._data.narrow(2, 0, self.length)

    def adopt(self, rows: Tensor) -> None:
        """Replace the content by rows [B, H, T, X]; on the same device, they are not copied until the next append.

        They are never written to, even if a crop has left room in them, because they may be shared. Rows made in
        inference mode are copied: torch does not count writes to them, so that changes by others would go unnoticed.
        """
        self._data, self.length = None, 0
        if (self._host and rows.device.type != "cpu") or rows.is_inference():
            self.append(rows)
        else:
            self._data, self.length, self._own = rows, rows.shape[2], False

    def hold(self, data: Tensor, length: int) -> Tensor:
        """Replace the content by the first rows of data [B, H, N, X], whose others are room; return the filled part."""
        self._data, self.length, self._own = data, length, True
        return self.view()

    def append(self, rows: Tensor) -> Tensor:
        """Append the rows of the next tokens, [B, H, t, X], and return the filled part, as `view`.

        The dtype is promoted to hold old and new rows.

        Raises: ValueError if they are on another device.
        """
        to = self.extend(rows)
        if self._host and rows.device.type == "cuda":
            self._writer = rows.device
            to.permute(2, 0, 1, 3).copy_(rows.permute(2, 0, 1, 3), non_blocking=True)
        else:
            to.copy_(rows)
        return self.view()

    def extend(self, rows: Tensor) -> Tensor:
        """Extend the buffer by rows like these, [B, H, t, X], and return the new part, for the caller to write."""
        first, data, tokens = self.length, self._data, rows.shape[2]
        if data is not None and rows.shape[:2] != data.shape[:2]:
            got = f"{data.shape[0]} sequences of {data.shape[1]} heads, got {rows.shape[0]} of {rows.shape[1]}"
            raise ValueError(f"the cache holds {got} to append; repeat or select its sequences first")
        end = first + tokens
        fits = data is not None and self._own and end <= data.shape[2] and rows.dtype == data.dtype
        if data is None or not fits or rows.device != data.device:
            data = self._grown(rows, end)
        self.length = end
        return data.narrow(2, first, tokens)

    def _grown(self, rows: Tensor, end: int) -> Tensor:
        """Return the buffer with room for `end` tokens, and of a dtype that also holds rows like these."""
        data = self._data
        if data is not None and not self._host and rows.device != data.device:
            raise ValueError(
                f"a cache filled on {data.device} needs rows there, got some on {rows.device}; start with a new cache"
            )
        kind = rows.dtype if data is None else torch.promote_types(data.dtype, rows.dtype)
        if data is None or not self._own or end > data.shape[2] or kind != data.dtype:
            wanted = 0 if torch.compiler.is_compiling() else coming.get()  # a graph is not made anew for each length
            spare = max(_SLACK, end // 8 if end > wanted else wanted - end)
            grown = self._room(rows, end + spare, kind)
            if data is not None:
                self.wait()
                grown[:, :, : self.length] = self.view()
            data = self._data = grown
            self._own = True
        return data

    def room(self, tokens: int) -> Tensor | None:
        """Return the whole buffer, [B, H, T or more, X], if it has room for `tokens` more; else None.

        The caller adds what it writes there to `length`.
        """
        data = self._data
        return data if data is not None and self._own and self.length + tokens <= data.shape[2] else None

    def wait(self) -> None:
        """Wait for the GPU's writes; needed before the CPU reads the rows."""
        if self._writer is not None:
            torch.cuda.current_stream(self._writer).synchronize()
            self._writer = None

    def truncate(self, length: int) -> None:
        """Drop the rows of tokens from `length` on."""
        if length < self.length:
            self.length, self._own = length, False
        if not self.length:
            self._data = None  # the next sequence may have another batch size

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, a function on the batch dimension, to the buffer."""
        if self._data is not None:
            pinned = self._data.is_pinned() if self._host else False
            self.wait()
            with ordinary_tensors():
                self._data = change(self._data)
            if pinned:  # `change` returns unpinned memory
                self._data = self._data.permute(2, 0, 1, 3).contiguous().pin_memory().permute(1, 2, 0, 3)
            self._own = not self._data.is_inference()

    def _room(self, like: Tensor, tokens: int, kind: torch.dtype) -> Tensor:
        (batch, heads, _, width), pinned = like.shape, like.device.type == "cuda" or (self._host and like.is_pinned())
        with ordinary_tensors():
            if self._host:
                shape = tokens, batch, heads, width
                return torch.empty(shape, dtype=kind, device="cpu", pin_memory=pinned).permute(1, 2, 0, 3)
            rows = torch.empty(batch, heads, tokens, width, dtype=kind, device=like.device, pin_memory=False)
            return in_huge_pages(rows)


def in_huge_pages(x: Tensor, written: bool = False) -> Tensor:
    """Ask Linux to put a contiguous tensor's memory in pages of 2 MB, and return the tensor; elsewhere, do nothing.

    The rows of a selection are far apart. With pages of 4 KB nearly each of them needs another page's entry of the page
    table, which is often in none of the CPU's caches. A system that refuses keeps small pages, which are only slower.

    Args: written: also move what was written before; Linux does so from 6.1 on.
    """
    advise = _advise()
    if advise is not None and x.nbytes >= _SIZE and x.device.type == "cpu" and type(x) is Tensor:
        start, end = -(-x.data_ptr() // _SIZE) * _SIZE, (x.data_ptr() + x.nbytes) // _SIZE * _SIZE
        for advice in (_ADVICE, _COLLAPSE)[: 1 + written]:
            advise(start, max(0, end - start), advice)
    return x


@functools.cache
def _advise() -> Any:
    """Return libc's madvise on Linux, None elsewhere."""
    if sys.platform != "linux":
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
