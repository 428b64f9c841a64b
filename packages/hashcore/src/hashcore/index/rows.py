"""Immutable snapshots of the rows of an index: codes, ids and, if stored, vectors, in arrays with spare capacity.

Additions write after `count`, which older snapshots do not read; removals copy the other rows. Both create a new Rows,
and searches on old snapshots are not affected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, ops

LEAST = 64  # rows of the first allocation
LARGEST_ID = 2**63 - 2  # so that the next id still fits int64


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns with spare capacity.

    codes: int32 [capacity, W]. ids: int64 [capacity]. vectors: [capacity, D] or None. count: rows in use.
    ascending: whether ids[:count] ascend.
    """

    codes: NDArray[np.int32]
    ids: NDArray[np.int64]
    vectors: NDArray[Any] | None
    count: int = 0
    ascending: bool = True

    @property
    def columns(self) -> list[NDArray[Any]]:
        """The arrays: codes, ids and, if stored, vectors."""
        return [x for x in (self.codes, self.ids, self.vectors) if x is not None]

    def with_room(self, extra: int) -> "Rows":
        """Return the same rows in arrays with room for `extra` more; new arrays have at least twice the capacity."""
        needed = self.count + extra
        if needed <= len(self.ids):
            return self
        capacity = max(needed, 2 * self.count, LEAST)
        fresh = [np.empty((capacity, *x.shape[1:]), x.dtype.newbyteorder("=")) for x in self.columns]
        for new, old in zip(fresh, self.columns, strict=True):
            new[: self.count] = old[: self.count]
        return self._of(fresh, self.count)

    def appended(self, ids: NDArray[np.int64]) -> "Rows":
        """Return rows including those whose codes and vectors were written after the end, with these ids."""
        end = self.count + len(ids)
        self.ids[self.count : end] = ids
        ascending = self.ascending and _ascend(self.ids[max(self.count - 1, 0) : end])
        return replace(self, count=end, ascending=ascending)

    def without(self, positions: NDArray[np.int64]) -> "Rows":
        """Return rows without these positions, in the same order, in arrays of their own."""
        if len(positions) == 0:
            return self
        kept = np.delete(np.arange(self.count), positions)
        return self._of([x[kept].astype(x.dtype.newbyteorder("="), copy=False) for x in self.columns], len(kept))

    def _of(self, columns: list[NDArray[Any]], count: int) -> "Rows":
        codes, ids, *vectors = columns
        ascending = self.ascending or _ascend(ids[:count])
        return Rows(codes, ids, vectors[0] if vectors else None, count, ascending)


def empty(words: int, dim: int, kept: np.dtype[Any] | None) -> Rows:
    """Return an empty Rows."""
    vectors = None if kept is None else np.empty((0, dim), kept)
    return Rows(np.empty((0, words), np.int32), np.empty(0, np.int64), vectors)


class Positions:
    """Finds positions of ids: ascending ids by bisection, others in a table built on demand (about 100 bytes an id)."""

    def __init__(self) -> None:
        self._table: dict[int, int] | None = None

    def find(self, rows: Rows, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each id, -1 if it is not present."""
        ordered = rows.ids[: rows.count]
        if rows.ascending and rows.count:
            at = np.minimum(np.searchsorted(ordered, ids), rows.count - 1)
            return np.where(ordered[at] == ids, at, -1)
        if self._table is None:
            self._table = dict(zip(ordered.tolist(), range(rows.count), strict=True))
        return np.fromiter((self._table.get(i, -1) for i in ids.tolist()), np.int64, len(ids))

    def added(self, before: Rows, after: Rows) -> None:
        """Update the table after an addition; after a removal, a new one is needed."""
        if self._table is not None:
            fresh = after.ids[before.count : after.count].tolist()
            self._table.update(zip(fresh, range(before.count, after.count), strict=True))


def _ascend(ids: NDArray[np.int64]) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def best(
    queries: NDArray[np.int32], content: Rows, k: int, weights: Sequence[int] | None
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Find the k best rows for codes [..., W], or planes [..., P, W] with weights.

    Returns: scores int32 and positions int64, both [..., k], best first, ties to the lowest position.
    """
    keys = content.codes[: content.count]
    if weights is not None:
        return ops.search(queries, keys, k, weights)
    scores, positions = ops.search(queries.reshape(-1, queries.shape[-1]), keys, k)
    return scores.reshape(*queries.shape[:-1], k), positions.reshape(*queries.shape[:-1], k)


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


def known_ids(ids: Any) -> NDArray[np.int64]:
    """Return one or several ids as int64 [n] without duplicates."""
    array = _id_array(ids)
    if array.dtype == np.uint64 and array.size and int(array.max()) > LARGEST_ID:
        refuse_unknown(int(array.max()))
    return np.unique(array.astype(np.int64))


def refuse_unknown(number: int) -> NoReturn:
    """Raise ValueError for an id that is not in the index."""
    raise ValueError(f"ids must be in the index, got {number}, which is not; test with `id in index` first")


def _id_array(ids: Any) -> NDArray[Any]:
    if type(ids).__module__.partition(".")[0] == "torch":
        (ids,), _ = arguments.host_arrays(ids=ids)
    array = np.atleast_1d(np.asarray(ids))
    if array.size == 0 and array.dtype.kind == "f":  # an empty list
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise TypeError(f"ids must be integers in one dimension, got {array.dtype} {list(array.shape)}; flatten them")
    return array
