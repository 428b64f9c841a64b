"""Converts arrays of any strides to addresses and offsets for the kernels, copying only if necessary."""

from ctypes import c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore.arrays import Layout

HEAD = object.__basicsize__  # bytes of a Python object's header, after which numpy stores the data pointer


def address(x: NDArray[Any]) -> int:
    """Return the address of the first element.

    Reads the field of PyArrayObject_fields in numpy's C API: with cold CPU caches, x.ctypes.data takes 28 us,
    x.__array_interface__ 9 us and this 3 us.
    """
    return c_void_p.from_address(id(x) + HEAD).value or 0


def addresses(query: NDArray[Any], keys: NDArray[Any]) -> tuple[int, int]:
    """Return the addresses of both arrays."""
    return address(query), address(keys)


def aligned(planes: NDArray[Any]) -> NDArray[Any]:
    """Return planes [..., P, W] aligned as the kernels require; a copy only if necessary."""
    return planes if planes.flags.aligned else dense(planes)


def readable(codes: NDArray[Any]) -> NDArray[Any]:
    """Return codes [..., N, W] aligned and with contiguous words, as the kernels require; a copy only if necessary."""
    if codes.ndim < 2 or ((codes.strides[-1] == codes.itemsize or codes.shape[-1] == 1) and codes.flags.aligned):
        return codes
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in codes.strides[:-2])
    return np.broadcast_to(dense(codes[once]), codes.shape)


def dense(x: NDArray[Any]) -> NDArray[Any]:
    """Copy to native, aligned, contiguous memory; np.ascontiguousarray would not copy unaligned contiguous arrays."""
    return np.array(x, x.dtype.newbyteorder("="), order="C")


def offsets(shape: tuple[int, ...], strides: tuple[int, ...], lead: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the byte offset of each entry of leading dimensions broadcast to lead, flat."""
    first = np.zeros([1] * len(shape), np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and stride:
            steps = np.arange(0, size * stride, stride, dtype=np.int64)
            first = first + steps.reshape([size if a == axis else 1 for a in range(len(shape))])
    return np.broadcast_to(first, lead).flatten()


def rows(x: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the address of each row of x [..., N], not empty, or None if the rows are not plain."""
    if not are_plain(x):
        return None
    return offsets(x.shape[:-1], x.strides[:-1], x.shape[:-1]) + address(x)


def are_plain(x: NDArray[Any]) -> bool:
    """Whether each row of x [..., N] is plain: native byte order, aligned, contiguous."""
    return bool((x.strides[-1] == x.itemsize or x.shape[-1] == 1) and x.flags.aligned and x.dtype.isnative)


def of(x: NDArray[Any]) -> Layout:
    """Return the properties of an array that a plan depends on."""
    return Layout(x.dtype, x.shape, x.strides)
