"""What the host decides for the kernels: argument structures, histogram levels, chunks and the workspace.

The structures mirror those of kernels/common.cuh, select.cu and score.cu field by field.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Self

THREADS = 512  # SELECT_THREADS
MAX_BINS = 4 * THREADS
VECTOR = 8
TILE = 2048  # keys that a block of the scoring takes in one turn; a smaller chunk would leave threads idle
BLOCKS_PER_PROCESSOR = 2  # their registers and warps fill a multiprocessor half; more would cost more tables
MAX_POSITIONS = 1 << 30
MAX_SCORE = 0xFFFF
MAX_WORKSPACE = 1 << 28  # bytes; more rows than fit are searched in turns


class RowMap(ctypes.Structure):
    """Sizes of the leading dimensions, slowest first, and the words from one entry to the next."""

    _fields_ = (("size", ctypes.c_int32 * 4), ("query", ctypes.c_int64 * 4), ("keys", ctypes.c_int64 * 4))


class Weights(ctypes.Structure):
    _fields_ = (("of", ctypes.c_int32 * 8),)


class Window(ctypes.Structure):
    """Which positions of a row compete; addresses of int32 arrays, or 0 and one value for all rows."""

    _fields_ = (
        ("lengths", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("length", ctypes.c_int32),
        ("start", ctypes.c_int32),
        ("sink", ctypes.c_int32),
        ("recent", ctypes.c_int32),
        ("n", ctypes.c_int32),
    )


class Selection(ctypes.Structure):
    """How many a row selects: the address of an int32 array or 0, one count for all rows, slots of the output."""

    _fields_ = (("k", ctypes.c_void_p), ("count", ctypes.c_int32), ("width", ctypes.c_int32))


class Levels(ctypes.Structure):
    """Digits of a sort key, from the top: digit l is its bits from shift[l] up to shift[l - 1]."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("shift", ctypes.c_int32 * 3),
        ("bins", ctypes.c_int32 * 3),
        ("width", ctypes.c_int32),
    )

    @classmethod
    def of(cls, shifts: Sequence[int], bins: Sequence[int]) -> Self:
        padded = [-(-count // 4) * 4 for count in bins]
        missing = [0] * (3 - len(padded))
        return cls(
            len(padded), (ctypes.c_int32 * 3)(*shifts, *missing), (ctypes.c_int32 * 3)(*padded, *missing), sum(padded)
        )


INT32_LEVELS = Levels.of((21, 10, 0), (2048, 2048, 1024))


def require_positions(n: int) -> None:
    """Refuse more positions than the kernels can add in 32 bits."""
    if n > MAX_POSITIONS:
        raise ValueError(f"on CUDA a row may have at most {MAX_POSITIONS} positions, got {n}; split the keys")


def require_rows(rows: int) -> None:
    """Refuse more rows than the kernels can number in 32 bits."""
    if rows >= 1 << 31:
        raise ValueError(f"on CUDA a call may have fewer than {1 << 31} rows, got {rows}; split the queries")


def score_levels(words: int, weights: Sequence[int]) -> Levels:
    """Return the levels of scores in [0, 32 W sum(weights)].

    Raises: ValueError if the scores need more than 16 bits.
    """
    top = 32 * words * sum(weights)
    if top > MAX_SCORE:
        raise ValueError(
            f"the scores of a search must fit 16 bits, got sum(weights) * 32 * W = {top}; use fewer planes or words"
        )
    shift = 0
    while (top >> shift) + 1 > MAX_BINS:
        shift += 1
    return Levels.of((0,), (top + 1,)) if shift == 0 else Levels.of((shift, 0), ((top >> shift) + 1, 1 << shift))


def are_planes(weights: Sequence[int]) -> bool:
    """Tell whether weights are those of `planes` or `group_planes`: few enough to compile a kernel for each."""
    *regular, last = weights
    return list(regular) == [1 << p for p in range(len(regular))] and 1 <= last <= 1 << len(regular)


def collapse(lead: Sequence[int], query: Sequence[int], keys: Sequence[int]) -> RowMap | None:
    """Merge the leading dimensions that follow each other in both operands; None if more than four remain."""
    merged: list[tuple[int, int, int]] = []
    for size, q, k in zip(lead, query, keys, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (q * size, k * size):
            size *= merged.pop()[0]
        merged.append((size, q, k))
    if len(merged) > 4:
        return None
    whole = [(1, 0, 0)] * (4 - len(merged)) + merged
    sizes, queries, rows = zip(*whole, strict=True)
    return RowMap((ctypes.c_int32 * 4)(*sizes), (ctypes.c_int64 * 4)(*queries), (ctypes.c_int64 * 4)(*rows))


class Workspace(NamedTuple):
    """Scratch memory of one turn of a search: offsets in 4-byte words from a 16-byte boundary.

    The first `zeros` words, totals and tickets, must be zero before the first launch; every search leaves them so.
    """

    rows: int
    splits: int
    stride: int  # scores from one row to the next
    tickets: int
    zeros: int
    table: int
    scores: int
    words: int

    @classmethod
    def plan(cls, rows: int, n: int, levels: Levels, processors: int, *, scores: bool = True) -> Self:
        """Lay out a search of `rows` rows of n positions, or of the rows of one turn if they are too many.

        Args:
            processors: multiprocessors of the device.
            scores: whether the 16-bit scores are kept here, too.
        Raises: ValueError for more than the kernels can count.
        """
        require_rows(rows)
        require_positions(n)
        stride = -(-n // VECTOR) * VECTOR
        per_row = 4 * (levels.width + 1) + (2 * stride if scores else 0)
        rows = max(1, min(rows, MAX_WORKSPACE // (per_row + 4 * levels.width)))
        blocks = BLOCKS_PER_PROCESSOR * processors
        splits = max(1, min(blocks // rows, -(-n // TILE)))
        tickets = rows * levels.width
        zeros = tickets + -(-rows // 4) * 4
        kept = zeros + rows * splits * levels.width
        return cls(rows, splits, stride, tickets, zeros, zeros, kept, kept + (rows * stride // 2 if scores else 0))
