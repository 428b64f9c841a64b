"""Checks of the public functions' arguments. Messages say what was expected, what was passed, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hashcore.arguments import Described, Layout, Restore, host_arrays, integer, is_array, shown

CODES = np.dtype(np.int32), np.dtype(np.uint8), np.dtype(np.int8)
"""Dtypes of the codes of an index: words, and two forms of packed bits."""


def real(name: str, x: Described, dims: str) -> None:
    """Raise an error unless x has a real dtype and at least one dimension."""
    if x.dtype.kind not in "biuf":
        raise TypeError(f"{name} must hold real numbers, got {x.dtype}; convert it first")
    if x.ndim == 0:
        raise ValueError(f"{name} must have shape {dims}, got a scalar; add a dimension")


def bits(name: str, x: Described) -> None:
    """Raise ValueError unless the last dimension fills whole words."""
    if x.shape[-1] == 0 or x.shape[-1] % 32:
        raise ValueError(
            f"the last dimension of {name} must be a positive multiple of 32 (bits per word), got {x.shape[-1]}; "
            "pad it or choose another code length"
        )


def codes(name: str, x: Described, dims: str) -> None:
    """Raise an error unless x has int32 words of the shape dims, such as '[..., N, W]'."""
    if x.dtype != np.int32:
        remedy = "read packed bytes with .view('int32')" if x.dtype.name in ("int8", "uint8") else "use hashcore.pack"
        raise TypeError(f"{name} must be int32 words, got {x.dtype}; {remedy}")
    required = dims.count(",")
    if x.ndim < required:
        raise ValueError(f"{name} must have shape {dims}, got {list(x.shape)}; add the missing dimensions")
    if x.shape[-1] == 0:
        raise ValueError(f"{name} must have at least one word per code, got shape {list(x.shape)}")


def position(name: str, value: Any, n: int) -> int:
    """Return k, a start or a length as an int in 0..N."""
    checked = integer(name, value)
    if not 0 <= checked <= n:
        raise ValueError(f"{name} must be in 0..{n}, the number of scores in a row, got {checked}; clamp it")
    return checked


def natural(name: str, value: Any, most: int) -> int:
    """Return a count of 0 or more, clamped to `most`."""
    count = integer(name, value)
    if count < 0:
        raise ValueError(f"{name} must be 0 or more positions, got {count}; 0 excludes none")
    return min(count, most)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Planes [..., P, W] and keys [..., N, W] that have been checked; by identity, so that it is quick to look up.

    Attributes:
        weights: of the planes.
        lead: the leading dimensions that both broadcast to, the shape of the rows.
    """

    query: Layout
    keys: Layout
    weights: tuple[int, ...]
    lead: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the scores, [*lead, N]."""
        return *self.lead, self.keys.shape[-2]


def comparison(query: Layout, keys: Layout, weights: tuple[int, ...] | None) -> Comparison:
    """Check queries [..., Q, W], or with weights planes [..., P, W], and keys [..., N, W]."""
    codes("query", query, "[..., Q, W]" if weights is None else "[..., P, W]")
    codes("keys", keys, "[..., N, W]")
    if query.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"query and keys must have the same number of words, got {query.shape[-1]} and {keys.shape[-1]}; "
            "hash both to the same number of bits"
        )
    lead = _broadcast(query.shape[:-2], keys.shape[:-2])
    if weights is None:  # each of the Q queries is one plane of weight 1
        lead = (*lead, query.shape[-2])
        query, keys, weights = query.with_axis(-1), keys.with_axis(-2), (1,)
    _plane_weights(weights, query.shape[-2], query.shape[-1])
    return Comparison(query, keys, weights, lead)


def _plane_weights(weights: tuple[int, ...], planes: int, words: int) -> None:
    """Raise ValueError unless there is one weight per plane, all are positive, and scores fit int32."""
    if len(weights) != planes:
        raise ValueError(
            f"expected one weight per plane, got {len(weights)} weights for {planes} planes; "
            "query is [..., P, W] when weights are given"
        )
    if min(weights, default=1) < 1:
        raise ValueError(f"weights must be positive, got {weights}; remove planes of weight 0")
    if sum(weights) * 32 * words >= 2**31:
        raise ValueError(
            f"the largest score must fit int32, got sum(weights) * 32 * W = {sum(weights) * 32 * words}; "
            "use smaller weights or fewer words"
        )


def _broadcast(query: tuple[int, ...], keys: tuple[int, ...]) -> tuple[int, ...]:
    """Return the broadcast shape of two leading shapes, whose sizes may be symbols of a traced program."""
    short, long = sorted((query, keys), key=len)
    short = (*(1,) * (len(long) - len(short)), *short)
    if any(a != b and a != 1 and b != 1 for a, b in zip(short, long, strict=True)):
        raise ValueError(
            f"the leading dimensions of query and keys must broadcast, got {list(query)} and {list(keys)}; "
            "insert dimensions of size 1"
        )
    return tuple(b if a == 1 else a for a, b in zip(short, long, strict=True))


class RowLimits(NamedTuple):
    """What the rows of a selection want and see, as the operators take it.

    k, lengths, starts: integers per row, or None where width, length and start hold for all; width is the largest k.
    """

    width: int
    k: Any
    lengths: Any
    starts: Any
    length: int
    start: int
    sink: int
    recent: int


def rows(runner: Any, shape: tuple[int, ...], given: tuple[Any, ...]) -> RowLimits:
    """Check k, lengths, starts, sink and recent of a selection from scores [..., N].

    runner: what runs the selection (ops.Host).
    """
    *lead, n = shape
    numbers, arrays = [0, n, 0], [None, None, None]
    for at, (name, x) in enumerate(zip(("k", "lengths", "starts"), given, strict=False)):
        if type(x) is not int and is_array(x):
            seen = runner.layout(name, x)
            if seen.dtype.kind not in "iu":
                raise TypeError(f"{name} must be an integer or an array of integers, got {seen.dtype}; convert it")
            if not broadcasts(x.shape, lead):
                raise ValueError(
                    f"{name} must be an integer or broadcast to one integer per row, shape {lead}, got "
                    f"{list(x.shape)}; insert dimensions of size 1"
                )
            arrays[at] = runner.integers(name, x, lead, n)
        elif at == 0 or x is not None:
            numbers[at] = position(name, x, n)
    (k, lengths, starts), (count, length, start) = arrays, numbers
    if lengths is None:
        ordered(start, length, 0)
    if k is not None:
        count = position("k", runner.largest(k, lead), n)
    return RowLimits(
        count, k, lengths, starts, length, start, natural("sink", given[3], n), natural("recent", given[4], n)
    )


def ordered(start: int, end: int, row: int) -> None:
    """Raise ValueError if a row's start is behind its end."""
    if start > end:
        raise ValueError(
            f"starts must not exceed lengths, got start {start} and length {end} in row {row}; "
            "a row sees [start, length)"
        )


