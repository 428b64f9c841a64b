"""Keys and values in host memory, codes on the model's device: only the rows that a step selected cross over."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from sparse_decode.cache import CodedDynamicLayer


class HostLayer(CodedDynamicLayer):
    """A dynamic layer whose keys and values live in host memory, pinned where there is a GPU.

    `update` returns host tensors. The attention kernel of a GPU reads selected rows where they are, over its bus: no
    copy, no wait. What crosses is counted in `crossed`, on a CPU too, where it is where it was.
    """

    on_host = True
    crossed: int
    """Bytes of keys and values brought to the model's device so far, of steps whose selection is as large as asked."""

    def begin(self) -> None:
        self.crossed = getattr(self, "crossed", 0)  # goes on where somebody else's change makes the layer begin anew
        super().begin()

    def end(self) -> None:
        super().end()
        del self.crossed

    def plainly(self) -> Any:
        """Return a plain layer that holds the same, without the codes."""
        self._wait()
        return super().plainly()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._wait()
        return super().__deepcopy__(memo)

    def _wait(self) -> None:
        for buffer in (self._keys, self._values):
            buffer.wait()

    def all_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Bring over all keys and values [B, Hkv, T, D]: for a dense call."""
        k, v = cast(Tensor, self.keys), cast(Tensor, self.values)
        self.crossed += k.nbytes + v.nbytes
        return k.to(device, non_blocking=True), v.to(device, non_blocking=True)

    def cross(self, rows: int) -> None:
        """Count `rows` keys and values that a selection had."""
        k, v = cast(Tensor, self.keys), cast(Tensor, self.values)
        self.crossed += rows * (k.shape[3] + v.shape[3]) * k.element_size()
