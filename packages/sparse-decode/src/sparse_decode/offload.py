"""Keys and values in host memory, codes on the model's device: only the rows that a step selected cross over."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from sparse_decode.cache import CodedDynamicLayer


class HostLayer(CodedDynamicLayer):
    """A dynamic layer whose keys and values live in host memory, pinned where there is a GPU.

    `update` returns host tensors: the attention function brings over what it needs, and counts it in `crossed`. On a
    CPU they are a plain second buffer, from which the same rows are copied.
    """

    on_host = True
    crossed: int
    """Bytes of keys and values brought to the model's device so far."""

    def begin(self) -> None:
        self.crossed = getattr(self, "crossed", 0)  # goes on where somebody else's change makes the layer begin anew
        super().begin()

    def end(self) -> None:
        super().end()
        del self.crossed

    def all_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Bring over all keys and values [B, Hkv, T, D]: for a dense call."""
        return self._cross(cast(Tensor, self.keys), cast(Tensor, self.values), device)

    def rows_on(self, indices: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Bring over the selected rows.

        Args:
            indices: int64 [B, H, Q, K], H a multiple of Hkv; -1 in unused slots.
        Returns: keys [B Q, H, K, D] and values [B Q, H, K, Dv], and the indices [B Q, H, 1, K] that select them there.
        """
        k, v = cast(Tensor, self.keys), cast(Tensor, self.values)
        batch, sets, n_rows, width = indices.shape
        here = indices.to(k.device).transpose(1, 2).reshape(batch * n_rows, sets, width)
        row = torch.arange(batch, device=k.device).repeat_interleave(n_rows)[:, None, None]
        head = (torch.arange(sets, device=k.device) // (sets // k.shape[1]))[:, None]
        at = here.clamp(min=0)  # an unused slot copies some row, which nothing selects
        keys, values = self._cross(k[row, head, at], v[row, head, at], device)
        slots = torch.arange(width, device=k.device).expand(here.shape).masked_fill(here < 0, -1)
        return keys, values, slots[:, :, None].to(device)

    def _cross(self, k: Tensor, v: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        self.crossed += k.nbytes + v.nbytes
        if device.type == "cuda":
            k, v = k.pin_memory(), v.pin_memory()
        return k.to(device, non_blocking=True), v.to(device, non_blocking=True)