def broadcasts(shape: Sequence[int], lead: Sequence[int]) -> bool:
    """Whether an array of a shape broadcasts to the rows; sizes may be symbols of a traced program."""
    aligned = zip(reversed(shape), reversed(lead), strict=False)
    return len(shape) <= len(lead) and all(size in (1, row) for size, row in aligned)


def paged(pool: Layout, blocks: Any) -> Layout:
    """Return the layout [..., N, W] of a row's keys in a pool [..., M, S, W] of pages, N = T S for blocks [..., T].

    Position j of a row is key j % S of page blocks[j // S].

    Raises: ValueError or TypeError unless blocks are page tables, and the pool holds codes.
    """
    if not is_array(blocks):
        raise TypeError(f"blocks must be an array of page numbers, got {type(blocks).__name__}; convert them")
    kind = str(blocks.dtype).removeprefix("torch.")
    if kind not in ("int32", "int64"):
        raise TypeError(f"blocks must be int32 or int64 page numbers, got {kind}; convert them")
    if blocks.ndim == 0:
        raise ValueError("blocks must have shape [..., T], got a scalar; add a dimension")
    codes("keys", pool, "[..., M, S, W]")
    *lead, _, size, words = pool.shape
    *steps, _, step, word = pool.strides
    return Layout(pool.dtype, (*lead, blocks.shape[-1] * size, words), (*steps, step, word))


def searched(compared: Comparison, blocks: Any) -> None:
    """Raise ValueError unless scores fit 16 bits, as in a search, and blocks, if any, are a table per row."""
    if blocks is not None and not broadcasts(blocks.shape[:-1], compared.lead):
        raise ValueError(
            f"blocks must broadcast to one table per row, shape {[*compared.lead, 'T']}, got {list(blocks.shape)}; "
            "insert dimensions of size 1"
        )
    require_short_scores(compared.query.shape[-1], compared.weights)


def are_short(words: int, weights: Sequence[int]) -> bool:
    """Whether scores of codes of this many words fit 16 bits."""
    return 32 * words * sum(weights) < 1 << 16


def require_short_scores(words: int, weights: Sequence[int]) -> None:
    """Raise ValueError unless scores fit 16 bits, as those of a search do."""
    if not are_short(words, weights):
        raise ValueError(
            f"the scores of a search must stay below {1 << 16}, got sum(weights) * 32 * W = "
            f"{32 * words * sum(weights)}; use fewer planes, smaller weights or fewer bits"
        )


# ---- Options, and arguments of an index ----------------------------------------------------------------------------


def vectors_or_codes(**given: Any) -> tuple[NDArray[Any], bool, Restore]:
    """Return an array, whether it has codes and not vectors (floats), and what restores its kind."""
    (x,), restore = host_arrays(**given)
    coded = x.dtype in CODES
    if not coded and x.dtype.kind != "f":
        raise TypeError(
            f"expected vectors of floats or codes of int32 words, uint8 or int8, got {x.dtype}; "
            "convert vectors with .astype('float32'), create codes with hashcore.pack"
        )
    return x, coded, restore


def within(name: str, value: Any, low: int, high: int, remedy: str) -> int:
    """Return an integer in low..high as an int."""
    number = integer(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in {low}..{high}, got {number}; {remedy}")
    return number


def choice(name: str, value: Any, allowed: Any) -> Any:
    """Return one of the allowed names."""
    if not isinstance(value, str | None) or value not in allowed:  # comparing an array would give an array
        wanted = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {wanted}, got {shown(value)}; choose one of them")
    return value


def shape(name: str, x: NDArray[Any], size: int, rows: bool = False) -> None:
    """Raise ValueError unless the shape is [n, size] (rows) or [..., size]."""
    if (x.ndim != 2 if rows else x.ndim < 1) or x.shape[-1] != size:
        dims = f"[n, {size}]" if rows else f"[..., {size}]"
        raise ValueError(f"{name} must have shape {dims} for this index, got {list(x.shape)}; reshape or rebuild it")
