"""Host side of the kernels: argument structures and the workspace of a search."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from hashcore.cuda.source import HASHCORE_KERNELS, structure

THREADS = 512  # SELECT_THREADS
TILE = 2048  # keys that a block scores per iteration; a smaller chunk would leave threads idle
MAX_SPLITS = 512  # blocks of a row in a search
MAX_SLOTS = 1024  # rows per turn of a search
WARPS = THREADS // 32
SAMPLE_BINS = 256
MAX_LIST = (1 << 16) - 32  # keys of a warp: their offsets and their number have 16 bits
BINS = 256  # high digits of a block's candidates
MAX_POSITIONS = MAX_LIST * WARPS * MAX_SPLITS
MAX_WORKSPACE = 1 << 28  # bytes; more rows than fit are searched in turns


RowMap: Any = structure(HASHCORE_KERNELS, "choose.cu", "RowMap")
Weights: Any = structure(HASHCORE_KERNELS, "choose.cu", "Weights")
Codes: Any = structure(HASHCORE_KERNELS, "choose.cu", "Codes")
Window: Any = structure(HASHCORE_KERNELS, "choose.cu", "Window")
"""The eligible positions of rows: a row uses entry row // lengths_per, so that values are not repeated per head."""
Selection: Any = structure(HASHCORE_KERNELS, "choose.cu", "Selection")
Space: Any = structure(HASHCORE_KERNELS, "choose.cu", "Space")
Pages: Any = structure(HASHCORE_KERNELS, "choose.cu", "Pages")


def require_positions(n: int) -> None:
    """Raise ValueError for more positions than the kernels can add in 32 bits."""
    if n > MAX_POSITIONS:
        raise ValueError(f"on CUDA a row may have at most {MAX_POSITIONS} positions, got {n}; split the keys")


def require_rows(rows: int) -> None:
    """Raise ValueError for more rows than the kernels can number in 32 bits."""
    if rows >= 1 << 31:
        raise ValueError(f"on CUDA a call may have fewer than {1 << 31} rows, got {rows}; split the queries")


def sample_shift(top: int) -> int:
    """Return the right shift from scores in [0, top] to bins of the sample."""
    return max(0, top.bit_length() - (SAMPLE_BINS - 1).bit_length())


def are_planes(weights: Sequence[int]) -> bool:
    """Whether weights are those of `planes` or `group_planes`; kernels are compiled for each of these few cases."""
    *regular, last = weights
    return list(regular) == [1 << p for p in range(len(regular))] and 1 <= last <= 1 << len(regular)


def collapse(lead: Sequence[int], query: Sequence[int], keys: Sequence[int], key: int) -> Any:
    """Merge adjacent leading dimensions that are contiguous in both operands; None if more than four remain."""
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
    return RowMap(*zip(*whole, strict=True), key)


def _whole_reads(words: int) -> int:
    """Round up to what a lane reads of a list at once (kernels/choose.cu)."""
    return -(-words // 4) * 4


class SearchSpace(NamedTuple):
    """Scratch memory of one turn of a search: offsets in 4-byte words. Its contents before a search do not matter."""

    slots: int  # rows per turn
    splits: int
    bins: int
    counts: int
    lists: int
    stride: int  # of the rows' lists
    words: int

    @classmethod
    def plan(cls, rows: int, n: int, sms: int) -> Self:
        """Plan the workspace of a search of rows of n keys each, or of one turn, on a device with `sms` SMs."""
        slots = max(1, min(rows, MAX_SLOTS, MAX_WORKSPACE // (4 * n)))
        splits = max(1, min(sms // slots, -(-n // TILE), MAX_SPLITS), -(-n // (MAX_LIST * WARPS)))
        counts = slots + slots * splits * BINS
        lists, stride = _whole_reads(counts + slots * splits * WARPS), _whole_reads(n)
        return cls(slots, splits, slots, counts, lists, stride, lists + slots * stride)

    def place(self, space: Any, address: int) -> None:
        """Set the places of the parts in the kernels' argument, for memory at an address."""
        space.floors, space.bins = address, address + 4 * self.bins
        space.counts, space.lists, space.stride = address + 4 * self.counts, address + 4 * self.lists, self.stride
