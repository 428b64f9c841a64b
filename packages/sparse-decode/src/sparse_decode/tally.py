"""How many tokens a layer selected and saw, for the density that an attachment reports."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from sparse_decode.positions import Counted


class Tally:
    """Tokens selected and visible so far in one layer, summed over sparse rows and query heads.

    What is known as numbers is kept as numbers. What is known on a device only is added up there: nothing waits for it
    before somebody asks.

    Args:
        tensor: int64 [2], zeros, on the layer's device: what is not known as numbers is added there.
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
        """Start counting anew."""
        with self._lock:
            self._chain = None
            self.tensor.zero_()
            self._selected = self._visible = 0

    def add(self, selected: int, visible: int) -> None:
        """Add what is known as numbers."""
        with self._lock:
            self._selected += selected
            self._visible += visible

    def add_rows(self, selected: Tensor, visible: Tensor, sparse: Tensor) -> None:
        """Add the tokens that the sparse rows selected and saw, integers [B, Q], summed over query heads."""
        self.tensor.add_(torch.stack([(x * sparse).sum() for x in (selected, visible)]).to(self.tensor.device))

    def add_link(self, counted: Counted, heads: int) -> None:
        """Add what a step of `heads` query heads counted, by its link in the chain of all steps: nothing is launched.

        A layer that takes part in one step after the other knows its count from the first and the last link.
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
