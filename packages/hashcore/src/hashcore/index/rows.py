"""Immutable snapshots of the rows of an index: codes, ids and, if stored, vectors, in arrays with spare capacity.

Additions write after `count`, which older snapshots do not read; removals copy the other rows. Both create a new Rows,
and whoever has an older one (a search, a copy of the index, a forked process) is not affected.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, ops, validation

LEAST = 64  # rows of the first allocation
LARGEST_ID = 2**63 - 2  # so that the next id still fits int64


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns with spare capacity.

    codes: int32 [capacity, W]. ids: int64 [capacity]. vectors: [capacity, D] or None. count: rows in use.
    next_id: what the next row gets by default. ascending: whether ids[:count] ascend.
    places: positions of ids that do not ascend, added when first needed (about 100 bytes an id), and at -1 the number
        of first rows that it has. Rows that were made from each other by additions share it; it may have later ids, so
        `find` checks what it says.
    """

    codes: NDArray[np.int32]
    ids: NDArray[np.int64]
    vectors: NDArray[Any] | None
    count: int = 0
    next_id: int = 0
    ascending: bool = True
    places: dict[int, int] = field(default_factory=dict)

    @property
    def columns(self) -> list[NDArray[Any]]:
        """The arrays: codes, ids and, if stored, vectors."""
        return [x for x in (self.codes, self.ids, self.vectors) if x is not None]

    def alone(self) -> "Rows":
        """Return the same rows without spare capacity: neither writes to the memory of the other."""
        return self._of([x[: self.count] for x in self.columns], self.count)

    def with_room(self, extra: int) -> "Rows":
        """Return the same rows in arrays with room for `extra` more; new arrays have at least twice the capacity."""
        needed = self.count + extra
        if needed <= len(self.ids):
            return self
        capacity = max(needed, 2 * self.count, LEAST)
        fresh = [np.empty((capacity, *x.shape[1:]), x.dtype.newbyteorder("=")) for x in self.columns]
        for new, old in zip(fresh, self.columns, strict=True):
            new[: self.count] = old[: self.count]
        return replace(self._of(fresh, self.count), places=self.places)

    def appended(self, ids: NDArray[np.int64]) -> "Rows":
        """Return rows including those whose codes and vectors were written after the end, with these ids."""
        end = self.count + len(ids)
        self.ids[self.count : end] = ids
        ascending = self.ascending and _ascend(self.ids[max(self.count - 1, 0) : end])
        if self.places.get(-1) == self.count:
            self.places.update(zip(ids.tolist(), range(self.count, end), strict=True))
            self.places[-1] = end
        return replace(self, count=end, next_id=max(self.next_id, int(ids.max()) + 1), ascending=ascending)

    def without(self, positions: NDArray[np.int64]) -> "Rows":
        """Return rows without these positions, in the same order, in arrays of their own."""
        if len(positions) == 0:
            return self
        kept = np.delete(np.arange(self.count), positions)
        return self._of([x[kept].astype(x.dtype.newbyteorder("="), copy=False) for x in self.columns], len(kept))

    def _of(self, columns: list[NDArray[Any]], count: int) -> "Rows":
        codes, ids, *vectors = columns
        ascending = self.ascending or _ascend(ids[:count])
        return Rows(codes, ids, vectors[0] if vectors else None, count, self.next_id, ascending)

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each id, -1 if it is not present: by bisection if ids ascend, else by `places`."""
        if self.count == 0 or len(ids) == 0:
            return np.full(len(ids), -1)
        ordered = self.ids[: self.count]
        if not self.ascending:
            if self.places.get(-1, 0) < self.count:
                self.places.update(zip(ordered.tolist(), range(self.count), strict=True))
                self.places[-1] = self.count
            at = np.fromiter((self.places.get(i, 0) for i in ids.tolist()), np.int64, len(ids))
        elif ordered[-1] - ordered[0] < self.count and ordered[0] <= ids.min() and ids.max() <= ordered[-1]:
            return ids - ordered[0]  # of ids without gaps nothing is read
        else:
            at = np.searchsorted(ordered, ids)
        at = np.minimum(at, self.count - 1)
        return np.where(ordered[at] == ids, at, -1)

    def require(self, ids: Any) -> NDArray[np.int64]:
        """Return the position of each of one or several ids that were passed.

        Raises: ValueError if one of them is not present.
        """
        array = _id_array(ids)
        at = self.find(array.astype(np.int64, copy=False))  # what does not fit becomes negative: not present
        if (missing := at < 0).any():
            number = array[missing][0]
            raise ValueError(f"ids must be in the index, got {number}, which is not; test with `id in index` first")
        return at

    def allowed(self, ids: Any, *, others: bool) -> tuple[NDArray[np.int64], int]:
        """Return the bitmap of the rows with these ids, or of all others, as a search takes it, and their number.

        Args: ids: integers, or bool [count], a mask of the rows.
        Raises: ValueError for an id that is not present, or a mask of another length.
        """
        bits = np.zeros(self.count // 64 + 2, np.uint64)  # the kernels read two words at once
        if (given := _id_array(ids, mask=True)).dtype == np.bool_:
            if len(given) != self.count:
                raise ValueError(f"a mask must have a bool for each of the {self.count} rows, got {len(given)}; match")
            _pack(given, bits)
        elif not self._mark(given, bits):
            marked = np.zeros(self.count, np.bool_)
            marked[self.require(given)] = True
            _pack(marked, bits)
        if others:
            np.invert(bits, out=bits)
            bits[-2:] &= np.array([2 ** (self.count % 64) - 1, 0], np.uint64)
        return bits.view(np.int64), int(np.bitwise_count(bits).sum())

    def _mark(self, ids: NDArray[Any], bits: NDArray[np.uint64]) -> bool:
        """Set the bits of the rows of ids that are not few, if rows have few gaps, through a bitmap of all numbers
        between the first and the last id; return whether it did, and found all ids."""
        ordered = self.ids[: self.count]
        if not self.ascending or not self.count or not ids.size:
            return False
        first, span = int(ordered[0]), int(ordered[-1] - ordered[0]) + 1
        if span > 4 * self.count or span > 32 * len(ids):
            return False
        from hashcore.cpu import select_kernels, threads  # numba takes half a second to import

        numbers = bits if span == self.count else np.zeros(span // 64 + 2, np.uint64)
        ids = np.require(ids, np.int64, ["C", "A"]).view()
        ids.flags.writeable = False  # numba would compile again for read-only ids
        if not threads.compiled(select_kernels.mark)(ids, first, span, numbers):
            bits[:] = 0
            return False
        if numbers is not bits:
            _pack(np.unpackbits(numbers.view(np.uint8), bitorder="little")[ordered - first], bits)
        return numbers is bits or bool(np.bitwise_count(bits).sum() == np.bitwise_count(numbers).sum())


def _pack(marked: NDArray[Any], bits: NDArray[np.uint64]) -> None:
    packed = np.packbits(marked, bitorder="little")
    bits.view(np.uint8)[: len(packed)] = packed


def empty(words: int, dim: int, kept: np.dtype[Any] | None) -> Rows:
    """Return an empty Rows."""
    vectors = None if kept is None else np.empty((0, dim), kept)
    return Rows(np.empty((0, words), np.int32), np.empty(0, np.int64), vectors)


def _ascend(ids: NDArray[np.int64]) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def best(
    queries: NDArray[np.int32],
    content: Rows,
    k: int,
    weights: tuple[int, ...] | None,
    allowed: NDArray[np.int64] | None,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Find the k best rows, or those of a bitmap, for codes [..., W], or planes [..., P, W] with weights.

    Returns: scores int32 and positions int64, both [..., k], best first, ties to the lowest position.
    """
    if weights is None:
        queries, weights = queries[..., None, :], (1,)
    query, keys, compared = ops.Host(np.asarray).compared(queries, content.codes[: content.count], weights)
    validation.searched(compared, None)
    rows = validation.RowLimits(k, None, None, None, content.count, 0, 0, 0)
    return ops.backend().search(query, keys, weights, True, None, *rows, compared=compared, allowed=allowed)


