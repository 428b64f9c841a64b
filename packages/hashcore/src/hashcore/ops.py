"""The public functions, for numpy arrays and torch tensors, on the CPU or CUDA.

Arrays accept any strides and are not modified. Results are new arrays of the arguments' kind. All arguments are checked
first. Tensors that numpy cannot view go to `hashcore.torch_ops`.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, quantiser, validation
from hashcore.arguments import Layout
from hashcore.validation import Comparison

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[Any], "torch.Tensor")
ORDERS = "best", "index"
_comparison = functools.lru_cache(256)(validation.comparison)


@functools.cache
def backend() -> Any:
    """Import the numba implementation on first use: it takes half a second, which other functions do not need.

    Cached, because even a repeated import takes 3 us with cold CPU caches.
    """
    from hashcore import cpu

    return cpu


class Host(NamedTuple):
    """Checks and runs operations on arrays, or tensors that numpy can view; `torch_ops` does on other tensors."""

    restore: arguments.Restore

    def layout(self, name: str, x: Any) -> Layout:
        """Return what the checks look at."""
        return Layout(x.dtype, x.shape, x.strides)

    def compared(self, query: Any, keys: Any, weights: Any, blocks: Any = None) -> tuple[Any, Any, Comparison]:
        """Return codes that the kernels can read, copied only if necessary, and what is known of them."""
        query, keys = arguments.aligned(query), keys if blocks is not None else arguments.readable(keys)
        layout = self.layout("keys", keys)
        if blocks is not None:
            layout = validation.paged(layout, blocks)
            if not (keys.flags.aligned and (keys.strides[-1] == 4 or keys.shape[-1] == 1)):
                raise ValueError(
                    f"the words of a key in pages must be contiguous and aligned, got strides {list(keys.strides)}; "
                    "copy the pages to such a layout"
                )
        return query, keys, _comparison(self.layout("query", query), layout, weights)

    def integers(self, name: str, x: Any, lead: Sequence[int], n: int) -> NDArray[np.int64]:
        """Return integers in 0..N per row, flat."""
        numbers = np.broadcast_to(x, lead).ravel()
        if numbers.size:
            validation.position(name, int(numbers.min()), n)
            validation.position(name, int(numbers.max()), n)
        return numbers.astype(np.int64)

    def largest(self, k: Any, lead: Sequence[int]) -> int:
        """Return the largest of the numbers per row."""
        return int(k.max(initial=0))

    def run(self, name: str, *inputs: Any, compared: Comparison | None = None) -> Any:
        """Return the result of an operation for the operator's inputs, or several."""
        if name in ("score", "topk", "search"):
            found: Any = getattr(backend(), name)(*inputs, compared=compared)
        else:
            found = getattr(quantiser, name)(*inputs)
        return tuple(map(self.restore, found)) if name in ("quantise", "topk", "search") else self.restore(found)


def _given(optional: dict[str, Any] | None = None, /, **arrays: Any) -> tuple[list[Any], Any]:
    """Return all arguments as what runs the operation takes, and what runs it; optional ones may be no arrays."""
    named = arrays | (optional or {})
    kinds = set(map(type, arrays.values()))
    if kinds == {np.ndarray} and arguments.PLAIN.issuperset(map(type, named.values())):
        return list(named.values()), Host(np.asarray)  # the usual case takes a quarter of the time
    if not arguments.for_torch(named.values()):
        found, restore = arguments.host_arrays(optional, **arrays)
        return found, Host(restore)

    from hashcore import torch_ops  # imported late, because it defines torch operators

    torch_ops.check_devices(named)
    return list(named.values()), torch_ops


def _planes(planes: Any) -> int:
    return validation.within("planes", planes, 1, 8, "3 is almost as good as real-valued queries")


def pack(x: Array) -> Array:
    """Pack the signs of vectors into 32-bit words.

    Args:
        x: real numbers or booleans, shape [..., D], D a positive multiple of 32.
    Returns: int32 [..., D / 32]; bit j of word w is [x_{32 w + j} > 0], so -0.0 and NaN are 0.
    Raises: ValueError if D is not a positive multiple of 32.
    Source: docs/algorithm.md, eq. 1.
    """
    (x,), runner = _given(x=x)
    seen = runner.layout("x", x)
    validation.real("x", seen, "[..., D]")
    validation.bits("x", seen)
    return runner.run("pack", x)


def unpack(codes: Array) -> Array:
    """Unpack words into booleans, the inverse of pack.

    Args:
        codes: int32 words, shape [..., W].
    Returns: bool [..., 32 W].
    Source: docs/algorithm.md, eq. 1.
    """
    (codes,), runner = _given(codes=codes)
    validation.codes("codes", runner.layout("codes", codes), "[..., W]")
    return runner.run("unpack", codes)


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
    (w,), runner = _given(w=w)
    validation.real("w", runner.layout("w", w), "[..., D]")
    if w.shape[-1] == 0:
        raise ValueError("the last dimension of w must not be empty, got 0; pass at least one weight per row")
    return runner.run("quantise", w, _planes(planes), check)


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
    (w,), runner = _given(w=w)
    seen = runner.layout("w", w)
    validation.real("w", seen, "[..., D]")
    validation.bits("w", seen)
    count = _planes(planes)
    return runner.run("planes", w, count, check), tuple(1 << p for p in range(count))


