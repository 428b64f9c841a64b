"""What the public functions accept: every message says what was expected, what came, and what to do."""

import math
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Restore = Callable[[NDArray[Any]], Any]


class Described(Protocol):
    """What most checks look at: of an array, or of what stands for one."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...


def host_arrays(optional: dict[str, Any] | None = None, /, **arrays: Any) -> tuple[list[Any], Restore]:
    """View every argument as numpy and return the function that turns a result back into the caller's kind.

    Optional arguments come after the others; those that are no arrays, such as None or a number, come back as they are.

    Raises: TypeError for anything but arrays of one kind; ValueError for a tensor that is not in CPU memory.
    """
    passed = arrays | {name: x for name, x in (optional or {}).items() if is_array(x)}
    torch = sys.modules.get("torch")  # a caller who holds a tensor has imported it; nobody else pays for it
    if all(isinstance(x, np.ndarray) for x in passed.values()):
        views, restore = passed, lambda result: result
    elif torch is not None and all(isinstance(x, torch.Tensor) for x in passed.values()):
        views, restore = {name: _tensor_view(torch, x) for name, x in passed.items()}, torch.from_numpy
    else:
        raise mixed_kinds(passed)
    return [views.get(name, x) for name, x in (arrays | (optional or {})).items()], restore


def is_array(x: Any) -> bool:
    """Tell an array or a tensor, of any rank, from a number or a list."""
    return hasattr(x, "shape") and not isinstance(x, np.generic)


def bfloat16_bits(x: Any) -> Any | None:
    """Return a bfloat16 tensor, the one common dtype that numpy lacks, as int16 in the same memory; None for others."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16 or x.layout != torch.strided:
        return None
    return x.detach().view(torch.int16)


PLAIN = {np.ndarray, type(None), int, bool, float, str}  # kinds of arguments that hold no tensor


def for_torch(arguments: Iterable[Any]) -> bool:
    """Whether a call has a tensor that numpy cannot view: in other memory, or traced instead of computed."""
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
    """Return which arguments are of which kind."""
    got = ", ".join(f"{name}: {type(x).__name__}" for name, x in passed.items())
    return TypeError(f"expected numpy arrays or torch tensors, not mixed, got {got}; convert them to one kind")


def not_strided(x: Any) -> ValueError:
    """Say that a tensor is sparse or otherwise without strides."""
    return ValueError(f"expected a strided tensor, got layout {x.layout}; convert it with .to_dense()")


def _tensor_view(torch: Any, x: Any) -> NDArray[Any]:
    if x.layout != torch.strided:
        raise not_strided(x)
    if x.requires_grad:
        x = x.detach()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def real(name: str, x: Described, dims: str) -> None:
    """Require real numbers along at least one dimension."""
    if x.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold real numbers, got {x.dtype}; convert it first")
    if x.ndim == 0:
        raise ValueError(f"{name} must have shape {dims}, got a scalar; add a dimension")


def bits(name: str, x: Described) -> None:
    """Require a last dimension that fills whole words."""
    if x.shape[-1] == 0 or x.shape[-1] % 32:
        raise ValueError(
            f"the last dimension of {name} must be a positive multiple of 32 (bits to a word), got {x.shape[-1]}; "
            "pad it or choose another code length"
        )


def codes(name: str, x: Described, dims: str) -> None:
    """Require int32 words of the shape named by dims, such as '[..., N, W]'."""
    if x.dtype != np.int32:
        raise TypeError(f"{name} must be int32 words, got {x.dtype}; make them with hashcore.pack")
    required = dims.count(",")
    if x.ndim < required:
        raise ValueError(f"{name} must have shape {dims}, got {list(x.shape)}; add the missing dimensions")
    if x.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one word per code, got shape {list(x.shape)}")


def not_empty(name: str, shape: Sequence[int]) -> None:
    """Require rows of at least one number."""
    if shape[-1] == 0:
        raise ValueError(f"the last dimension of {name} must not be empty, got 0; a row needs a largest weight")


