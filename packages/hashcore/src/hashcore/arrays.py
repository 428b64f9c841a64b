"""Arguments that are arrays: numpy arrays, torch tensors, and what can be checked without reading their elements."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Restore = Callable[[NDArray[Any]], Any]


class Described(Protocol):
    """The properties that most checks need: of an array, or of a stand-in for one."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...


def host_arrays(optional: dict[str, Any] | None = None, /, **arrays: Any) -> tuple[list[Any], Restore]:
    """Return numpy views of all arguments, and a function that converts a result to the caller's kind.

    Optional arguments come last; those that are no arrays, such as None or integers, are returned unchanged.

    Raises: TypeError unless all are arrays of one kind; ValueError for a tensor that is not strided.
    """
    passed = arrays | {name: x for name, x in (optional or {}).items() if is_array(x)}
    torch = sys.modules.get("torch")  # without an import: callers with tensors have imported it
    if all(isinstance(x, np.ndarray) for x in passed.values()):
        views, restore = passed, lambda result: result
    elif torch is not None and all(isinstance(x, torch.Tensor) for x in passed.values()):
        views, restore = {name: _tensor_view(torch, x) for name, x in passed.items()}, torch.from_numpy
    else:
        raise mixed_kinds(passed)
    return [views.get(name, x) for name, x in (arrays | (optional or {})).items()], restore


def is_array(x: Any) -> bool:
    """Whether x is an array or a tensor of any rank, and not a number or a list."""
    return hasattr(x, "shape") and not isinstance(x, np.generic)


def bfloat16_bits(x: Any) -> Any | None:
    """Return a bfloat16 tensor, which numpy does not support, as an int16 view; None for other arguments."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16 or x.layout != torch.strided:
        return None
    return x.detach().view(torch.int16)


PLAIN = {np.ndarray, type(None), int, bool, float, str}  # types of arguments that contain no tensor


def for_torch(arguments: Iterable[Any]) -> bool:
    """Whether any argument is a tensor that numpy cannot view: not in CPU memory, or traced."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    for x in arguments:
        kind = type(x)
        if kind in PLAIN:
            continue
        if kind is tuple or kind is list:
            if for_torch(x):
                return True
        elif isinstance(x, torch.Tensor) and (
            torch.compiler.is_compiling() or not x.is_cpu or kind not in (torch.Tensor, torch.nn.Parameter)
        ):
            return True
    return False


def mixed_kinds(passed: dict[str, Any]) -> TypeError:
    """Return the error for arguments of different kinds."""
    got = ", ".join(f"{name}: {type(x).__name__}" for name, x in passed.items())
    return TypeError(f"expected numpy arrays or torch tensors, not mixed, got {got}; convert them to one kind")


def not_strided(x: Any) -> ValueError:
    """Return the error for a tensor that is sparse or otherwise without strides."""
    return ValueError(f"expected a strided tensor, got layout {x.layout}; convert it with .to_dense()")


def _tensor_view(torch: Any, x: Any) -> NDArray[Any]:
    if x.layout != torch.strided:
        raise not_strided(x)
    if x.requires_grad:
        x = x.detach()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


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
