"""BitIndex, what a caller sees: it checks and joins; rows, encoder, file and search have their own modules."""

import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hashcore import ops, validation
from hashcore.index import checks, file, rows
from hashcore.index.encoder import Encoder, mean_of, rotation
from hashcore.index.retrieve import live_best, rerank_best

if TYPE_CHECKING:
    import torch

    Array = NDArray[Any] | torch.Tensor
else:
    Array = Any


class BitIndex:
    """Bit codes with ids, searched exhaustively and exactly by weighted matching bits.

    Vectors are floats; codes are int32 words (hashcore.pack); the dtype tells which is meant. numpy arrays and torch
    CPU tensors are taken, and results are of the queries' kind.

    Any number of threads may search, read and change an index at the same time: a call works on the index as it was
    when the call began, changes take turns, and each is seen whole or not at all.

    Args:
        dim: numbers in a vector, D.
        bits: length of the code, a multiple of 32; by default D, rounded up to one for a rotation.
        encoder: 'rotation' takes the signs of (x - mean) R with R a random rotation in SO(D), independent ones side by
            side if bits > D, the first columns if bits < D. 'sign' takes the signs of x - mean; bits must be D.
        seed: of the rotation.
        mean: what is subtracted from every vector and query before its signs are taken, shape [D]; nothing by default.
        keep: 'float16' or 'float32' keeps the vectors in that precision, for rerank; None keeps codes alone.
    Raises: ValueError or TypeError that says what was expected.
    Source: docs/algorithm.md, eq. 1, eq. 4, eq. 5 and Variants.
    """

    def __init__(
        self,
        dim: int,
        bits: int | None = None,
        *,
        encoder: str = "rotation",
        seed: int = 0,
        mean: Any = None,
        keep: str | None = None,
    ) -> None:
        dim = checks.integer("dim", dim, 1, checks.LARGEST_DIM, "give the number of dimensions of a vector")
        checks.choice("encoder", encoder, checks.ENCODERS)
        kept = checks.KEPT[checks.choice("keep", keep, checks.KEPT)]
        bits = checks.bit_count(dim, bits, encoder)
        seed = checks.integer("seed", seed, 0, 2**63 - 1, "choose another")
        mean = None if mean is None else checks.mean(mean, dim)
        rotated = encoder == "rotation"
        matrix = rotation(dim, bits, seed) if rotated else None
        self._restore(Encoder(dim, bits, mean, matrix, seed if rotated else None), rows.empty(bits // 32, dim, kept), 0)

    def _restore(self, encoder: Encoder, content: rows.Rows, next_id: int) -> None:
        self._encoder = encoder
        self._rows = content
        self._next_id = next_id
        self._positions = rows.Positions()
        self._changing = threading.Lock()

    @classmethod
    def from_vectors(
        cls, vectors: Array, ids: Any = None, *, bits: int | None = None, centre: bool = False, **options: Any
    ) -> "BitIndex":
        """Build an index of vectors [n, D].

        Args:
            vectors: floats, shape [n, D]. ids: as in add.
            centre: subtract the mean of these vectors from all vectors and queries.
            bits, options: as of the class.
        """
        (array,), _ = validation.host_arrays(vectors=vectors)
        if array.ndim != 2 or checks.is_codes(array):
            raise ValueError(
                f"vectors must be floats of shape [n, D], got {array.dtype} {list(array.shape)}; "
                "reshape them, or use from_codes"
            )
        if centre:
            if "mean" in options or len(array) == 0:
                raise ValueError("centre=True takes the mean of the vectors, got none or mean= as well; give one")
            options["mean"] = mean_of(array)
        index = cls(array.shape[1], bits, **options)
        index.add(array, ids)
        return index

    @classmethod
    def from_codes(cls, codes: Array, ids: Any = None) -> "BitIndex":
        """Build an index of codes, int32 [n, W]. Its vectors have a number per bit, and their signs are the code."""
        (array,), _ = validation.host_arrays(codes=codes)
        validation.codes("codes", array, "[n, W]")
        index = cls(32 * array.shape[-1], encoder="sign")
        index.add(array, ids)
        return index

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = True, verify: bool = True) -> "BitIndex":
        """Open a file that save wrote.

        Args:
            mmap: leave codes, ids and vectors in the file, to be read when they are needed. Replacing the file is safe
                (save does); shortening it in place kills the process that has it mapped, as with every mapped file.
                A mapped index may be changed: it then moves into memory, and the file stays as it is.
            verify: read everything once and compare checksums. Without it the header and what encodes queries are
                still verified, in a time that does not depend on the number of codes.
        Raises: ValueError for a file that is damaged, truncated, of another format or version; OSError.
        """
        index = cls.__new__(cls)
        index._restore(*file.read(path, mmap, verify))
        return index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file, replacing path in one step. The format is in hashcore/index/file.py."""
        with self._changing:
            content, next_id = self._rows, self._next_id
        file.write(path, self._encoder, content, next_id)

    def add(self, items: Array, ids: Any = None) -> None:
        """Add vectors [n, D] or codes [n, W].

        Args:
            items: floats or int32 words. An index that keeps vectors takes vectors only.
            ids: n distinct integers >= 0 that the index does not have; by default those after the largest it ever had.
        Raises: ValueError or TypeError; the index is then as before.
        """
        (array,), _ = validation.host_arrays(items=items)
        coded = checks.is_codes(array)
        checks.last_dimension("codes" if coded else "vectors", array, self._width(coded), rows=True)
        if coded and self.keep:
            raise ValueError(f"an index with keep={self.keep!r} takes vectors, got codes; add the vectors instead")
        given = None if ids is None else checks.new_ids(ids, len(array))
        if len(array) == 0:
            return  # a mapped index stays in its file
        with self._changing:
            before = self._rows
            if given is None:
                given = self._after_the_largest(len(array))
            else:
                self._refuse_known(before, given)
            after = before.with_room(len(array))
            self._fill(after, array, coded)
            after = after.appended(given)
            self._positions.added(before, after)
            self._next_id = max(self._next_id, int(given.max()) + 1)
            self._rows = after

    def remove(self, ids: Any) -> None:
        """Remove one id or several; the index is then as if they had never been added.

        Raises: ValueError if the index lacks one of them; nothing is then removed.
        """
        gone = checks.known_ids(ids)
        with self._changing:
            before = self._rows
            positions = self._positions.find(before, gone)
            if (positions < 0).any():
                checks.unknown(int(gone[positions < 0][0]))
            after = before.without(positions)
            self._positions.removed(gone, moved=after.codes is not before.codes)
            self._rows = after

    def encode(self, vectors: Array) -> Any:
        """Return the codes of vectors [..., D]: int32 [..., bits / 32]."""
        (array,), restore = validation.host_arrays(vectors=vectors)
        if checks.is_codes(array):
            raise TypeError("expected vectors of floats, got int32; these are codes already")
        checks.last_dimension("vectors", array, self.dim, rows=False)
        out = np.empty((array.size // self.dim, self.bits // 32), np.int32)
        self._encoder.encode(array.reshape(-1, self.dim), out)
        return restore(out.reshape(*array.shape[:-1], -1))

    def search(
        self,
        queries: Array,
        k: int,
        *,
        planes: int | None = None,
        weights: Sequence[int] | None = None,
        rerank: int | None = None,
        vectors: Array | None = None,
        metric: str = "dot",
        shortlist: int | None = None,
    ) -> tuple[Any, Any]:
        """Find the k best codes of each query.

        Args:
            queries: vectors [..., D], quantised to bit planes (eq. 5); or codes [..., W], scored by matching bits
                (eq. 2); or with weights ready planes [..., P, W], one query each (eq. 4).
            k: how many, at most len(index).
            planes: 1 to 8 for vectors; more are closer to a real-valued query and cost a popcount each. Default 3.
            weights: one positive integer per plane.
            rerank: find rerank * k candidates by their codes, and return the k of them that are best by exact scores.
                Needs vector queries and the original vectors: kept in the index, or given.
            vectors: originals for rerank, floats [M, D]; row i belongs to id i. A memory-mapped array is read only
                where needed.
            metric: exact score of rerank, 'dot' or 'cosine' (0 for a vector of zeros).
            shortlist: score by whole codes about this many times as many as are to be found, the best by their first 32
                bits (eq. 20): for codes whose first bits say most. Those of a rotation are all alike.
        Returns: scores and ids int64, both [..., k], best first. Among equals the one added first comes first. Scores
            are int32, or float32 with rerank.
        Raises: ValueError or TypeError that says what was expected.
        """
        content = self._rows
        (array,), restore = validation.host_arrays(queries=queries)
        k = checks.integer("k", k, 0, len(content), "the number of codes in the index is the most; clamp it")
        codes, weights = self._planes(array, planes, weights)
        if rerank is None:
            if vectors is not None or metric != "dot":
                raise ValueError("vectors= and metric= are for rerank, got no rerank=; give it, 4 is a fair start")
            scores, positions = live_best(codes, content, k, weights, shortlist)
        else:
            times = checks.integer("rerank", rerank, 1, 2**31, "it times k candidates are scored exactly")
            checks.choice("metric", metric, checks.METRICS)
            if checks.is_codes(array):
                raise TypeError("rerank needs queries that are vectors, got codes; give the vectors they came from")
            originals = self._originals(vectors, content)
            _, candidates = live_best(codes, content, min(times * k, len(content)), weights, shortlist)
            at = candidates if vectors is None else checks.rows_of(content.ids[candidates], len(originals))
            scores, positions = rerank_best(array, originals, at, candidates, k, metric == "cosine")
        return restore(scores), restore(content.ids[positions])

    def _planes(
        self, array: NDArray[Any], planes: int | None, weights: Sequence[int] | None
    ) -> tuple[NDArray[np.int32], Sequence[int] | None]:
        """Return queries as codes, or as planes with their weights."""
        if not checks.is_codes(array):
            if weights is not None:
                raise ValueError("weights belong to ready planes of int32 words, got vectors; leave weights out")
            checks.last_dimension("queries", array, self.dim, rows=False)
            projected = self._encoder.project("queries", array.reshape(-1, self.dim)).reshape(
                *array.shape[:-1], self.bits
            )
            return ops.planes(projected, 3 if planes is None else planes)
        if planes is not None:
            raise ValueError("planes= quantises queries that are vectors, got codes; leave it out or give vectors")
        checks.last_dimension("queries", array, self.bits // 32, rows=False)
        if weights is not None and array.ndim < 2:
            raise ValueError(f"with weights queries must have shape [..., P, W], got {list(array.shape)}; add planes")
        return array, weights

    def _originals(self, vectors: Any, content: rows.Rows) -> NDArray[Any]:
        """Return the vectors that exact scores are taken from."""
        if vectors is None:
            if content.vectors is None:
                raise ValueError("rerank needs the original vectors, got none; give vectors=, or build with keep=")
            return content.vectors
        (array,), _ = validation.host_arrays(vectors=vectors)
        if checks.is_codes(array):
            raise TypeError("vectors= must be floats, got int32; give the vectors that were added")
        checks.last_dimension("vectors=", array, self.dim, rows=True)
        return np.asarray(array)  # a memory-mapped array would hand its class on to the results

    def _after_the_largest(self, count: int) -> NDArray[np.int64]:
        if count > checks.LARGEST_ID + 1 - self._next_id:
            raise ValueError(f"no ids are left after {self._next_id - 1}, got none for {count} rows; give ids=")
        return np.arange(self._next_id, self._next_id + count, dtype=np.int64)

    def _refuse_known(self, content: rows.Rows, ids: NDArray[np.int64]) -> None:
        if len(ids) == 0 or int(ids.min()) >= self._next_id:
            return
        if (known := self._positions.find(content, ids) >= 0).any():
            raise ValueError(f"ids must be new, got {ids[known][0]}, which the index has; remove it first")

    def _fill(self, after: rows.Rows, array: NDArray[Any], coded: bool) -> None:
        """Write codes and vectors past the last row."""
        place = slice(after.count, after.count + len(array))
        if coded:
            after.codes[place] = array
            return
        self._encoder.encode(array, after.codes[place])
        if after.vectors is not None:
            with np.errstate(over="ignore"):  # refused in the next line
                after.vectors[place] = array
            checks.fits(after.vectors[place])

    def _width(self, coded: bool) -> int:
        return self.bits // 32 if coded else self.dim

    @property
    def dim(self) -> int:
        """Numbers in a vector."""
        return self._encoder.dim

    @property
    def bits(self) -> int:
        """Bits in a code."""
        return self._encoder.bits

    @property
    def keep(self) -> str | None:
        """Precision of the kept vectors, or None."""
        return None if self._rows.vectors is None else self._rows.vectors.dtype.name

    @property
    def ids(self) -> NDArray[np.int64]:
        """A copy of the ids, in the order they were added."""
        content = self._rows
        return content.ids[content.live()].copy()

    @property
    def codes(self) -> NDArray[np.int32]:
        """A copy of the codes, int32 [n, W], in the order they were added."""
        content = self._rows
        return content.codes[content.live()].copy()

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, ids and kept vectors, in memory or mapped, without the room to grow."""
        content = self._rows
        return sum(column[:1].nbytes for column in content.columns) * len(content)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int | np.integer) or not 0 <= number <= checks.LARGEST_ID:
            return False
        with self._changing:
            return bool(self._positions.find(self._rows, np.array([number], np.int64))[0] >= 0)

    def __repr__(self) -> str:
        encoder = self._encoder
        how = f"rotation of {self.dim} dimensions" if encoder.matrix is not None else "signs"
        seed = "" if encoder.seed is None else f", seed {encoder.seed}"
        centred = "" if encoder.mean is None else ", centred"
        kept = "" if self.keep is None else f", {self.keep} vectors kept"
        return (
            f"BitIndex({len(self)} codes of {self.bits} bits, {how}{seed}{centred}{kept}, {self.nbytes / 1e6:.1f} MB)"
        )
