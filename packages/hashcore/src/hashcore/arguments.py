"""Reads the arguments of the public functions: arrays with their layouts and addresses, integers, options.

`validation` has the checks that compare arguments with one another. Arrays are numpy arrays or torch tensors; kernels
get addresses and offsets of any strides, and arrays are copied only if necessary.
"""

import operator
import reprlib
import sys
from collections.abc import Callable, Iterable
from ctypes import c_void_p
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Restore = Callable[[NDArray[Any]], Any]
PLAIN: set[type[Any]] = {np.ndarray, type(None), int, bool, float, str}  # types of arguments that contain no tensor
HEAD = object.__basicsize__  # bytes of a Python object's header, after which numpy stores the data pointer


def host_arrays(optional: dict[str, Any] | None = None, /, **arrays: Any) -> tuple[list[Any], Restore]:
    """Return numpy views of all arguments, and a function that converts a result to the caller's kind.

    Optional arguments come last; those that are no arrays, such as None or integers, are returned unchanged.

    Raises: TypeError unless all are arrays of one kind; ValueError for a tensor that is not strided.
    """
    passed = arrays | {name: x for name, x in (optional or {}).items() if is_array(x)}
    for name, x in passed.items():
        refuse_masked(name, x)
    torch = sys.modules.get("torch")  # without an import: callers with tensors have imported it
    if all(isinstance(x, np.ndarray) for x in passed.values()):
        views, restore = passed, lambda result: result
    elif torch is not None and all(isinstance(x, torch.Tensor) for x in passed.values()):
        views, restore = {name: tensor_view(x) for name, x in passed.items()}, torch.from_numpy
    else:
        raise mixed_kinds(passed)
    return [views.get(name, x) for name, x in (arrays | (optional or {})).items()], restore


def tensor_view(x: Any) -> NDArray[Any]:
    """View a tensor in the host's memory as an array; bfloat16, which numpy lacks, is converted to float32."""
    torch = sys.modules["torch"]
    if x.layout != torch.strided:
        raise not_strided(x)
    x = x.detach()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def is_array(x: Any) -> bool:
    """Whether x is an array or a tensor of any rank, and not a number or a list."""
    return hasattr(x, "shape") and not isinstance(x, np.generic)


def for_torch(arguments: Iterable[Any]) -> bool:
    """Whether any argument is a tensor that numpy cannot view: not in CPU memory, or traced."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for x in arguments:
        kind = type(x)
        if kind in PLAIN:
            continue
        if isinstance(x, torch.Tensor) and (
            torch.compiler.is_compiling() or not x.is_cpu or kind not in (torch.Tensor, torch.nn.Parameter)
        ):
            return True
    return False


def refuse_masked(name: str, x: Any) -> None:
    """Raise TypeError for a masked array, whose mask would be lost."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be an array without a mask, got a masked array; choose its rows, or .filled(...)")


def mixed_kinds(passed: dict[str, Any]) -> TypeError:
    """Return the error for arguments of different kinds."""
    got = ", ".join(f"{name}: {type(x).__name__}" for name, x in passed.items())
    return TypeError(f"expected numpy arrays or torch tensors, not mixed, got {got}; convert them to one kind")


def not_strided(x: Any) -> ValueError:
    """Return the error for a tensor that is sparse or otherwise without strides."""
    return ValueError(f"expected a strided tensor, got layout {x.layout}; convert it with .to_dense()")


class Layout(NamedTuple):
    """The properties of an array that can be checked without reading its elements."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def with_axis(self, axis: int) -> "Layout":
        """Return the layout with one more axis, of size 1, before an axis counted from the end."""
        at = self.ndim + axis
        return Layout(self.dtype, (*self.shape[:at], 1, *self.shape[at:]), (*self.strides[:at], 0, *self.strides[at:]))


Described = Layout | NDArray[Any]
"""What has the properties that most checks need."""


def address(x: NDArray[Any]) -> int:
    """Return the address of the first element.

    Reads the field of PyArrayObject_fields in numpy's C API: with cold CPU caches, x.ctypes.data takes 28 us,
    x.__array_interface__ 9 us and this 3 us.
    """
    return c_void_p.from_address(id(x) + HEAD).value or 0


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


def integer(name: str, value: Any) -> int:
    """Return an integer of any type as an int."""
    if type(value) is int:
        return value
    refuse_masked(name, value)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}; convert it with int()") from None


def integers(name: str, values: Any) -> tuple[int, ...] | None:
    """Return several integers as ints, or None for None."""
    return None if values is None else tuple(integer(name, x) for x in values)


def shown(value: Any) -> str:
    """Return a short representation of any value on one line."""
    return " ".join(reprlib.repr(value).split())
