"""Arrays of any strides as addresses, which is what the kernels take: nothing is copied that need not be."""

from ctypes import c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore.validation import Layout

HEAD = object.__basicsize__  # bytes of a Python object's head, after which numpy keeps the pointer to the data


def address(x: NDArray[Any]) -> int:
    """Return where the first element lies.

    Read from where numpy's C interface says it is (PyArrayObject_fields): when the caches are cold, x.ctypes.data takes
    28 us, x.__array_interface__ 9 us and this 3 us.
    """
    return c_void_p.from_address(id(x) + HEAD).value or 0


def addresses(query: NDArray[Any], keys: NDArray[Any]) -> tuple[int, int]:
    """Return where both begin."""
    return address(query), address(keys)


def aligned(planes: NDArray[Any]) -> NDArray[Any]:
    """Return planes [..., P, W] as the kernels read them; a copy if need be."""
    return planes if planes.flags.aligned else dense(planes)


def readable(codes: NDArray[Any]) -> NDArray[Any]:
    """Return codes [..., N, W] as the kernels read them, aligned and the words of each in turn; a copy if need be."""
    if codes.ndim < 2 or ((codes.strides[-1] == codes.itemsize or codes.shape[-1] == 1) and codes.flags.aligned):
        return codes
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in codes.strides[:-2])
    return np.broadcast_to(dense(codes[once]), codes.shape)


def dense(x: NDArray[Any]) -> NDArray[Any]:
    """Copy to plain memory; np.ascontiguousarray returns what is contiguous as it is, aligned or not."""
    return np.array(x, x.dtype.newbyteorder("="), order="C")


def offsets(shape: tuple[int, ...], strides: tuple[int, ...], lead: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the offset in bytes of each item of leading dimensions, flat, once they broadcast to lead."""
    first = np.zeros([1] * len(shape), np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and stride:
            steps = np.arange(0, size * stride, stride, dtype=np.int64)
            first = first + steps.reshape([size if a == axis else 1 for a in range(len(shape))])
    return np.broadcast_to(first, lead).flatten()


def rows(x: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the address of each row of x [..., N], not empty, or None if its rows are not plain memory."""
    if not are_plain(x):
        return None
    return offsets(x.shape[:-1], x.strides[:-1], x.shape[:-1]) + address(x)


def are_plain(x: NDArray[Any]) -> bool:
    """Whether each row of x [..., N] is plain memory: native, aligned, element after element."""
    return bool((x.strides[-1] == x.itemsize or x.shape[-1] == 1) and x.flags.aligned and x.dtype.isnative)


def of(x: NDArray[Any]) -> Layout:
    """Return what of an array a plan depends on."""
    return Layout(x.dtype, x.shape, x.strides)
