"""Immutable snapshots of the rows of an index: codes, ids and, if stored, vectors, in arrays with spare capacity.

Additions write after `count`, which older snapshots do not read; removals add positions to `dead`. Both create a new
Rows, and searches on old snapshots are not affected.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEAD = 1024  # maximal number of removed rows before compaction; a search fetches at most this many extra rows
LEAST = 64  # rows of the first allocation

NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Rows:
    """Columns with spare capacity.

    codes: int32 [capacity, W]. ids: int64 [capacity]. vectors: [capacity, D] or None. count: rows in use, including
    removed ones. dead: positions of removed rows, ascending, at most DEAD. ascending: whether ids[:count] ascend.
    """

    codes: NDArray[np.int32]
    ids: NDArray[np.int64]
    vectors: NDArray[Any] | None
    count: int = 0
    dead: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    ascending: bool = True

    def __len__(self) -> int:
        return self.count - len(self.dead)

    @property
    def columns(self) -> list[NDArray[Any]]:
        """The arrays: ids, codes and, if stored, vectors."""
        return [x for x in (self.ids, self.codes, self.vectors) if x is not None]

    def live(self) -> slice | NDArray[np.int64]:
        """Return an index of the rows that were not removed, in order; a slice if none was."""
        if len(self.dead) == 0:
            return slice(0, self.count)
        return np.delete(np.arange(self.count), self.dead)

    def with_room(self, extra: int) -> "Rows":
        """Return the same rows in arrays with room for `extra` more; new arrays have at least twice the capacity."""
        needed = self.count + extra
        if needed <= len(self.ids):
            return self
        capacity = max(needed, 2 * self.count, LEAST)
        return self._moved(capacity, slice(0, self.count), self.dead)

    def appended(self, ids: NDArray[np.int64]) -> "Rows":
        """Return rows including those whose codes and vectors were written after the end, with these ids."""
        end = self.count + len(ids)
        self.ids[self.count : end] = ids
        ascending = self.ascending and _ascend(self.ids[max(self.count - 1, 0) : end])
        return replace(self, count=end, ascending=ascending)

    def without(self, positions: NDArray[np.int64]) -> "Rows":
        """Return rows without these positions, in the same order; compacted if more than DEAD rows are removed."""
        rows = replace(self, dead=np.union1d(self.dead, positions))
        if len(rows.dead) <= DEAD:
            return rows
        return rows._moved(max(len(rows), LEAST), rows.live(), NO_ROWS)

    def _moved(self, capacity: int, keep: slice | NDArray[np.int64], dead: NDArray[np.int64]) -> "Rows":
        count = self.count if isinstance(keep, slice) else len(keep)
        fresh = [np.empty((capacity, *x.shape[1:]), x.dtype.newbyteorder("=")) for x in self.columns]
        for new, old in zip(fresh, self.columns, strict=True):
            if isinstance(keep, slice):
                new[:count] = old[keep]
            else:  # mode="clip" avoids a temporary buffer
                np.take(old, keep, axis=0, out=new[:count], mode="clip")
        ids, codes, *vectors = fresh
        ascending = self.ascending or _ascend(ids[:count])
        return Rows(codes, ids, vectors[0] if vectors else None, count, dead, ascending)


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
        if rows.ascending:
            self._table = None
            return _bisect(rows, ids)
        if self._table is None:
            live = rows.live()
            positions = np.arange(rows.count) if isinstance(live, slice) else live
            self._table = dict(zip(rows.ids[live].tolist(), positions.tolist(), strict=True))
        return np.fromiter((self._table.get(i, -1) for i in ids.tolist()), np.int64, len(ids))

    def added(self, before: Rows, after: Rows) -> None:
        """Update the table after an addition."""
        if self._table is not None:
            fresh = after.ids[before.count : after.count].tolist()
            self._table.update(zip(fresh, range(before.count, after.count), strict=True))

    def removed(self, ids: NDArray[np.int64], moved: bool) -> None:
        """Update the table after a removal; if rows moved, it is rebuilt on demand."""
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
