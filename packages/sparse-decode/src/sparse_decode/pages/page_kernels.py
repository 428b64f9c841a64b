"""Numba kernels of paged decoding on the CPU besides search and attention: writing tokens and listing tokens."""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import numba
import numpy as np
from hashcore.cpu.intrinsics import pointer
from hashcore.cpu.parts import copy
from numpy.typing import NDArray


def write(
    first: int, last: int, source: int, source_at: tuple[int, int], target: int, target_at: tuple[int, int, int],
    reach: tuple[int, int], shape: tuple[int, int, int], slots: NDArray[np.int64], like: NDArray[Any],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Copy the rows of tokens [first, last) from [T, H, C] at address `source` to pages [M, S, H, C] at `target`.

    source_at: strides of token and head; target_at: strides of page, token and head, in elements of like's dtype;
    shape: H, C and S. Tokens with slot -1 are skipped.
    """
    x, y = numba.carray(pointer(source), reach[0], like.dtype), numba.carray(pointer(target), reach[1], like.dtype)
    heads, count, size = shape
    for token in range(first, last):
        if slots[token] < 0:
            continue
        place = slots[token] // size * target_at[0] + slots[token] % size * target_at[1]
        for head in range(heads):
            at, to = token * source_at[0] + head * source_at[1], place + head * target_at[2]
            copy(x[at : at + count], y[to:])


def list_tokens(
    first: int, last: int, lengths: NDArray[np.int64], dense: NDArray[np.bool_], selected: NDArray[np.int64],
    sink: int, recent: int, indices: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Write the tokens that rows [first, last) read, ascending, then -1: all, or sink, selected and recent tokens.

    selected is [B, H, 1, K], indices [B, H, 1, K']; a row sees lengths[b] tokens.
    """
    for b in range(first, last):
        n = lengths[b]
        for h in range(indices.shape[1]):
            out, used = indices[b, h, 0], 0
            head, tail = (n, n) if dense[b] else (min(sink, n), max(n - recent, min(sink, n)))
            for token in range(head):
                out[used] = token
                used += 1
            if not dense[b]:
                for token in selected[b, h, 0]:
                    if token >= 0:
                        out[used] = token
                        used += 1
            for token in range(tail, n):
                out[used] = token
                used += 1
            out[used:] = -1
