"""The functions for arrays in the host's memory: numpy arrays, and torch tensors that numpy can view.

Every function accepts any strides, does not modify its arguments, and returns the same kind. Results are new arrays, or
are written to `out`, which must have the result's shape and dtype and is then returned. All arguments are checked
before anything is written.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, bits, quantiser, validation

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[Any], "torch.Tensor")


@functools.cache
def backend():
    """Import the numba implementation on first use: it takes half a second, which other functions do not need.

    Cached, because even a repeated import takes 3 us with cold CPU caches.
    """
    from hashcore import cpu

    return cpu


def pack(x: Array, *, out: Array | None = None) -> Array:
    """Pack the signs of vectors into 32-bit words.

    Args:
        x: real numbers or booleans, shape [..., D], D a positive multiple of 32.
        out: int32 [..., D / 32] to write to.
    Returns: int32 [..., D / 32]; bit j of word w is [x_{32 w + j} > 0], so -0.0 and NaN are 0.
    Raises: ValueError if D is not a positive multiple of 32, or out does not fit.
    Source: docs/algorithm.md, eq. 1.
    """
    infinity = None if (integers := arguments.bfloat16_bits(x)) is None else bits.BFLOAT16_INFINITY
    (array, target), restore = arguments.host_arrays({"out": out}, x=x if integers is None else integers)
    validation.real("x", array, "[..., D]")
    validation.bits("x", array)
    if out is None:
        return restore(bits.pack(array, infinity))
    validation.output("out", target, (*array.shape[:-1], array.shape[-1] // 32), [np.int32], [array])
    target[...] = bits.pack(array, infinity)
    return out


def unpack(codes: Array) -> Array:
    """Unpack words into booleans, the inverse of pack.

    Args:
        codes: int32 words, shape [..., W].
    Returns: bool [..., 32 W].
    Source: docs/algorithm.md, eq. 1.
    """
    (array,), restore = arguments.host_arrays(codes=codes)
    validation.codes("codes", array, "[..., W]")
    return restore(bits.unpack(array))


def quantise(w: Array, planes: int = 3, *, check: bool = True) -> tuple[Array, Array]:
    """Quantise rows of real query weights to odd integer levels.

    Args:
        w: one real weight per bit, shape [..., D]; computed in float32.
        planes: P in 1..8; levels are the odd integers from -(2^P - 1) to 2^P - 1.
        check: raise ValueError for weights that are not finite; see `planes`.
    Returns: levels int8 [..., D] (int16 for P = 8) and scale float32 [..., 1], with level * scale close to w. A row of
        zeros has every level +1 and a tiny positive scale.
    Raises: ValueError if w is checked and not finite, D is 0, or P is out of range.
    Source: docs/algorithm.md, eq. 5.
    """
    (array,), restore = arguments.host_arrays(w=w)
    validation.real("w", array, "[..., D]")
    validation.not_empty("w", array.shape)
    levels, scale = quantiser.quantise(array, validation.plane_count(planes), check)
    return restore(levels), restore(scale)


def planes(w: Array, planes: int = 3, *, check: bool = True) -> tuple[Array, tuple[int, ...]]:
    """Quantise rows of real query weights to weighted bit planes.

    Args:
        w: one real weight per bit, shape [..., 32 W]; computed in float32.
        planes: P in 1..8.
        check: raise ValueError for weights that are not finite. Without it, NaN has level -1 and infinities count as
            the largest float32 of their sign.
    Returns: int32 [..., P, W] and the weights (1, 2, ..., 2^(P-1)); plane p holds binary digit p of (level + m) / 2.
        Scored against a key (eq. 4) they give (level . sigma(key) + 32 W m) / 2, m = 2^P - 1, exactly.
    Raises: ValueError if w is checked and not finite, its last dimension does not fill words, or P is out of range.
    Source: docs/algorithm.md, eq. 5.
    """
    (array,), restore = arguments.host_arrays(w=w)
    validation.real("w", array, "[..., D]")
    validation.bits("w", array)
    count = validation.plane_count(planes)
    levels, _ = quantiser.quantise(array, count, check)
    return restore(quantiser.level_planes(levels, count)), tuple(1 << p for p in range(count))


def group_planes(codes: Array) -> tuple[Array, tuple[int, ...]]:
    """Merge the one-bit queries of a group into weighted bit planes that score as their sum.

    Args:
        codes: int32 words, shape [..., G, W], G >= 1.
    Returns: int32 [..., P, W], P = ceil(log2(G + 1)), and the weights (1, 2, ..., 2^(P-2), G - (2^(P-1) - 1)).
    Raises: ValueError if the group is empty.
    Source: docs/algorithm.md, eq. 3.
    """
    (array,), restore = arguments.host_arrays(codes=codes)
    validation.codes("codes", array, "[..., G, W]")
    validation.group(array.shape)
    merged, weights = quantiser.group_planes(array)
    return restore(merged), weights


def score(query: Array, keys: Array, weights: Sequence[int] | None = None, *, out: Array | None = None) -> Array:
    """Count matching bits between query codes, or weighted query planes, and every key code.

    Leading dimensions broadcast as in numpy. Keys are read in place with any strides, except that words must be
    contiguous: neither broadcast keys nor parts of a larger buffer are copied. On CUDA they are copied only if codes
    are not aligned to the largest power of two that divides W, up to four words.

    Args:
        query: int32 words, shape [..., Q, W]; with weights the planes of one query, shape [..., P, W].
        keys: int32 words, shape [..., N, W].
        weights: positive integer weight of each plane, length P.
        out: int32, of the result's shape, to write to.
    Returns: int32 [..., Q, N], or [..., N] with weights; higher is closer, in [0, sum(weights) * 32 * W].
    Raises: ValueError if words, weights or leading dimensions do not fit each other, or out does not fit the result.
    Source: docs/algorithm.md, eq. 2; with weights eq. 4.
    """
    (q, c, target), restore = arguments.host_arrays({"out": out}, query=query, keys=keys)

    cpu = backend()
    q, c = arguments.aligned(q), arguments.readable(c)
    plan = cpu.plan_score(
        arguments.layout_of(q), arguments.layout_of(c), arguments.integers("weights", weights), cpu.threads.most()
    )
    if out is None:
        return restore(cpu.run_score(plan, *arguments.addresses(q, c)))
    validation.output("out", target, plan.shape, [np.int32], [q, c])
    cpu.run_score(plan, *arguments.addresses(q, c), target)
    return out


def topk(
    scores: Array,
    k: int | Array,
    *,
    lengths: int | Array | None = None,
    starts: int | Array | None = None,
    sink: int = 0,
    recent: int = 0,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Select the k highest scores of each row; ties go to the lowest index.

    Args:
        scores: integers, shape [..., N].
        k: how many to select, 0 <= k <= N; or one integer per row.
        lengths, starts: a row sees positions [start, length), 0 <= start <= length <= N; by default all.
        sink, recent: numbers of first and last of these positions that are not eligible, because the caller always
            reads them.
        out: values in the dtype of scores and indices int64 or int32, both [..., K], to write to.
    k, lengths and starts are integers, or arrays of integers that broadcast to the shape of the rows, [...].
    Returns: scores [..., K] in the input's dtype and indices int64 [..., K], in ascending index order. K is k, or the
        largest k. Unused slots, at the end of rows that select fewer, have score 0 and index -1.
    Raises: ValueError if k, a length or a start is out of range, or out does not fit.
    Source: docs/algorithm.md, eq. 6 and 13.
    """
    values, indices = arguments.pair(out)
    optional = {"k": k, "lengths": lengths, "starts": starts, "out[0]": values, "out[1]": indices}
    (array, k, lengths, starts, values, indices), restore = arguments.host_arrays(optional, scores=scores)
    validation.integer_scores(array)
    wanted = validation.selection(array.shape, k, lengths, starts, sink, recent)
    if out is not None:
        native = array.dtype.newbyteorder("=")
        shape = *array.shape[:-1], wanted.width
        validation.outputs(values, indices, shape, native, array.shape[-1], [array, k, lengths, starts])

    found = backend().topk(array, *wanted)
    if out is None:
        return restore(found[0]), restore(found[1])
    values[...], indices[...] = found
    return out


