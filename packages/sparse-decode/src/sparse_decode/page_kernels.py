"""What paged decoding does on the CPU around its search and its attention, in numba: writing tokens, listing tokens."""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from sparse_decode.intrinsics import pointer

INTRINSICS = "1efc3312c11c735c"  # the digest of intrinsics.py: the compiler's cache looks at a kernel's own file only


def write(
    first: int, last: int, source: int, source_at: tuple[int, int], target: int, target_at: tuple[int, int, int],
    reach: tuple[int, int], shape: tuple[int, int, int], slots: NDArray[np.int64], like: NDArray[Any],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """Copy rows of tokens [first, last) to pages: [T, H, C] at an address to [M, S, H, C] at another.

    source_at are the strides of token and head, target_at those of page, token and head, in numbers of like's type;
    shape is H, C and S; a token of slot -1 is left out.
    """
    x, y = numba.carray(pointer(source), reach[0], like.dtype), numba.carray(pointer(target), reach[1], like.dtype)
    heads, count, size = shape
    for token in range(first, last):
        if slots[token] < 0:
            continue
        place = slots[token] // size * target_at[0] + slots[token] % size * target_at[1]
        for head in range(heads):
            at, to = token * source_at[0] + head * source_at[1], place + head * target_at[2]
            y[to : to + count] = x[at : at + count]


def list_tokens(
    first: int, last: int, lengths: NDArray[np.int64], dense: NDArray[np.bool_], selected: NDArray[np.int64],
    sink: int, recent: int, indices: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled  # fmt: skip
    """List what rows [first, last) read, ascending, then -1: all of it, or the sink, the selected and the recent.

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