# ---- Ids that were passed ------------------------------------------------------------------------------------------


def new_ids(ids: Any, count: int) -> NDArray[np.int64]:
    """Return ids as int64 [count] after checking that they are unique and not negative."""
    array = _id_array(ids)
    if array.shape != (count,):
        raise ValueError(f"expected one id for each of the {count} rows, got shape {list(array.shape)}; match them")
    if count and not 0 <= int(array.min()) <= int(array.max()) <= LARGEST_ID:
        raise ValueError(
            f"ids must be in 0..{LARGEST_ID}, got {int(array.min())}..{int(array.max())}; -1 marks an empty slot"
        )
    array = array.astype(np.int64)
    ordered = np.sort(array)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise ValueError(f"ids must be unique, got {twice[0]} twice; pass one id per row")
    return array


def _id_array(ids: Any, *, mask: bool = False) -> NDArray[Any]:
    """Return ids as integers [n] of any width; with `mask`, bools are allowed, too."""
    if arguments.is_array(ids):
        (ids,), _ = arguments.host_arrays(ids=ids)
    array = np.atleast_1d(np.asarray(ids))
    if array.size == 0 and array.dtype.kind == "f":  # an empty list
        array = array.astype(np.int64)
    if array.dtype.kind not in ("iub" if mask else "iu"):
        raise TypeError(f"ids must be integers, got {array.dtype}; convert them with .astype('int64')")
    if array.ndim != 1:
        raise ValueError(f"ids must have one dimension, got shape {list(array.shape)}; flatten them")
    return array
