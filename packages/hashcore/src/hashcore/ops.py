"""The public functions: what they take and return, the checks, and the dispatch to the implementation.

Every function takes numpy arrays or CPU torch tensors, with any strides, never modifies them, and returns their kind.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hashcore import bits, quantiser, validation

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[Any], "torch.Tensor")


def pack(x: Array) -> Array:
    """Pack the signs of vectors into 32-bit words.

    Args:
        x: real numbers or booleans, shape [..., D], D a positive multiple of 32.
    Returns: int32 [..., D / 32]; bit j of word w is [x_{32 w + j} > 0], so -0.0 and NaN are 0.
    Raises: ValueError if D is not a positive multiple of 32.
    Source: docs/algorithm.md, eq. 1.
    """
    if validation.is_bfloat16(x):
        x = x > 0  # numpy has no bfloat16: torch takes the signs
    (array,), restore = validation.host_arrays(x=x)
    validation.real("x", array, "[..., D]")
    validation.bits("x", array)
    return restore(bits.pack(array))


def unpack(codes: Array) -> Array:
    """Unpack words into booleans, the inverse of pack.

    Args:
        codes: int32 words, shape [..., W].
    Returns: bool [..., 32 W].
    Source: docs/algorithm.md, eq. 1.
    """
    (array,), restore = validation.host_arrays(codes=codes)
    validation.codes("codes", array, "[..., W]")
    return restore(bits.unpack(array))


def quantise(w: Array, planes: int = 3) -> tuple[Array, Array]:
    """Quantise rows of real query weights to odd integer levels.

    Args:
        w: one real weight per bit, shape [..., D]; computed in float32.
        planes: P in 1..8; levels are the odd integers from -(2^P - 1) to 2^P - 1.
    Returns: levels int8 [..., D] (int16 for P = 8) and scale float32 [..., 1], with level * scale close to w. A row of
        zeros has every level +1 and a tiny positive scale.
    Raises: ValueError if w is not finite, D is 0, or P is out of range.
    Source: docs/algorithm.md, eq. 5.
    """
    (array,), restore = validation.host_arrays(w=w)
    validation.real("w", array, "[..., D]")
    if array.shape[-1] == 0:
        raise ValueError("the last dimension of w must not be empty, got 0; a row needs a largest weight")
    levels, scale = quantiser.quantise(array, validation.plane_count(planes))
    return restore(levels), restore(scale)


def planes(w: Array, planes: int = 3) -> tuple[Array, tuple[int, ...]]:
    """Quantise rows of real query weights to weighted bit planes.

    Args:
        w: one real weight per bit, shape [..., 32 W]; computed in float32.
        planes: P in 1..8.
    Returns: int32 [..., P, W] and the weights (1, 2, ..., 2^(P-1)); plane p holds binary digit p of (level + m) / 2.
        Scored against a key (eq. 4) they give (level . sigma(key) + 32 W m) / 2, m = 2^P - 1, exactly.
    Raises: ValueError if w is not finite, its last dimension does not fill words, or P is out of range.
    Source: docs/algorithm.md, eq. 5.
    """
    (array,), restore = validation.host_arrays(w=w)
    validation.real("w", array, "[..., D]")
    validation.bits("w", array)
    count = validation.plane_count(planes)
    levels, _ = quantiser.quantise(array, count)
    return restore(quantiser.level_planes(levels, count)), tuple(1 << p for p in range(count))


def group_planes(codes: Array) -> tuple[Array, tuple[int, ...]]:
    """Merge the one-bit queries of a group into weighted bit planes that score as their sum.

    Args:
        codes: int32 words, shape [..., G, W], G >= 1.
    Returns: int32 [..., P, W], P = ceil(log2(G + 1)), and the weights (1, 2, ..., 2^(P-2), G - (2^(P-1) - 1)).
    Raises: ValueError if the group is empty.
    Source: docs/algorithm.md, eq. 3.
    """
    (array,), restore = validation.host_arrays(codes=codes)
    validation.codes("codes", array, "[..., G, W]")
    if array.shape[-2] == 0:
        raise ValueError("a group must have at least one code, got shape " + str(list(array.shape)))
    merged, weights = quantiser.group_planes(array)
    return restore(merged), weights


def score(query: Array, keys: Array, weights: Sequence[int] | None = None) -> Array:
    """Count matching bits between query codes, or weighted query planes, and every key code.

    Leading dimensions broadcast as in numpy; keys that are broadcast or expanded are never copied per query.

    Args:
        query: int32 words, shape [..., Q, W]; with weights the planes of one query, shape [..., P, W].
        keys: int32 words, shape [..., N, W].
        weights: positive integer weight of each plane, length P.
    Returns: int32 [..., Q, N], or [..., N] with weights; higher is closer, in [0, sum(weights) * 32 * W].
    Raises: ValueError if words, weights or leading dimensions do not fit.
    Source: docs/algorithm.md, eq. 2; with weights eq. 4.
    """
    (q, k), restore = validation.host_arrays(query=query, keys=keys)
    validation.codes("query", q, "[..., Q, W]" if weights is None else "[..., P, W]")
    validation.codes("keys", k, "[..., N, W]")
    validation.same_words(q, k)
    lead = validation.broadcast(q.shape[:-2], k.shape[:-2])
    if weights is None:  # each of the Q queries is one plane of weight 1
        lead = (*lead, q.shape[-2])
        q, k, weights = q[..., None, :], k[..., None, :, :], (1,)
    checked = validation.plane_weights(weights, q.shape[-2], q.shape[-1])

    from hashcore import cpu  # numba takes half a second to import; the functions above do without it

    return restore(cpu.score(q, k, checked, lead))


def topk(scores: Array, k: int | Array) -> tuple[Array, Array]:
    """Select the k highest scores of each row; ties go to the lowest index.

    Args:
        scores: integers, shape [..., N]; within a row the largest and the smallest differ by less than 2^16.
        k: how many to select, 0 <= k <= N; or one integer per row, shape [...].
    Returns: scores [..., K] in the input's dtype and indices int64 [..., K], in ascending index order. K is k, or the
        largest k: a row that selects fewer ends in slots of score 0 and index -1.
    Raises: ValueError if k is out of range, or a row's scores lie too far apart.
    Source: docs/algorithm.md, eq. 6.
    """
    (array,), restore = validation.host_arrays(scores=scores)
    validation.integer_scores(array)
    if hasattr(k, "shape") and not isinstance(k, np.generic):
        (_, sizes), _ = validation.host_arrays(scores=scores, k=k)
        validation.selection_sizes(sizes, array.shape)
        width = int(sizes.max(initial=0))
    else:
        width = validation.selection_size(k, array.shape)
        sizes = np.full(array.shape[:-1], width, np.int64)

    from hashcore import cpu  # numba takes half a second to import

    values, indices = cpu.topk(array, sizes, width)
    return restore(values), restore(indices)