def group(shape: Sequence[int]) -> None:
    """Require at least one code in a group."""
    if shape[-2] == 0:
        raise ValueError(f"a group must have at least one code, got shape {list(shape)}")


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


def same_words(query: Described, keys: Described) -> None:
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


def integer_scores(scores: Described) -> None:
    """Require integers with a dimension to select from."""
    if scores.dtype.kind not in "iu":
        raise TypeError(f"scores must be integers, got {scores.dtype}; hashcore.score returns int32")
    if scores.ndim == 0:
        raise ValueError("scores must have shape [..., N], got a scalar; add a dimension")


class Layout(NamedTuple):
    """What of an array can be checked without its elements."""

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


class Comparison(NamedTuple):
    """Planes [..., P, W] and keys [..., N, W], which fit each other.

    Attributes:
        weights: of the planes.
        lead: the leading dimensions that both broadcast to.
    """

    query: Layout
    keys: Layout
    weights: tuple[int, ...]
    lead: tuple[int, ...]


def comparison(query: Layout, keys: Layout, weights: tuple[int, ...] | None) -> Comparison:
    """Require what can be scored: queries [..., Q, W], or with weights planes [..., P, W], and keys [..., N, W]."""
    codes("query", query, "[..., Q, W]" if weights is None else "[..., P, W]")
    codes("keys", keys, "[..., N, W]")
    same_words(query, keys)
    lead = broadcast(query.shape[:-2], keys.shape[:-2])
    if weights is None:  # each of the Q queries is one plane of weight 1
        lead = (*lead, query.shape[-2])
        query, keys, weights = query.with_axis(-1), keys.with_axis(-2), (1,)
    return Comparison(query, keys, plane_weights(weights, query.shape[-2], query.shape[-1]), lead)


class Selection(NamedTuple):
    """What each row of a selection asks for, in int64 [rows]: its k, and the first and the end of its positions."""

    k: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    width: int


class Asked(NamedTuple):
    """A Selection in which one int stands for all rows that ask for the same."""

    k: int | NDArray[np.int64]
    low: int | NDArray[np.int64]
    high: int | NDArray[np.int64]
    width: int


def selection(shape: tuple[int, ...], k: Any, lengths: Any, starts: Any, sink: Any, recent: Any) -> Selection:
    """Return the selection from scores of this shape, [..., N], with every value checked; all positions by default."""
    rows, found = math.prod(shape[:-1]), asked(shape, k, lengths, starts, sink, recent)
    sizes, low, high = (x if isinstance(x, np.ndarray) else np.full(rows, x) for x in found[:3])
    return Selection(sizes, low, high, found.width)


def asked(shape: tuple[int, ...], k: Any, lengths: Any, starts: Any, sink: Any, recent: Any) -> Asked:
    """Return what the rows of scores of this shape, [..., N], ask for, with every value checked."""
    n = shape[-1]
    sizes, width = _per_row("k", k, shape)
    start, _ = _per_row("starts", 0 if starts is None else starts, shape)
    end, _ = _per_row("lengths", n if lengths is None else lengths, shape)
    sink, recent = natural("sink", sink, n), natural("recent", recent, n)
    if isinstance(start, int) and isinstance(end, int):  # numpy takes ten times as long for one number
        return Asked(sizes, *_eligible(start, end, sink, recent, n), width)
    start, end = np.broadcast_arrays(start, end)
    if start.size:
        at = int(np.argmax(start > end))
        _ordered(start.flat[at], end.flat[at], at)
    low = np.minimum(start + sink, n)
    return Asked(sizes, low, np.maximum(end - recent, low), width)  # nothing is left where the two meet


