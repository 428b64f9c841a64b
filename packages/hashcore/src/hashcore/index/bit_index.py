"""The public class BitIndex: its arguments are checked here, and `rows`, `encoder` and `file` do the work."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, ops, quantiser, validation
from hashcore.index import file, rows
from hashcore.index.encoder import Encoder, best_vectors, given_mean, mean_of, rotation

if TYPE_CHECKING:
    import torch

    Array = NDArray[Any] | torch.Tensor
else:
    Array = Any


class BitIndex:
    """Bit codes with ids, searched exhaustively and exactly by weighted matching bits.

    Vectors are floats; codes are int32 words (hashcore.pack), or uint8 or int8 as numpy.packbits and
    sentence-transformers write them (quantiser.from_bytes); they are told apart by dtype. Arguments may be numpy arrays
    or torch CPU tensors; results have the kind of the queries.

    Any number of threads may search, read and change an index at the same time: a call works on the index as it was
    when the call started, changes run one at a time, and each is visible completely or not at all. A copy, shallow or
    deep, a pickle, or what a forked or spawned process gets is an index of its own, as it was at that time: changes of
    one are not seen in the other. A pickle is for another process; to keep an index, save it.

    Args:
        dim: numbers per vector, D.
        bits: length of the code, a multiple of 32; by default D, for a rotation rounded up to a multiple of 32.
        encoder: 'rotation' takes the signs of (x - mean) R, R a random rotation in SO(D): several independent ones
            concatenated if bits > D, the first columns if bits < D. 'sign' takes the signs of x - mean; bits must be D,
            a multiple of 8.
        seed: of the rotation.
        mean: subtracted from every vector and query before taking signs, shape [D]; default: zero.
        keep: 'float16' or 'float32' stores the vectors in that precision, for rerank; None stores codes only.
    Raises: ValueError or TypeError.
    Source: docs/algorithm.md, eq. 1, eq. 4, eq. 5 and Variants.
    """

    _encoder: Encoder
    _rows: rows.Rows

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
        dim = validation.within("dim", dim, 1, file.LARGEST, "give the number of dimensions of a vector")
        rotated = validation.choice("encoder", encoder, ("rotation", "sign")) == "rotation"
        kept = file.KEPT[validation.choice("keep", keep, file.KEPT)]
        bits = -(-dim // 32) * 32 if bits is None and rotated else dim if bits is None else bits
        bits = validation.within("bits", bits, 1, file.LARGEST, "choose another code length")
        if bits % (32 if rotated else 8):
            raise ValueError(
                f"bits must be a multiple of 32, or of 8 with encoder='sign', got {bits}; "
                "choose another, pad the vectors or use encoder='rotation'"
            )
        if not rotated and bits != dim:
            raise ValueError(
                f"encoder='sign' has one bit per dimension, got bits = {bits} for {dim} dimensions; "
                "use encoder='rotation' for another number of bits"
            )
        seed = validation.within("seed", seed, 0, 2**63 - 1, "choose another")
        mean = None if mean is None else given_mean(mean, dim)
        matrix = rotation(dim, bits, seed) if rotated else None
        encode = Encoder(dim, bits, mean, matrix, seed if rotated else None)
        self.__setstate__({"_encoder": encode, "_rows": rows.empty(encode.words, dim, kept)})

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle is made of."""
        return {name: x for name, x in vars(self).items() if name != "_changing"} | {"_rows": self._rows.alone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._changing = threading.Lock()
        _indexes.add(self)

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
        array, coded, _ = validation.vectors_or_codes(vectors=vectors)
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
        """Build an index of codes, int32 [n, W], or uint8 or int8 [n, B] of 8 B bits.

        Vectors for it have one number per bit; their signs are the code.
        """
        (array,), _ = arguments.host_arrays(codes=codes)
        if array.dtype not in validation.CODES:
            raise TypeError(f"codes must be int32 words, uint8 or int8, got {array.dtype}; use hashcore.pack")
        if array.ndim != 2 or not array.shape[-1]:
            raise ValueError(f"codes must have shape [n, W] or [n, B], got {list(array.shape)}; reshape them")
        index = cls(8 * array.itemsize * array.shape[-1], encoder="sign")
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
        encoder, content = file.read(path, mmap, verify)
        index.__setstate__({"_encoder": encoder, "_rows": content})
        return index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to one file, replacing path atomically. hashcore/index/file.py documents the format."""
        file.write(path, self._encoder, self._rows)

    def add(self, items: Array, ids: Any = None) -> None:
        """Add vectors [n, D] or codes [n, W] or [n, B].

        Args:
            items: floats, int32 words, or uint8 or int8. An index with `keep` accepts vectors only.
            ids: n distinct integers >= 0 that are not in the index; by default those after the largest id so far.
        Raises: ValueError or TypeError; the index is then unchanged.
        """
        array, coded, _ = validation.vectors_or_codes(items=items)
        if coded and self.keep:
            raise ValueError(f"an index with keep={self.keep!r} takes vectors, got codes; add the vectors instead")
        if coded:
            array = self._words("codes", array, rows=True)
        else:
            validation.shape("vectors", array, self.dim, rows=True)
        given = None if ids is None else rows.new_ids(ids, len(array))
        if len(array) == 0:
            return  # so that a mapped index stays mapped
        with self._changing:
            before = self._rows
            if given is None:
                first = before.next_id
                if len(array) > rows.LARGEST_ID + 1 - first:
                    raise ValueError(f"no ids are left after {first - 1} for {len(array)} rows; pass ids=")
                given = np.arange(first, first + len(array), dtype=np.int64)
            elif given.min() < before.next_id and (known := before.find(given) >= 0).any():
                raise ValueError(f"ids must be new, got {given[known][0]}, which is in the index; remove it first")
            after = before.with_room(len(array))
            place = slice(after.count, after.count + len(array))
            if coded:
                after.codes[place] = array
            else:
                self._encoder.encode(array, after.codes[place])
            if after.vectors is not None:
                with np.errstate(over="ignore"):  # checked below
                    after.vectors[place] = array
                if not np.isfinite(after.vectors[place]).all():
                    raise ValueError(
                        f"vectors must fit {self.keep}, got larger numbers; scale them or use keep='float32'"
                    )
            self._rows = after.appended(given)

    def remove(self, ids: Any) -> None:
        """Remove one or several ids.

        Raises: ValueError if one of them is not in the index; nothing is then removed.
        """
        with self._changing:
            self._rows = self._rows.without(self._rows.require(ids))

    def encode(self, vectors: Array) -> Any:
        """Return the codes of vectors [..., D]: int32 [..., W], W the bits / 32, rounded up."""
        array, coded, restore = validation.vectors_or_codes(vectors=vectors)
        if coded:
            raise TypeError(f"expected vectors of floats, got {array.dtype}; these are codes already")
        validation.shape("vectors", array, self.dim)
        out = np.empty((array.size // self.dim, self._encoder.words), np.int32)
        self._encoder.encode(array.reshape(-1, self.dim), out)
        return restore(out.reshape(*array.shape[:-1], -1))

    def search(
        self,
        queries: Array,
        k: int,
        *,
        planes: int | None = None,
        weights: Sequence[int] | None = None,
        ids: Any = None,
        without: Any = None,
        rerank: int | None = None,
        vectors: Array | None = None,
        metric: str = "dot",
    ) -> tuple[Any, Any]:
        """Find the k best codes of each query.

        Args:
            queries: vectors [..., D], quantised to bit planes (eq. 5); or codes [..., W] or [..., B], scored by
                matching bits (eq. 2); or with weights planes [..., P, W] or [..., P, B], P planes per query (eq. 4).
            k: number of codes to find, at most as many as are searched.
            planes: for vectors, 1 to 8; more planes are closer to a real-valued query and take more time. Default 3.
            weights: one positive integer per plane.
            ids, without: search only the rows with these ids, or all others: integers in any order, each in the index,
                or bools [len(index)], one for each row in the order of `ids`. One pass over all codes, as without them.
            rerank: find rerank * k candidates by their codes, and return the k best of them by exact scores. Needs
                vector queries and the original vectors, from `keep` or from `vectors`.
            vectors: original vectors for rerank, floats [M, D]; row i belongs to id i. Only rows of candidates are
                read, also of a memory-mapped array.
            metric: exact score of rerank, 'dot' or 'cosine' (0 for a zero vector).
        Returns: scores and ids int64, both [..., k], best first; ties in the order of addition. Scores are int32, or
            float32 with rerank.
        Raises: ValueError or TypeError.
        """
        content, allowed = self._rows, None
        count, place = content.count, "in the index"
        array, coded, restore = validation.vectors_or_codes(queries=queries)
        if ids is not None and without is not None:
            raise ValueError("expected ids= or without=, got both; pass the ids that are left as ids=")
        if ids is not None or without is not None:
            allowed, count = content.allowed(without if ids is None else ids, others=ids is None)
            place = "among these ids" if without is None else "without these ids"
        k = validation.within("k", k, 0, count, f"there are no more codes {place}; clamp it")
        codes, weights = self._planes(array, coded, planes, weights)
        if rerank is None:
            if vectors is not None or metric != "dot":
                raise ValueError("vectors= and metric= need rerank=, got none; try rerank=4")
            scores, positions = rows.best(codes, content, k, weights, allowed)
            if self._encoder.padding:
                scores -= self._encoder.padding * sum(weights or (1,))
        else:
            times = validation.within("rerank", rerank, 1, 2**31, "rerank * k candidates are scored exactly")
            cosine = validation.choice("metric", metric, ("dot", "cosine")) == "cosine"
            if coded:
                raise TypeError("rerank needs queries that are vectors, got codes; pass the original vectors")
            originals = self._originals(vectors, content)
            _, candidates = rows.best(codes, content, min(times * k, count), weights, allowed)
            at = candidates if vectors is None else content.ids[candidates]
            scores, positions = best_vectors(array, originals, at, candidates, k, cosine)
        return restore(scores), restore(content.ids[positions])

    def _planes(
        self, array: NDArray[Any], coded: bool, planes: int | None, weights: Sequence[int] | None
    ) -> tuple[NDArray[np.int32], tuple[int, ...] | None]:
        """Return queries as codes, or as planes with their weights."""
        if not coded:
            if weights is not None:
                raise ValueError("weights are for planes of int32 words, got vectors; omit weights")
            validation.shape("queries", array, self.dim)
            projected = self._encoder.project("queries", array.reshape(-1, self.dim))
            projected = projected.reshape(*array.shape[:-1], 32 * self._encoder.words)
            codes, weights = ops.planes(projected, 3 if planes is None else planes)
            return self._encoder.masked(codes), weights
        if planes is not None:
            raise ValueError("planes= is for queries that are vectors, got codes; omit it or pass vectors")
        array = self._words("queries", array)
        if weights is not None and array.ndim < 2:
            raise ValueError(f"with weights queries must have shape [..., P, W], got {list(array.shape)}; add planes")
        return array, arguments.integers("weights", weights)

    def _words(self, name: str, codes: NDArray[Any], rows: bool = False) -> NDArray[np.int32]:
        """Return codes as words [..., W] with 0 in their padding."""
        octets = codes.itemsize == 1
        validation.shape(name, codes, self.bits // 8 if octets else self._encoder.words, rows)
        return quantiser.from_bytes(codes) if octets else self._encoder.masked(codes)

    def _originals(self, vectors: Any, content: rows.Rows) -> NDArray[Any]:
        """Return the vectors for exact scores."""
        if vectors is None:
            if content.vectors is None:
                raise ValueError("rerank needs the original vectors, got none; pass vectors=, or build with keep=")
            return content.vectors
        array, coded, _ = validation.vectors_or_codes(vectors=vectors)
        if coded:
            raise TypeError(f"vectors= must be floats, got {array.dtype}; pass the vectors that were added")
        validation.shape("vectors=", array, self.dim, rows=True)
        return np.asarray(array)  # a plain array, so that results are not of class np.memmap

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
        return bool(self._rows.find(np.array([number], np.int64))[0] >= 0)

    def __repr__(self) -> str:
        kept = "" if self.keep is None else f", {self.keep} vectors kept"
        return f"BitIndex({len(self)} codes of {self.bits} bits, dim {self.dim}{kept}, {self.nbytes / 1e6:.1f} MB)"


_indexes: weakref.WeakSet[BitIndex] = weakref.WeakSet()


def _after_fork() -> None:
    """Renew all locks: another thread of the parent may have held them, and will never release them here."""
    for index in _indexes:
        index._changing = threading.Lock()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_after_fork)
