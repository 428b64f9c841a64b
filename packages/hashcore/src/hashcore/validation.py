"""What the public functions accept: every message says what was expected, what came, and what to do."""

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Restore = Callable[[NDArray[Any]], Any]


def host_arrays(**arrays: Any) -> tuple[list[NDArray[Any]], Restore]:
    """View every argument as numpy and return the function that turns a result back into the caller's kind.

    Raises: TypeError for anything but arrays of one kind; ValueError for a tensor that is not in CPU memory.
    """
    torch = sys.modules.get("torch")  # a caller who holds a tensor has imported it; nobody else pays for it
    if all(isinstance(x, np.ndarray) for x in arrays.values()):
        return list(arrays.values()), lambda result: result
    if torch is not None and all(isinstance(x, torch.Tensor) for x in arrays.values()):
        return [_tensor_view(torch, x) for x in arrays.values()], torch.from_numpy
    got = ", ".join(f"{name}: {type(x).__name__}" for name, x in arrays.items())
    raise TypeError(f"expected numpy arrays or torch tensors, not mixed, got {got}; convert them to one kind")


def is_bfloat16(x: Any) -> bool:
    """Tell whether x is a tensor of the one common dtype that numpy lacks."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16


def _tensor_view(torch: Any, x: Any) -> NDArray[Any]:
    if x.device.type != "cpu":
        raise ValueError(
            f"hashcore runs on CPU tensors in this version, got a tensor on {x.device}; move it with .cpu()"
        )
    if x.layout != torch.strided:
        raise ValueError(f"expected a strided tensor, got layout {x.layout}; convert it with .to_dense()")
    x = x.detach()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def real(name: str, x: NDArray[Any], dims: str) -> None:
    """Require real numbers along at least one dimension."""
    if x.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold real numbers, got {x.dtype}; convert it first")
    if x.ndim == 0:
        raise ValueError(f"{name} must have shape {dims}, got a scalar; add a dimension")


def bits(name: str, x: NDArray[Any]) -> None:
    """Require a last dimension that fills whole words."""
    if x.shape[-1] == 0 or x.shape[-1] % 32:
        raise ValueError(
            f"the last dimension of {name} must be a positive multiple of 32 (bits to a word), got {x.shape[-1]}; "
            "pad it or choose another code length"
        )


def codes(name: str, x: NDArray[Any], dims: str) -> None:
    """Require int32 words of the shape named by dims, such as '[..., N, W]'."""
    if x.dtype != np.int32:
        raise TypeError(f"{name} must be int32 words, got {x.dtype}; make them with hashcore.pack")
    required = dims.count(",")
    if x.ndim < required:
        raise ValueError(f"{name} must have shape {dims}, got {list(x.shape)}; add the missing dimensions")
    if x.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one word per code, got shape {list(x.shape)}")


def plane_count(planes: Any) -> int:
    """Return planes as an int in 1..8."""
    count = _integer("planes", planes)
    if not 1 <= count <= 8:
        raise ValueError(f"planes must be in 1..8, got {count}; 3 loses next to nothing against real-valued queries")
    return count


def finite(peak: NDArray[np.float32]) -> None:
    """Require finite query weights, given the largest magnitude of each row."""
    if not np.isfinite(peak).all():
        bad = peak[~np.isfinite(peak)][0]
        raise ValueError(f"w must be finite in float32, got {bad} in a row; look for an overflow upstream")


def plane_weights(weights: Sequence[int], planes: int, words: int) -> tuple[int, ...]:
    """Return weights as ints: one per plane, positive, with every score inside int32."""
    checked = tuple(_integer("weights", weight) for weight in weights)
    if len(checked) != planes:
        raise ValueError(
            f"expected one weight per plane, got {len(checked)} weights for {planes} planes; "
            "query is [..., P, W] when weights are given"
        )
    if min(checked, default=1) < 1:
        raise ValueError(f"weights must be positive, got {checked}; leave out planes of weight 0")
    if sum(checked) * 32 * words >= 2**31:
        raise ValueError(
            f"the largest score must fit int32, got sum(weights) * 32 * W = {sum(checked) * 32 * words}; "
            "use smaller weights or fewer words"
        )
    return checked


def same_words(query: NDArray[Any], keys: NDArray[Any]) -> None:
    """Require codes of one length."""
    if query.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"query and keys must have the same number of words, got {query.shape[-1]} and {keys.shape[-1]}; "
            "hash both to the same number of bits"
        )


def broadcast(query: tuple[int, ...], keys: tuple[int, ...]) -> tuple[int, ...]:
    """Return the broadcast of two leading shapes."""
    try:
        return np.broadcast_shapes(query, keys)
    except ValueError:
        raise ValueError(
            f"the leading dimensions of query and keys must broadcast, got {list(query)} and {list(keys)}; "
            "insert dimensions of size 1"
        ) from None


def integer_scores(scores: NDArray[Any]) -> None:
    """Require integers with a dimension to select from."""
    if scores.dtype.kind not in "iu":
        raise TypeError(f"scores must be integers, got {scores.dtype}; hashcore.score returns int32")
    if scores.ndim == 0:
        raise ValueError("scores must have shape [..., N], got a scalar; add a dimension")


def selection_size(k: Any, shape: tuple[int, ...]) -> int:
    """Return k as an int in 0..N."""
    size = _integer("k", k)
    if not 0 <= size <= shape[-1]:
        raise ValueError(f"k must be in 0..{shape[-1]}, the number of scores in a row, got {size}; clamp it")
    return size


def selection_sizes(k: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Require one k in 0..N for each row of scores."""
    if k.dtype.kind not in "iu":
        raise TypeError(f"k must be an integer or an array of integers, got {k.dtype}; convert it")
    if k.shape != shape[:-1]:
        raise ValueError(f"k must have one entry per row, shape {list(shape[:-1])}, got {list(k.shape)}; broadcast it")
    if k.size and not 0 <= k.min() <= k.max() <= shape[-1]:
        bad = k.min() if k.min() < 0 else k.max()
        raise ValueError(f"k must be in 0..{shape[-1]}, the number of scores in a row, got {bad}; clamp it")


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}; convert it with int()") from None
