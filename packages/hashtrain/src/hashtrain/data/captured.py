"""Captured q, k and v of contexts, read layer by layer: one safetensors file for each context.

A file is replaced atomically and names in its header what it was made from (`hashtrain.data.capture.context_key`), so a
killed run leaves only files that the next one can use, and a file of anything else is made anew. Reading is lazy:
training a layer maps only that layer's bytes.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import math
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from hashtrain.files.untrusted import open_tensors

FEW = 512
"""About how many rows' queries are kept of a context of more than 4,096 tokens if not all are needed."""


class Kept(NamedTuple):
    """What is stored of a context beside its keys."""

    queries: bool
    """All queries. With every query, a context would take four times the bytes, and a training step reads 64."""
    values: bool

    def stride(self, tokens: int) -> int:
        """Return the distance of the rows whose queries are stored, of a context of so many tokens."""
        return 1 if self.queries or tokens <= 8 * FEW else tokens // FEW


ALL, STEPS, ROWS = Kept(True, True), Kept(False, False), Kept(False, True)
"""Kept of contexts that starts and evaluation read; of those that training alone reads; of those of calibration."""
KEY, STRIDE = "made_from", "stride"
"""Entries of a file's header: what it was made from, and the distance of the rows whose queries it holds."""
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
            return file.get_tensor(f"k.{layer}"), self._number(context, file, f"scaling.{layer}")

    def queries(self, context: int, layer: int, rows: Tensor | None = None) -> Tensor:
        """Read q [1, Hq, T, D], or only the queries of `rows`, int64 [R]: [1, Hq, R, D].

        Raises: as `read`, and ValueError if one of these rows is not stored.
        """
        apart = self.stride(context)
        if apart > 1 and (rows is None or bool((rows % apart).any())):
            raise ValueError(f"{self.file(context)} holds the queries of every {apart}th row alone; {_REMEDY}")
        with open_tensors(self.file(context), _REMEDY) as file:
            q = file.get_tensor(f"q.{layer}")
        return q if rows is None else q[:, :, rows // apart]

    def stride(self, context: int) -> int:
        """Return the distance of the rows whose queries are stored. Raises: as `read`."""
        with open_tensors(self.file(context), _REMEDY) as file:
            return int(self._number(context, file, STRIDE, "1"))

    def _number(self, context: int, file: Any, name: str, otherwise: str = "none") -> float:
        text = (cast("dict[str, str] | None", file.metadata()) or {}).get(name, otherwise)
        try:
            if 0 < float(text) < math.inf:
                return float(text)
        except ValueError:
            pass
        raise ValueError(f"{self.file(context)} is damaged: expected a {name} above 0, got {text}; {_REMEDY}")

    def values(self, context: int, layer: int) -> Tensor:
        """Read v [1, Hkv, T, Dv] in the stored dtype. Raises: as `read`."""
        with open_tensors(self.file(context), _REMEDY) as file:
            return file.get_tensor(f"v.{layer}")