def group_planes(codes: Array) -> tuple[Array, tuple[int, ...]]:
    """Merge the one-bit queries of a group into weighted bit planes that score as their sum.

    Args:
        codes: int32 words, shape [..., G, W], G >= 1.
    Returns: int32 [..., P, W], P = ceil(log2(G + 1)), and the weights (1, 2, ..., 2^(P-2), G - (2^(P-1) - 1)).
    Raises: ValueError if the group is empty.
    Source: docs/algorithm.md, eq. 3.
    """
    (codes,), runner = _given(codes=codes)
    validation.codes("codes", runner.layout("codes", codes), "[..., G, W]")
    if codes.shape[-2] == 0:
        raise ValueError(f"a group must have at least one code, got shape {list(codes.shape)}")
    return runner.run("group_planes", codes), quantiser.group_weights(codes.shape[-2])


def score(query: Array, keys: Array, weights: Sequence[int] | None = None) -> Array:
    """Count matching bits between query codes, or weighted query planes, and every key code.

    Leading dimensions broadcast as in numpy. Keys are read in place with any strides, except that words must be
    contiguous: neither broadcast keys nor parts of a larger buffer are copied. On CUDA they are copied only if codes
    are not aligned to the largest power of two that divides W, up to four words.

    Args:
        query: int32 words, shape [..., Q, W]; with weights the planes of one query, shape [..., P, W].
        keys: int32 words, shape [..., N, W].
        weights: positive integer weight of each plane, length P.
    Returns: int32 [..., Q, N], or [..., N] with weights; higher is closer, in [0, sum(weights) * 32 * W].
    Raises: ValueError if words, weights or leading dimensions do not fit each other.
    Source: docs/algorithm.md, eq. 2; with weights eq. 4.
    """
    (query, keys), runner = _given(query=query, keys=keys)
    weights = arguments.integers("weights", weights)
    query, keys, compared = runner.compared(query, keys, weights)
    return runner.run("score", query, keys, weights, compared=compared)


def topk(
    scores: Array,
    k: int | Array,
    *,
    lengths: int | Array | None = None,
    starts: int | Array | None = None,
    sink: int = 0,
    recent: int = 0,
) -> tuple[Array, Array]:
    """Select the k highest scores of each row; ties go to the lowest index.

    Args:
        scores: integers, shape [..., N].
        k: how many to select, 0 <= k <= N; or one integer per row.
        lengths, starts: a row sees positions [start, length), 0 <= start <= length <= N; by default all.
        sink, recent: numbers of first and last of these positions that are not eligible, because the caller always
            reads them.
    k, lengths and starts are integers, or arrays of integers that broadcast to the shape of the rows, [...].
    Returns: scores [..., K] in the input's dtype and indices int64 [..., K], in ascending index order. K is k, or the
        largest k. Unused slots, at the end of rows that select fewer, have score 0 and index -1.
    Raises: ValueError if k, a length or a start is out of range.
    Source: docs/algorithm.md, eq. 6 and 13.
    """
    (scores, *rows), runner = _given({"k": k, "lengths": lengths, "starts": starts}, scores=scores)
    seen = runner.layout("scores", scores)
    if seen.dtype.kind not in "iu":
        raise TypeError(f"scores must be integers, got {seen.dtype}; hashcore.score returns int32")
    if seen.ndim == 0:
        raise ValueError("scores must have shape [..., N], got a scalar; add a dimension")
    return runner.run("topk", scores, *validation.rows(runner, seen.shape, (*rows, sink, recent)))


def search(
    query: Array,
    keys: Array,
    k: int | Array,
    weights: Sequence[int] | None = None,
    *,
    lengths: int | Array | None = None,
    starts: int | Array | None = None,
    sink: int = 0,
    recent: int = 0,
    order: str = "best",
    blocks: Array | None = None,
) -> tuple[Array, Array]:
    """Find the k keys that score highest against each query: topk of score in one pass, without storing the scores.

    Args:
        query: int32 words, shape [..., Q, W]; with weights the planes of one query, shape [..., P, W].
        keys: int32 words, shape [..., N, W]; read in place, as in score.
        k: how many to find, 0 <= k <= N; or one integer per row.
        weights: positive integer weight of each plane, length P.
        lengths, starts, sink, recent: which keys of a row are eligible, as in topk.
        order: "best", highest score first and equal scores by ascending index; or "index", by ascending index.
        blocks: the page table, int32 or int64 [..., T], which broadcasts like lengths. Then keys are pages
            [..., M, S, W] of S keys each, with contiguous words; position j of a row is key j % S of page
            blocks[j // S], and N = T S. Pages may be shared; entries for positions that a row does not see may be
            anything.
    Rows are [..., Q], or [...] with weights; k, lengths and starts are integers, or arrays of integers that broadcast
    to that shape.
    Returns: scores int32 and indices int64, [..., Q, K], or [..., K] with weights. K is k, or the largest k. Unused
        slots, at the end of rows that find fewer, have score 0 and index -1.
    Raises: ValueError if the arguments do not match, sum(weights) * 32 * W is 2^16 or more, or a row sees a page out of
        range. On CUDA, where the host sees no page numbers, those out of range
        count as the last page; pages there have a power of two of keys, in words aligned as a key's are.
    Source: docs/algorithm.md, eq. 2, 4, 6, 13 and 14.
    """
    optional = {"k": k, "lengths": lengths, "starts": starts, "blocks": blocks}
    (query, keys, *rows, blocks), runner = _given(optional, query=query, keys=keys)
    best, weights = validation.choice("order", order, ORDERS) == "best", arguments.integers("weights", weights)
    query, keys, compared = runner.compared(query, keys, weights, blocks)
    validation.searched(compared, blocks)
    wanted = validation.rows(runner, compared.shape, (*rows, sink, recent))
    return runner.run("search", query, keys, weights, best, blocks, *wanted, compared=compared)
