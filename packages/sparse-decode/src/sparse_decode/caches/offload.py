"""Keys and values in host memory, codes on the model's device: a step copies only the rows that it selected."""

from typing import Any, cast

import torch
from torch import Tensor

from sparse_decode.caches.cache import CodedDynamicLayer


class HostLayer(CodedDynamicLayer):
    """A dynamic layer whose keys and values are in host memory, pinned if the model is on a GPU.

    `update` returns host tensors. The GPU's attention kernel reads selected rows from host memory, without a copy and
    without making the host wait.
    """

    on_host = True

    def plainly(self) -> Any:
        """Return a plain layer with the same keys and values, without codes."""
        self._wait()
        return super().plainly()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._wait()
        return super().__deepcopy__(memo)

    def _wait(self) -> None:
        for buffer in (self._keys, self._values):
            buffer.wait()

    def all_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Copy all keys and values [B, Hkv, T, D] to a device, for a dense call."""
        k, v = cast(Tensor, self.keys), cast(Tensor, self.values)
        return k.to(device, non_blocking=True), v.to(device, non_blocking=True)
