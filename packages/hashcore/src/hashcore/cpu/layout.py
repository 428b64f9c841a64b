"""Arrays of any strides as addresses, which is what the kernels take: nothing is copied that need not be."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class CodeSets(NamedTuple):
    """Sets of codes, one for each output row, which need not lie together.

    Attributes:
        first: address of the first code of each row's set, int64 [rows].
        step: bytes from a code to the next.
        bits: bits in a code.
        owner: the array that the addresses point into; to be kept alive while a kernel reads them.
    """

    first: NDArray[np.int64]
    step: int
    bits: int
    owner: NDArray[np.int32]


def code_sets(codes: NDArray[np.int32], lead: tuple[int, ...]) -> CodeSets:
    """Lay out codes [..., N, W], not empty, whose leading dimensions broadcast to lead."""
    if (codes.strides[-1] != 4 and codes.shape[-1] > 1) or not codes.flags.aligned:
        codes = np.ascontiguousarray(codes[_distinct(codes)])
    n, words = codes.shape[-2:]
    step = codes.strides[-2] if n > 1 else 4 * words
    return CodeSets(_addresses(codes, codes.shape[:-2], lead), step, 32 * words, codes)


def queries(x: NDArray[np.int32], lead: tuple[int, ...]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return planes [..., P, W] without repeats, [count, P, ceil(W / 2)], and which of them each row of lead uses.

    They are complemented, so that xor with a key leaves the bits that match, and filled up with 0, which matches none.
    """
    once = x[_distinct(x)]
    shape, count, words = once.shape[:-2], math.prod(once.shape[:-2]), x.shape[-1]
    planes = np.zeros((count, x.shape[-2], words + words % 2), np.int32)
    np.invert(once.reshape(count, -1, words), out=planes[..., :words])
    index = np.arange(count, dtype=np.int64)
    planes_of = index if shape == lead else np.broadcast_to(index.reshape(shape), lead).flatten()
    return planes.view(np.uint64), planes_of


def rows(x: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the address of each row of x [..., N], not empty, or None if its rows are not plain memory."""
    whole = x.strides[-1] == x.itemsize or x.shape[-1] == 1
    return _addresses(x, x.shape[:-1], x.shape[:-1]) if whole and x.flags.aligned and x.dtype.isnative else None


def _address(x: NDArray[Any]) -> int:
    return x.__array_interface__["data"][0]


def _addresses(x: NDArray[Any], shape: tuple[int, ...], lead: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the address of each item of x's leading dimensions, of this shape, once they broadcast to lead."""
    first = np.full([1] * len(shape), _address(x), np.int64)
    for axis, size in enumerate(shape):
        if size > 1 and x.strides[axis]:
            steps = np.arange(0, size * x.strides[axis], x.strides[axis], dtype=np.int64)
            first = first + steps.reshape([size if a == axis else 1 for a in range(len(shape))])
    if first.shape != lead:
        first = np.broadcast_to(first, lead)
    return first.flatten()  # writeable and contiguous: numba compiles for each kind it meets


def _distinct(x: NDArray[Any]) -> tuple[slice, ...]:
    """Return the index that drops the repeats of broadcast leading dimensions, keeping them as size 1."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides[:-2])