def bounds(n: int, k: Any, lengths: Any, starts: Any, sink: Any, recent: Any) -> tuple[int, int, int]:
    """Return k, and the first and the end of the eligible ones of n positions, for rows that ask for the same."""
    size = position("k", k, n)
    start = position("starts", 0 if starts is None else starts, n)
    end = position("lengths", n if lengths is None else lengths, n)
    return size, *_eligible(start, end, natural("sink", sink, n), natural("recent", recent, n), n)


def _eligible(start: int, end: int, sink: int, recent: int, n: int) -> tuple[int, int]:
    _ordered(start, end, 0)
    low = min(start + sink, n)
    return low, max(end - recent, low)


_LONGEST_SHORTLIST = 1 << 10


def order(name: Any) -> bool:
    """Whether results come best first."""
    if not isinstance(name, str) or name not in ("best", "index"):  # an array is not equal to one word
        raise ValueError(
            f'order must be "best" (highest score first) or "index" (ascending), got {shown(name)}; choose one'
        )
    return name == "best"


def shortlist(times: Any) -> int:
    """Return how many times k a shortlist is to hold; 0: there is none."""
    if times is None:
        return 0
    if isinstance(times, bool) or not isinstance(times, int | np.integer) or not 1 <= times <= _LONGEST_SHORTLIST:
        raise ValueError(
            f"shortlist must be None or an integer from 1 to {_LONGEST_SHORTLIST:,}, got {shown(times)}; 6 is usual"
        )
    return int(times)


def pages(blocks: Any, times: int) -> None:
    """Require a table of blocks, and no shortlist beside it."""
    if not is_array(blocks):
        raise TypeError(f"blocks must be an array of page numbers, got {type(blocks).__name__}; make one")
    if times:
        raise ValueError(f"keys in pages are searched without a shortlist, got shortlist={times}; leave it out")


def score_bits(weights: tuple[int, ...], words: int) -> None:
    """Require scores that fit the 16 bits a search keeps of them."""
    if sum(weights) * 32 * words >= 1 << 16:
        raise ValueError(
            f"the scores of a search must stay below {1 << 16}, got sum(weights) * 32 * W = "
            f"{sum(weights) * 32 * words}; use smaller weights or fewer bits"
        )


def pair(out: Any) -> tuple[Any, Any]:
    """Return the two arrays that take a selection, or None twice."""
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(f"out must be a pair, one array for scores and one for indices, got {type(out).__name__}")
    return out[0], out[1]


def outputs(values: Any, indices: Any, shape: tuple[int, ...], dtype: Any, n: int, inputs: Sequence[Any]) -> None:
    """Require a pair of arrays that can take a selection from n positions."""
    output("out[0]", values, shape, [dtype], inputs)
    output("out[1]", indices, shape, [np.int64, np.int32], [*inputs, values])
    index_fits("out[1]", indices, n)


def index_fits(name: str, indices: Described, n: int) -> None:
    """Require integers that hold every position below n."""
    if indices.dtype == np.int32 and n > 1 << 31:
        raise TypeError(f"{name} must be int64 for positions beyond int32, got int32 for {n} of them; pass int64")


