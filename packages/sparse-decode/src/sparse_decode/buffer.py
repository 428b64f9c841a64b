"""A tensor that grows along its token dimension: a step writes its own rows and copies none before them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparse_decode.modes import ordinary_tensors

_SLACK = 64  # rows; and an eighth of what is held, so that all the copies of growing cost eight writes a row


def spare_rows(end: int) -> int:
    """Return how many rows a buffer that grows to hold `end` rows has room for beyond them."""
    return max(_SLACK, end // 8)


class GrowingBuffer:
    """Rows of the tokens seen so far, [B, H, T, X].

    Args:
        host: keep the rows in host memory, pinned if there is a GPU to read them: it writes there without anybody
            waiting, and what is read on the CPU has to `wait` for it. Those of one token lie side by side, so that they
            are one copy.
    """

    def __init__(self, host: bool = False) -> None:
        self._data: Tensor | None = None
        self._own = True
        self._length = 0
        self._host = host
        self._writer: torch.device | None = None  # a GPU that may still be writing

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held; the spare room for the next ones is not counted."""
        return self.view().nbytes if self._length else 0

    def view(self) -> Tensor:
        """Return the filled part, [B, H, T, X], without a copy."""
        if self._data is None:
            raise ValueError("the buffer is empty; append rows first")
        return self._data[:, :, : self._length]

    def adopt(self, rows: Tensor) -> None:
        """Hold these rows [B, H, T, X] instead; those on the same device are not copied until the next append.

        They are never written to, even where a crop has left room in them: others may hold them, too. Rows made in
        inference mode are copied: torch does not count writes to them, so a change by somebody else would go unnoticed.
        """
        self._data, self._length = None, 0
        if (self._host and rows.device.type != "cpu") or rows.is_inference():
            self.append(rows)
        else:
            self._data, self._length, self._own = rows, rows.shape[2], False

    def append(self, rows: Tensor) -> None:
        """Write the rows of the next tokens, [B, H, t, X]; of another type, all get the type that holds both.

        Raises: ValueError if they are on another device.
        """
        to = self.extend(rows)
        if self._host and rows.device.type == "cuda":
            self._writer = rows.device
            to.permute(2, 0, 1, 3).copy_(rows.permute(2, 0, 1, 3), non_blocking=True)
        else:
            to.copy_(rows)

    def extend(self, rows: Tensor) -> Tensor:
        """Return where rows like these, [B, H, t, X], are to be written: behind the others, of which they now are."""
        end, data = self._length + rows.shape[2], self._data
        if data is not None and not self._host and rows.device != data.device:
            raise ValueError(
                f"a cache filled on {data.device} needs rows there, got some on {rows.device}; begin with a new cache"
            )
        kind = rows.dtype if data is None else torch.promote_types(data.dtype, rows.dtype)
        if data is None or not self._own or end > data.shape[2] or kind != data.dtype:
            grown = self._room(rows, end + spare_rows(end), kind)
            if data is not None:
                self.wait()
                grown[:, :, : self._length] = self.view()
            data = self._data = grown
            self._own = True
        first, self._length = self._length, end
        return data[:, :, first:end]

    def room(self, tokens: int) -> Tensor | None:
        """Return all there is, [B, H, T or more, X], if so many more tokens can be written behind the others."""
        data = self._data
        return data if data is not None and self._own and self._length + tokens <= data.shape[2] else None

    def advance(self, tokens: int) -> None:
        """Take so many tokens, which were written to `room`, as held."""
        self._length += tokens

    def wait(self) -> None:
        """Wait until the rows are there: before the CPU reads them."""
        if self._writer is not None:
            torch.cuda.current_stream(self._writer).synchronize()
            self._writer = None

    def truncate(self, length: int) -> None:
        """Forget the rows of tokens from `length` on."""
        self._length = min(self._length, length)
        if not self._length:
            self._data = None  # the next sequence may have another batch size

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer by a change of its batch dimension."""
        if self._data is not None:
            pinned = self._data.is_pinned() if self._host else False
            self.wait()
            with ordinary_tensors():
                self._data = change(self._data)
            if pinned:  # copies of pinned memory are not
                self._data = self._data.permute(2, 0, 1, 3).contiguous().pin_memory().permute(1, 2, 0, 3)
            self._own = not self._data.is_inference()

    def _room(self, like: Tensor, tokens: int, kind: torch.dtype) -> Tensor:
        (batch, heads, _, width), pinned = like.shape, like.device.type == "cuda"
        with ordinary_tensors():
            if self._host:
                shape = tokens, batch, heads, width
                return torch.empty(shape, dtype=kind, device="cpu", pin_memory=pinned).permute(1, 2, 0, 3)
            return torch.empty(batch, heads, tokens, width, dtype=kind, device=like.device, pin_memory=False)
