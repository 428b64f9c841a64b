"""Codes that grow with a cache, and on a GPU a copy of their first words, which a search with a shortlist reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparse_decode.buffer import GrowingBuffer


def keeps_first_words(wanted: bool, device: torch.device) -> bool:
    """Whether codes on a device have a copy of their first words: a CPU reads whole cache lines of four codes anyway.

    Args: wanted: whether searches use a shortlist.
    """
    return wanted and device.type == "cuda"


class CodeBuffer(GrowingBuffer):
    """Codes of the tokens so far, int32 [B, H, T, W].

    Args:
        lists: whether searches use a shortlist (`Budget.shortlist`).
    """

    def __init__(self, lists: bool = False) -> None:
        super().__init__()
        self._lists = lists
        self._words = GrowingBuffer()  # empty where there is no copy

    @property
    def first(self) -> Tensor | None:
        """The copy of the first words, int32 [B, H, T] with contiguous tokens; None where there is none."""
        return self._words.view()[..., 0] if len(self._words) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the filled part, with the copy."""
        return super().nbytes + self._words.nbytes

    def append(self, rows: Tensor) -> None:
        """Append the codes of the next tokens, [B, H, t, W]."""
        super().append(rows)
        if keeps_first_words(self._lists, rows.device):
            self._words.append(rows[..., :1])

    def extend_both(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Extend by codes like these; return the new part, and that of the first words [B, H, t], to be written."""
        words = keeps_first_words(self._lists, rows.device)
        return self.extend(rows), self._words.extend(rows[..., :1])[..., 0] if words else None

    def room(self, tokens: int) -> Tensor | None:
        """Return the whole buffer if it has room for `tokens` more and no copy to be written; else None."""
        return None if len(self._words) else super().room(tokens)

    def truncate(self, length: int) -> None:
        """Drop the codes of tokens from `length` on."""
        super().truncate(length)
        self._words.truncate(length)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, a function on the batch dimension, to the codes and the copy."""
        super().map_batch(change)
        self._words.map_batch(change)