def output(name: str, out: Any, shape: tuple[int, ...], dtypes: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Require an array that can take a result: its shape and dtype, writeable, each element in a place of its own."""
    if not is_array(out):
        raise TypeError(f"{name} must be an array of the inputs' kind, got {type(out).__name__}; make one to reuse")
    if out.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        wanted = " or ".join(str(np.dtype(dtype)) for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {out.dtype}; results are never converted")
    if out.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(out.shape)}; slice or reshape it")
    if not out.flags.writeable:
        raise ValueError(f"{name} must be writeable, got a read-only array; pass another")
    if 0 not in shape and _overlaps_itself(out):
        raise ValueError(
            f"{name} must have memory of its own for every element, got strides {list(out.strides)}; "
            "pass an array that is not broadcast"
        )
    for x in inputs:
        # numpy's stubs know only two bounds of work by name
        if isinstance(x, np.ndarray) and np.may_share_memory(out, x, max_work=10_000):  # pyright: ignore[reportArgumentType]
            raise shared_memory(name)


def shared_memory(name: str) -> ValueError:
    """Say that an output lies where an input does."""
    return ValueError(f"{name} must not share memory with another argument, got one that does; pass another")


def _overlaps_itself(x: NDArray[Any]) -> bool:
    """Whether a dimension, from the finest stride up, steps by less than the finer ones span."""
    span = x.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(x.strides, x.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += stride * (size - 1)
    return False


FEW = 64  # of so many numbers Python finds the extremes sooner than numpy


def _per_row(name: str, value: Any, shape: tuple[int, ...]) -> tuple[int | NDArray[np.int64], int]:
    """Return an integer in 0..N, or one for each row of [..., N], flat; and the largest of them, 0 for no rows."""
    n, rows = shape[-1], shape[:-1]
    if not is_array(value):
        return (checked := position(name, value, n)), checked
    if value.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an integer or an array of integers, got {value.dtype}; convert it")
    if value.shape != rows:
        try:
            value = np.broadcast_to(value, rows)
        except ValueError:
            raise not_per_row(name, rows, value.shape) from None
    if value.size == 0:
        return np.empty(0, np.int64), 0
    numbers = value.ravel()
    low, high = (f(numbers.tolist()) for f in (min, max)) if value.size <= FEW else (value.min(), value.max())
    position(name, int(low), n)
    return numbers.astype(np.int64), position(name, int(high), n)


def _ordered(start: int, end: int, row: int) -> None:
    if start > end:
        raise ValueError(
            f"starts must not exceed lengths, got start {start} and length {end} in row {row}; "
            "a row sees [start, length)"
        )


def not_per_row(name: str, rows: Sequence[int], shape: Sequence[int]) -> ValueError:
    """Say that an array does not broadcast to the rows."""
    return ValueError(
        f"{name} must be an integer or broadcast to one per row, shape {list(rows)}, got {list(shape)}; "
        "insert dimensions of size 1"
    )


REMEDIES = {
    "k": "clamp it",
    "starts": "a row begins where its keys do",
    "lengths": "a row cannot see more than there is",
}


def position(name: str, value: Any, n: int) -> int:
    """Return k, a start or a length as an int in 0..N."""
    checked = _integer(name, value)
    if not 0 <= checked <= n:
        raise ValueError(f"{name} must be in 0..{n}, the number of scores in a row, got {checked}; {REMEDIES[name]}")
    return checked


def natural(name: str, value: Any, most: int) -> int:
    """Return a count >= 0, no larger than makes a difference."""
    count = _integer(name, value)
    if count < 0:
        raise ValueError(f"{name} must be 0 or more positions, got {count}; 0 leaves none out")
    return min(count, most)


def integers(name: str, values: Any) -> tuple[int, ...] | None:
    """Return several integers as ints, or None for None."""
    return None if values is None else tuple(x if type(x) is int else _integer(name, x) for x in values)


def are_plain_weights(weights: Any) -> bool:
    """Whether weights are None or a tuple of ints, which equals no tuple of another kind that is a mistake."""
    return weights is None or (type(weights) is tuple and all(type(weight) is int for weight in weights))


RowIntegers = tuple[int, int | None, int | None, int, int]


def row_integers(k: Any, lengths: Any, starts: Any, sink: Any, recent: Any) -> RowIntegers:
    """Return what the rows of a selection ask for as ints; lengths and starts may be None."""
    named = (("k", k), ("lengths", lengths), ("starts", starts), ("sink", sink), ("recent", recent))
    checked = tuple(
        x if type(x) is int or (x is None and name in ("lengths", "starts")) else _integer(name, x) for name, x in named
    )
    return cast(RowIntegers, checked)


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}; convert it with int()") from None


def shown(value: Any) -> str:
    """Return what any value is in one short line."""
    return " ".join(reprlib.repr(value).split())
