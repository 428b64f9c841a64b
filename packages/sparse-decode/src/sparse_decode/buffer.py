"""A tensor that grows along its token dimension: a step writes its own rows and copies none before them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_SLACK = 64  # rows; and an eighth of what is held, so that all the copies of growing cost eight writes a row


class GrowingBuffer:
    """Rows of the tokens seen so far, [B, H, T, X].

    Args:
        host: keep the rows in host memory, pinned if there is a GPU to read them.
    """

    def __init__(self, host: bool = False) -> None:
        self._data: Tensor | None = None
        self._own = True
        self._length = 0
        self._host = host

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

        They are never written to, even where a crop has left room in them: others may hold them, too.
        """
        self._data, self._length = None, 0
        if self._host and rows.device.type != "cpu":
            self.append(rows)
        else:
            self._data, self._length, self._own = rows, rows.shape[2], False

    def append(self, rows: Tensor) -> None:
        """Write the rows of the next tokens, [B, H, t, X]."""
        end = self._length + rows.shape[2]
        if self._data is None or not self._own or end > self._data.shape[2]:
            grown = self._room(rows, end + max(_SLACK, end // 8))
            if self._data is not None:
                grown[:, :, : self._length] = self.view()
            self._data, self._own = grown, True
        self._data[:, :, self._length : end] = rows
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget the rows of tokens from `length` on."""
        self._length = min(self._length, length)
        if not self._length:
            self._data = None  # the next sequence may have another batch size

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffer by a change of its batch dimension."""
        if self._data is not None:
            self._data = change(self._data)

    def _room(self, like: Tensor, tokens: int) -> Tensor:
        shape = (*like.shape[:2], tokens, like.shape[3])
        device = torch.device("cpu") if self._host else like.device
        pinned = self._host and like.device.type == "cuda"
        return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)
