"""The public functions, for numpy arrays and torch tensors, on the CPU or CUDA.

Arrays in the host's memory go to `hashcore.host`, which documents each function; other tensors go to
`hashcore.torch_ops`. All checks come before anything is written.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from hashcore import arguments, host

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", NDArray[Any], "torch.Tensor")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _any_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Dispatch calls with tensors that numpy cannot view to torch_ops."""

    @functools.wraps(function)
    def call(*given: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not arguments.for_torch((*given, *options.values())):
            return function(*given, **options)

        from hashcore import torch_ops  # imported late, because it defines torch operators

        return getattr(torch_ops, function.__name__)(*given, **options)

    call.__module__ = __name__
    return call


# A checker knows the names by their definitions; an assigned function has no declared type.
if TYPE_CHECKING:
    from hashcore.host import group_planes as group_planes
    from hashcore.host import pack as pack
    from hashcore.host import planes as planes
    from hashcore.host import quantise as quantise
    from hashcore.host import score as score
    from hashcore.host import search as _search
    from hashcore.host import topk as topk
    from hashcore.host import unpack as unpack
else:
    pack = _any_device(host.pack)
    unpack = _any_device(host.unpack)
    quantise = _any_device(host.quantise)
    planes = _any_device(host.planes)
    group_planes = _any_device(host.group_planes)
    score = _any_device(host.score)
    topk = _any_device(host.topk)
    _search = _any_device(host.search)


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
    shortlist: int | None = None,
    blocks: Array | None = None,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Find the k keys that score highest against each query: topk of score in one pass, without storing the scores.

    Args:
        query: int32 words, shape [..., Q, W]; with weights the planes of one query, shape [..., P, W].
        keys: int32 words, shape [..., N, W]; read in place, as in score.
        k: how many to find, 0 <= k <= N; or one integer per row.
        weights: positive integer weight of each plane, length P.
        lengths, starts, sink, recent: which keys of a row are eligible, as in topk.
        order: "best", highest score first and equal scores by ascending index; or "index", by ascending index.
        shortlist: score only about this many times k of the eligible keys by all words: the best by the first word of
            the codes and the last four planes. Faster, but approximate; suits codes whose first bits matter most.
            None: score all keys in full.
        blocks: the page table, int32 or int64 [..., T], which broadcasts like lengths. Then keys are pages
            [..., M, S, W] of S keys each, with contiguous words; position j of a row is key j % S of page
            blocks[j // S], and N = T S. Pages may be shared; entries for positions that a row does not see may be
            anything.
        out: scores int32 and indices int64 or int32, both of the results' shape, to write to.
    Rows are [..., Q], or [...] with weights; k, lengths and starts are integers, or arrays of integers that broadcast
    to that shape.
    Returns: scores int32 and indices int64, [..., Q, K], or [..., K] with weights. K is k, or the largest k. Unused
        slots, at the end of rows that find fewer, have score 0 and index -1.
    Raises: ValueError if the arguments do not match, sum(weights) * 32 * W is 2^16 or more, a row sees a page out of
        range, or blocks are given with a shortlist. On CUDA, where the host sees no page numbers, those out of range
        count as the last page; pages there have a power of two of keys, in words aligned as a key's are.
    Source: docs/algorithm.md, eq. 2, 4, 6, 13, 14 and 20.
    """
    plain = type(query) is type(keys) is np.ndarray and type(k) is type(sink) is type(recent) is int
    if plain and lengths is starts is out is blocks is None and arguments.are_plain_weights(weights):
        rows = k, None, None, sink, recent
        found = host.plain_search(query, keys, weights, rows, arguments.order(order), arguments.shortlist(shortlist))
        if found is not None:
            return found
    bounds = {"lengths": lengths, "starts": starts}
    how: dict[str, Any] = {"sink": sink, "recent": recent, "order": order, "shortlist": shortlist, "blocks": blocks}
    return _search(query, keys, k, weights, **bounds, **how, out=out)