def plain_search(
    query: Any, keys: Any, weights: Any, rows: tuple[Any, ...], best: bool, shortlist: int
) -> tuple[Any, Any] | None:
    """Search numpy arrays whose layout the kernels support; None for other layouts.

    With cold CPU caches, each Python operation takes microseconds, as long as scoring a thousand keys. So this function
    does as little as possible.
    """
    cpu = backend()
    layouts = (query.dtype, query.shape, query.strides), (keys.dtype, keys.shape, keys.strides)
    plan = cpu.plan_search(*layouts, weights, rows, best, cpu.threads.most(), shortlist)
    if not (plan.readable and query.flags.aligned and keys.flags.aligned):
        return None
    return cpu.run_search(plan, arguments.address(query), arguments.address(keys))


def search(
    query: Array,
    keys: Array,
    k: int | Array,
    weights: Sequence[int] | None,
    *,
    lengths: int | Array | None,
    starts: int | Array | None,
    sink: int,
    recent: int,
    order: str,
    shortlist: int | None,
    blocks: Array | None,
    out: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
    """Search arrays in any layout, rows that differ, and pages: see `hashcore.search`."""
    values, indices = arguments.pair(out)
    optional = {"k": k, "lengths": lengths, "starts": starts, "blocks": blocks, "out[0]": values, "out[1]": indices}
    given, restore = arguments.host_arrays(optional, query=query, keys=keys)
    q, c, k, lengths, starts, table, values, indices = given
    rows = k, lengths, starts
    best, weights = arguments.order(order), arguments.integers("weights", weights)
    times = arguments.shortlist(shortlist)

    cpu = backend()
    q = arguments.aligned(q)
    if table is None:
        c = arguments.readable(c)
        against = arguments.layout_of(c)
    else:
        validation.pages(table, times)
        against = cpu.pages.laid(c, table)
    layouts, most = (arguments.layout_of(q), against), cpu.threads.most()
    if any(arguments.is_array(x) for x in rows):
        compared = cpu.comparison(*layouts, weights)
        validation.score_bits(compared.weights, q.shape[-1])
        wanted = validation.row_bounds((*compared.lead, against.shape[-2]), *rows, sink, recent)
        plan = cpu.launch_plan.filled(cpu.plan_ragged_search(compared, wanted.width, best, most, times), wanted)
    else:
        same = arguments.row_integers(*rows, sink, recent)
        plan = cpu.plan_search(*layouts, weights, same, best, most, times)
    if table is not None:
        plan = cpu.pages.paged(plan, c, table)
    if out is None:
        scores, found = cpu.run_search(plan, *arguments.addresses(q, c))
        return restore(scores), restore(found)
    validation.outputs(values, indices, plan.shape, np.int32, against.shape[-2], [q, c, table, *rows])
    cpu.run_search(plan, *arguments.addresses(q, c), (values, indices))
    return out
