"""The public class BitIndex: its arguments are checked here, and `rows`, `encoder` and `file` do the work."""

import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, ops, validation
from hashcore.index import file, rows
from hashcore.index.encoder import Encoder, best_vectors, mean_of, require_finite, rotation

if TYPE_CHECKING:
    import torch

    Array = NDArray[Any] | torch.Tensor
else:
    Array = Any


class BitIndex:
    """Bit codes with ids, searched exhaustively and exactly by weighted matching bits.

    Vectors are floats; codes are int32 words (hashcore.pack); they are told apart by dtype. Arguments may be numpy
    arrays or torch CPU tensors; results have the kind of the queries.

    Any number of threads may search, read and change an index at the same time: a call works on the index as it was
    when the call started, changes run one at a time, and each is visible completely or not at all.

    Args:
        dim: numbers per vector, D.
        bits: length of the code, a multiple of 32; by default D, for a rotation rounded up to a multiple of 32.
        encoder: 'rotation' takes the signs of (x - mean) R, R a random rotation in SO(D): several independent ones
            concatenated if bits > D, the first columns if bits < D. 'sign' takes the signs of x - mean; bits must be D.
        seed: of the rotation.
        mean: subtracted from every vector and query before taking signs, shape [D]; default: zero.
        keep: 'float16' or 'float32' stores the vectors in that precision, for rerank; None stores codes only.
    Raises: ValueError or TypeError.
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
        dim = _integer("dim", dim, 1, file.LARGEST, "give the number of dimensions of a vector")
        rotated = _choice("encoder", encoder, ("rotation", "sign")) == "rotation"
        kept = file.KEPT[_choice("keep", keep, file.KEPT)]
        bits = -(-dim // 32) * 32 if bits is None and rotated else dim if bits is None else bits
        bits = _integer("bits", bits, 1, file.LARGEST, "choose another code length")
        if bits % 32:
            raise ValueError(
                f"bits must be a multiple of 32 (bits per word), got {bits}; "
                "choose another, or with encoder='sign' pad the vectors or use encoder='rotation'"
            )
        if not rotated and bits != dim:
            raise ValueError(
                f"encoder='sign' has one bit per dimension, got bits = {bits} for {dim} dimensions; "
                "use encoder='rotation' for another number of bits"
            )
        seed = _integer("seed", seed, 0, 2**63 - 1, "choose another")
        mean = None if mean is None else _mean(mean, dim)
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
        array, coded, _ = _read(vectors=vectors)
        if array.ndim != 2 or coded:
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
        """Build an index of codes, int32 [n, W]. Vectors for it have one number per bit; their signs are the code."""
        (array,), _ = arguments.host_arrays(codes=codes)
        validation.codes("codes", array, "[n, W]")
        index = cls(32 * array.shape[-1], encoder="sign")
        index.add(array, ids)
        return index

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = True, verify: bool = True) -> "BitIndex":
        """Open a file written by save.

        Args:
            mmap: memory-map codes, ids and vectors instead of reading them. Replacing the file is safe (save does so);
                truncating it in place kills processes that have it mapped, as with every mapped file. A mapped index
                may be changed: it is then copied to memory, and the file is not changed.
            verify: read everything once and compare checksums. Otherwise only the header, mean and matrix are verified,
                in a time that does not depend on the number of codes.
        Raises: ValueError for a file that is damaged, truncated, or of another format or version; OSError.
        """
        index = cls.__new__(cls)
        index._restore(*file.read(path, mmap, verify))
        return index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to one file, replacing path atomically. hashcore/index/file.py documents the format."""
        with self._changing:
            content, next_id = self._rows, self._next_id
        file.write(path, self._encoder, content, next_id)

    def add(self, items: Array, ids: Any = None) -> None:
        """Add vectors [n, D] or codes [n, W].

        Args:
            items: floats or int32 words. An index with `keep` accepts vectors only.
            ids: n distinct integers >= 0 that are not in the index; by default those after the largest id so far.
        Raises: ValueError or TypeError; the index is then unchanged.
        """
        array, coded, _ = _read(items=items)
        _require_shape("codes" if coded else "vectors", array, self.bits // 32 if coded else self.dim, rows=True)
        if coded and self.keep:
            raise ValueError(f"an index with keep={self.keep!r} takes vectors, got codes; add the vectors instead")
        given = None if ids is None else rows.new_ids(ids, len(array))
        if len(array) == 0:
            return  # so that a mapped index stays mapped
        with self._changing:
            before = self._rows
            if given is None:
                if len(array) > rows.LARGEST_ID + 1 - self._next_id:
                    raise ValueError(f"no ids are left after {self._next_id - 1} for {len(array)} rows; pass ids=")
                given = np.arange(self._next_id, self._next_id + len(array), dtype=np.int64)
            elif given.min() < self._next_id and (known := self._positions.find(before, given) >= 0).any():
                raise ValueError(f"ids must be new, got {given[known][0]}, which is in the index; remove it first")
            after = before.with_room(len(array))
            self._fill(after, array, coded)
            after = after.appended(given)
            self._positions.added(before, after)
            self._next_id = max(self._next_id, int(given.max()) + 1)
            self._rows = after

    def remove(self, ids: Any) -> None:
        """Remove one or several ids.

        Raises: ValueError if one of them is not in the index; nothing is then removed.
        """
        gone = rows.known_ids(ids)
        with self._changing:
            before = self._rows
            positions = self._positions.find(before, gone)
            if (positions < 0).any():
                rows.refuse_unknown(int(gone[positions < 0][0]))
            after = before.without(positions)
            self._positions = rows.Positions()
            self._rows = after

    def encode(self, vectors: Array) -> Any:
        """Return the codes of vectors [..., D]: int32 [..., bits / 32]."""
        array, coded, restore = _read(vectors=vectors)
        if coded:
            raise TypeError("expected vectors of floats, got int32; these are codes already")
        _require_shape("vectors", array, self.dim)
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
        **removed: object,
    ) -> tuple[Any, Any]:
        """Find the k best codes of each query.

        Args:
            queries: vectors [..., D], quantised to bit planes (eq. 5); or codes [..., W], scored by matching bits
                (eq. 2); or with weights planes [..., P, W], P planes per query (eq. 4).
            k: number of codes to find, at most len(index).
            planes: for vectors, 1 to 8; more planes are closer to a real-valued query and take more time. Default 3.
            weights: one positive integer per plane.
            rerank: find rerank * k candidates by their codes, and return the k best of them by exact scores. Needs
                vector queries and the original vectors, from `keep` or from `vectors`.
            vectors: original vectors for rerank, floats [M, D]; row i belongs to id i. Only rows of candidates are
                read, also of a memory-mapped array.
            metric: exact score of rerank, 'dot' or 'cosine' (0 for a zero vector).
            removed: an argument of earlier versions, which is refused.
        Returns: scores and ids int64, both [..., k], best first; ties in the order of addition. Scores are int32, or
            float32 with rerank.
        Raises: ValueError or TypeError.
        """
        if removed:
            validation.refuse_removed("search", removed)
        content = self._rows
        array, coded, restore = _read(queries=queries)
        k = _integer("k", k, 0, content.count, "there are no more codes in the index; clamp it")
        codes, weights = self._planes(array, coded, planes, weights)
        if rerank is None:
            if vectors is not None or metric != "dot":
                raise ValueError("vectors= and metric= need rerank=, got none; try rerank=4")
            scores, positions = rows.best(codes, content, k, weights)
        else:
            times = _integer("rerank", rerank, 1, 2**31, "rerank * k candidates are scored exactly")
            cosine = _choice("metric", metric, ("dot", "cosine")) == "cosine"
            if coded:
                raise TypeError("rerank needs queries that are vectors, got codes; pass the original vectors")
            originals = self._originals(vectors, content)
            _, candidates = rows.best(codes, content, min(times * k, content.count), weights)
            at = candidates if vectors is None else content.ids[candidates]
            if at.size and at.max() >= len(originals):
                raise ValueError(
                    f"vectors= must have a row for every id, got {len(originals)} rows and id {at.max()}; pass them all"
                )
            scores, positions = best_vectors(array, originals, at, candidates, k, cosine)
        return restore(scores), restore(content.ids[positions])

    def _planes(
        self, array: NDArray[Any], coded: bool, planes: int | None, weights: Sequence[int] | None
    ) -> tuple[NDArray[np.int32], Sequence[int] | None]:
        """Return queries as codes, or as planes with their weights."""
        if not coded:
            if weights is not None:
                raise ValueError("weights are for planes of int32 words, got vectors; omit weights")
            _require_shape("queries", array, self.dim)
            projected = self._encoder.project("queries", array.reshape(-1, self.dim))
            return ops.planes(projected.reshape(*array.shape[:-1], self.bits), 3 if planes is None else planes)
        if planes is not None:
            raise ValueError("planes= is for queries that are vectors, got codes; omit it or pass vectors")
        _require_shape("queries", array, self.bits // 32)
        if weights is not None and array.ndim < 2:
            raise ValueError(f"with weights queries must have shape [..., P, W], got {list(array.shape)}; add planes")
        return array, weights

    def _originals(self, vectors: Any, content: rows.Rows) -> NDArray[Any]:
        """Return the vectors for exact scores."""
        if vectors is None:
            if content.vectors is None:
                raise ValueError("rerank needs the original vectors, got none; pass vectors=, or build with keep=")
            return content.vectors
        array, coded, _ = _read(vectors=vectors)
        if coded:
            raise TypeError("vectors= must be floats, got int32; pass the vectors that were added")
        _require_shape("vectors=", array, self.dim, rows=True)
        return np.asarray(array)  # a plain array, so that results are not of class np.memmap

    def _fill(self, after: rows.Rows, array: NDArray[Any], coded: bool) -> None:
        """Write codes and vectors after the last row."""
        place = slice(after.count, after.count + len(array))
        if coded:
            after.codes[place] = array
            return
        self._encoder.encode(array, after.codes[place])
        if after.vectors is not None:
            with np.errstate(over="ignore"):  # checked below
                after.vectors[place] = array
            if not np.isfinite(after.vectors[place]).all():
                raise ValueError(f"vectors must fit {self.keep}, got larger numbers; scale them or use keep='float32'")

    @property
    def dim(self) -> int:
        """Numbers per vector."""
        return self._encoder.dim

    @property
    def bits(self) -> int:
        """Bits per code."""
        return self._encoder.bits

    @property
    def keep(self) -> str | None:
        """Precision of the stored vectors, or None."""
        return None if self._rows.vectors is None else self._rows.vectors.dtype.name

    @property
    def ids(self) -> NDArray[np.int64]:
        """A copy of the ids, in the order they were added."""
        content = self._rows
        return content.ids[: content.count].copy()

    @property
    def codes(self) -> NDArray[np.int32]:
        """A copy of the codes, int32 [n, W], in the order they were added."""
        content = self._rows
        return content.codes[: content.count].copy()

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, ids and stored vectors, in memory or mapped, without spare capacity."""
        content = self._rows
        return sum(column[:1].nbytes for column in content.columns) * content.count

    def __len__(self) -> int:
        return self._rows.count

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int | np.integer) or not 0 <= number <= rows.LARGEST_ID:
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


# ---- Arguments -----------------------------------------------------------------------------------------------------


def _read(**given: Any) -> tuple[NDArray[Any], bool, arguments.Restore]:
    """Return an array, whether it has codes (int32 words) and not vectors (floats), and what restores its kind."""
    (x,), restore = arguments.host_arrays(**given)
    if x.dtype != np.int32 and x.dtype.kind != "f":
        raise TypeError(
            f"expected vectors of floats or codes of int32 words, got {x.dtype}; "
            "convert vectors with .astype('float32'), create codes with hashcore.pack"
        )
    return x, x.dtype == np.int32, restore


def _integer(name: str, value: Any, low: int, high: int, remedy: str) -> int:
    number = arguments.integer(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in {low}..{high}, got {number}; {remedy}")
    return number


def _choice(name: str, value: Any, allowed: Any) -> Any:
    if not isinstance(value, str | None) or value not in allowed:
        wanted = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {wanted}, got {arguments.shown(value)}; choose one of them")
    return value


def _require_shape(name: str, x: NDArray[Any], size: int, rows: bool = False) -> None:
    """Raise ValueError unless the shape is [n, size] (rows) or [..., size]."""
    if (x.ndim != 2 if rows else x.ndim < 1) or x.shape[-1] != size:
        dims = f"[n, {size}]" if rows else f"[..., {size}]"
        raise ValueError(f"{name} must have shape {dims} for this index, got {list(x.shape)}; reshape or rebuild it")


def _mean(value: Any, dim: int) -> NDArray[np.float32]:
    (array,), _ = arguments.host_arrays(mean=value)
    validation.real("mean", array, "[D]")
    if array.shape != (dim,):
        raise ValueError(f"mean must have shape [{dim}], got {list(array.shape)}; average the vectors over their rows")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    require_finite("mean", array[None])
    return array
