"""The rows of an index at one moment: codes, ids and, if they are kept, vectors, in arrays that grow at their end.

A Rows is never changed once a search may hold it. Adding writes past `count`, where no older Rows looks; removing lists
positions in `dead`; both make a new Rows. A search on an old one goes on undisturbed.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEAD = (
    1024  # removed rows that may wait: a search fetches so many more, at most, and rows move once in so many removals
)
LEAST = 64  # rows of the first allocation

NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns with room to grow.

    codes: int32 [capacity, W]. ids: int64 [capacity]. vectors: [capacity, D] or None. count: rows in use, removed ones
    included. dead: positions of the removed ones, ascending, at most DEAD. ascending: whether ids[:count] ascend.
    """

    codes: NDArray[np.int32]
    ids: NDArray[np.int64]
    vectors: NDArray[Any] | None
    count: int = 0
    dead: NDArray[np.int64] = field(default_factory=lambda: NOBODY)
    ascending: bool = True

    def __len__(self) -> int:
        return self.count - len(self.dead)

    @property
    def columns(self) -> list[NDArray[Any]]:
        """The arrays: ids, codes and, if kept, vectors."""
        return [x for x in (self.ids, self.codes, self.vectors) if x is not None]

    def live(self) -> slice | NDArray[np.int64]:
        """Return what selects the rows that were not removed, in their order; a slice if all are there."""
        if len(self.dead) == 0:
            return slice(0, self.count)
        return np.delete(np.arange(self.count), self.dead)

    def with_room(self, extra: int) -> "Rows":
        """Return the same rows in arrays with room for more; the arrays at least double when they must move."""
        needed = self.count + extra
        if needed <= len(self.ids):
            return self
        capacity = max(needed, 2 * self.count, LEAST)
        return self._moved(capacity, slice(0, self.count), self.dead)

    def appended(self, ids: NDArray[np.int64]) -> "Rows":
        """Count rows whose codes and vectors have been written past the end, and give them their ids."""
        end = self.count + len(ids)
        self.ids[self.count : end] = ids
        ascending = self.ascending and _ascend(self.ids[max(self.count - 1, 0) : end])
        return replace(self, count=end, ascending=ascending)

    def without(self, positions: NDArray[np.int64]) -> "Rows":
        """Remove live positions; the rest keep their order, in new arrays once more than DEAD rows wait."""
        rows = replace(self, dead=np.union1d(self.dead, positions))
        if len(rows.dead) <= DEAD:
            return rows
        return rows._moved(max(len(rows), LEAST), rows.live(), NOBODY)

    def _moved(self, capacity: int, keep: slice | NDArray[np.int64], dead: NDArray[np.int64]) -> "Rows":
        count = self.count if isinstance(keep, slice) else len(keep)
        fresh = [np.empty((capacity, *x.shape[1:]), x.dtype.newbyteorder("=")) for x in self.columns]
        for new, old in zip(fresh, self.columns, strict=True):
            if isinstance(keep, slice):
                new[:count] = old[keep]
            else:  # mode="clip" writes where it should, the default into a buffer first
                np.take(old, keep, axis=0, out=new[:count], mode="clip")
        ids, codes, *vectors = fresh
        ascending = self.ascending or _ascend(ids[:count])
        return Rows(codes, ids, vectors[0] if vectors else None, count, dead, ascending)


def empty(words: int, dim: int, kept: np.dtype[Any] | None) -> Rows:
    """Return no rows."""
    vectors = None if kept is None else np.empty((0, dim), kept)
    return Rows(np.empty((0, words), np.int32), np.empty(0, np.int64), vectors)


class Positions:
    """Where an id is: ascending ids are found by bisection, others in a table (about 100 bytes an id) built on need."""

    def __init__(self) -> None:
        self._table: dict[int, int] | None = None

    def find(self, rows: Rows, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each id, -1 where there is none."""
        if rows.ascending:
            self._table = None
            return _bisect(rows, ids)
        if self._table is None:
            live = rows.live()
            positions = np.arange(rows.count) if isinstance(live, slice) else live
            self._table = dict(zip(rows.ids[live].tolist(), positions.tolist(), strict=True))
        return np.fromiter((self._table.get(i, -1) for i in ids.tolist()), np.int64, len(ids))

    def added(self, before: Rows, after: Rows) -> None:
        """Follow an addition."""
        if self._table is not None:
            fresh = after.ids[before.count : after.count].tolist()
            self._table.update(zip(fresh, range(before.count, after.count), strict=True))

    def removed(self, ids: NDArray[np.int64], moved: bool) -> None:
        """Follow a removal; when rows moved, the table is built again on need."""
        if moved:
            self._table = None
        elif self._table is not None:
            for i in ids.tolist():
                del self._table[i]


def _ascend(ids: NDArray[np.int64]) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _bisect(rows: Rows, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    if rows.count == 0:
        return np.full(len(ids), -1, np.int64)
    ordered = rows.ids[: rows.count]
    at = np.minimum(np.searchsorted(ordered, ids), rows.count - 1)
    return np.where((ordered[at] == ids) & ~np.isin(at, rows.dead), at, -1)
