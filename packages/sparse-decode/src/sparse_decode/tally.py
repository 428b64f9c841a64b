"""Counts of the tokens that a layer selected and could see, for the density that an attachment reports."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from sparse_decode.positions import Counted


class Tally:
    """Tokens selected and visible so far in one layer, summed over sparse rows and query heads.

    Counts known to the host are Python integers. Counts on a device are added up there; the host waits for them only
    in `totals`.

    Args:
        tensor: int64 [2], zeros, on the layer's device, for the counts on the device.
    """

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor = tensor
        self._lock = Lock()
        self._chain: Counted | None = None
        self._heads = 0
        self._selected = self._visible = 0

    def totals(self) -> tuple[int, int]:
        """Return tokens selected and visible so far."""
        with self._lock:
            self._add_chain()
        selected, visible = self.tensor.tolist()
        return selected + self._selected, visible + self._visible

    def reset(self) -> None:
        """Reset the counts to zero."""
        with self._lock:
            self._chain = None
            self.tensor.zero_()
            self._selected = self._visible = 0

    def add(self, selected: int, visible: int) -> None:
        """Add counts known to the host."""
        with self._lock:
            self._selected += selected
            self._visible += visible

    def add_rows(self, selected: Tensor, visible: Tensor, sparse: Tensor) -> None:
        """Add the selected and visible tokens of sparse rows, integers [B, Q], summed over query heads."""
        self.tensor.add_(torch.stack([(x * sparse).sum() for x in (selected, visible)]).to(self.tensor.device))

    def add_link(self, counted: Counted, heads: int) -> None:
        """Add the counts of a step, for `heads` query heads, without launching anything.

        All layers share a chain of cumulative counts (`Sights`). For consecutive steps, the tally stores only the
        first and the last link; their difference is the count.
        """
        with self._lock:
            chain, self._heads = self._chain, heads
            if chain is not None and chain.after is not counted.before:
                self._add_chain()
                chain = None
            self._chain = counted if chain is None else Counted(chain.before, counted.after)

    def _add_chain(self) -> None:
        if self._chain is not None:
            self.tensor.add_((self._chain.after - self._chain.before).to(self.tensor.device), alpha=self._heads)
            self._chain = None
