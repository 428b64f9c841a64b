"""Arrays of any strides as addresses, which is what the kernels take: nothing is copied that need not be."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class CodeSets(NamedTuple):
    """Sets of codes, one for each output row, which need not lie together.

    The caller keeps the arrays alive while a kernel reads them.

    Attributes:
        dtype: type of a word: uint64, or uint32 if codes do not start and end on even words of 32 bits.
        first: address of the first word of each row's set, int64 [rows].
        step: words from a code to the next.
        words: words in a code.
        owner: the array that the addresses point into.
    """

    dtype: Any
    first: NDArray[np.int64]
    step: int
    words: int
    owner: NDArray[np.int32]


def code_sets(codes: NDArray[np.int32], lead: tuple[int, ...]) -> CodeSets:
    """Lay out codes [..., N, W], not empty, whose leading dimensions broadcast to lead."""
    if (codes.strides[-1] != 4 and codes.shape[-1] > 1) or not codes.flags.aligned:
        codes = np.ascontiguousarray(codes[_distinct(codes)])
    n, words = codes.shape[-2:]
    step = codes.strides[-2] if n > 1 else 4 * words
    first = _addresses(codes, codes.shape[:-2], lead)
    even = words % 2 == 0 and step % 8 == 0 and _address(codes) % 8 == 0
    if even and not any(stride % 8 for stride, size in zip(codes.strides, codes.shape[:-2], strict=False) if size > 1):
        return CodeSets(np.uint64, first, step // 8, words // 2, codes)
    return CodeSets(np.uint32, first, step // 4, words, codes)


def queries(x: NDArray[np.int32], lead: tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return planes [..., P, W] as [count, P, V] words of dtype without repeats, and which of them each row uses."""
    once = np.ascontiguousarray(x[_distinct(x)])
    shape = once.shape[:-2]
    index = np.arange(math.prod(shape), dtype=np.int64)
    planes = once.view(dtype).reshape(len(index), x.shape[-2], -1)
    return planes, index if shape == lead else np.broadcast_to(index.reshape(shape), lead).reshape(-1)


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
    return first.reshape(-1) if first.shape == lead else np.broadcast_to(first, lead).reshape(-1)


def _distinct(x: NDArray[Any]) -> tuple[slice, ...]:
    """Return the index that drops the repeats of broadcast leading dimensions, keeping them as size 1."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides[:-2])
