"""Captured q, k and v of contexts, read layer by layer: one safetensors file for each context.

A file is replaced atomically and names in its header what it was made from (`hashtrain.data.capture.context_key`), so a
killed run leaves only files that the next one can use, and a file of anything else is made anew. Reading is lazy:
training a layer maps only that layer's bytes.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from hashtrain.files.untrusted import open_tensors


@dataclass(frozen=True)
class Kept:
    """What is kept of one context in addition to its keys."""

    rows: tuple[Tensor, ...] | None = None
    """For each layer, the rows whose queries are kept, int32 [R], ascending; None for all rows."""
    values: bool = True


EVERYTHING = Kept()
KEY = "made_from"
"""Entry of a file's header that says what it was made from."""
_REMEDY = "delete it and capture again"


class Capture:
    """Stored queries, keys and values of contexts; `read(context, layer)` returns (q, k, scaling) of one layer."""

    def __init__(self, folder: Path, count: int):
        self.folder: Path = folder
        self.count: int = count

    def __len__(self) -> int:
        return self.count

    def file(self, context: int) -> Path:
        """Return the path of one context's file."""
        return self.folder / f"{context:05d}.safetensors"

    def holds(self, context: int, key: str) -> bool:
        """Whether the context's file is whole and was made from what `key` says; a damaged one is not."""
        try:
            with open_tensors(self.file(context), _REMEDY) as file:
                return (cast("dict[str, str] | None", file.metadata()) or {}).get(KEY) == key
        except (FileNotFoundError, ValueError):
            return False

    def read(self, context: int, layer: int) -> tuple[Tensor, Tensor, float]:
        """Read q [1, Hq, T, D], k [1, Hkv, T, D] in the stored dtype, and the attention scaling.

        Raises: ValueError naming the file if it is damaged or lacks them; FileNotFoundError if it is missing.
        """
        return self.queries(context, layer), *self.keys(context, layer)

    def keys(self, context: int, layer: int) -> tuple[Tensor, float]:
        """Read k [1, Hkv, T, D] and the attention scaling. Raises: as `read`."""
        with open_tensors(self.file(context), _REMEDY) as file:
            return file.get_tensor(f"k.{layer}"), float(file.metadata()[f"scaling.{layer}"])

    def queries(self, context: int, layer: int, rows: Tensor | None = None) -> Tensor:
        """Read q [1, Hq, T, D], or only the queries of `rows`, int64 [R]: [1, Hq, R, D].

        Raises: as `read`, and ValueError if one of these rows is not stored.
        """
        with open_tensors(self.file(context), _REMEDY) as file:
            names = set(file.keys())
            at = cast("Tensor | None", file.get_tensor(f"rows.{layer}") if f"rows.{layer}" in names else None)
            return _chosen(file.get_tensor(f"q.{layer}"), at, rows, file.get_slice(f"k.{layer}").get_shape()[2])

    def values(self, context: int, layer: int) -> Tensor:
        """Read v [1, Hkv, T, Dv] in the stored dtype. Raises: as `read`."""
        with open_tensors(self.file(context), _REMEDY) as file:
            return file.get_tensor(f"v.{layer}")


def _chosen(q: Tensor, at: Tensor | None, rows: Tensor | None, tokens: int) -> Tensor:
    """Return the queries [1, Hq, R, D] of `rows`, int64 [R], None for all, of those that were kept: q [1, Hq, S, D] of
    the rows `at`, int [S], ascending, None for all `tokens`."""
    if at is None:
        return q if rows is None else q[:, :, rows]
    rows = torch.arange(tokens) if rows is None else rows
    places = torch.searchsorted(at, rows.to(at.dtype)).clamp(max=max(0, len(at) - 1))
    lost = rows[at[places] != rows] if len(at) else rows
    if len(lost):
        raise ValueError(f"the queries of {len(at)} rows were kept, but not of row {int(lost[0])}; {_REMEDY}")
    return q[:, :, places]
