"""Search on torch tensors in device memory: prepares its launches, and keeps them for calls of the same form.

torch_ops has checked the arguments, as for `hashcore.cuda.tensors`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hashcore.cuda import kept, kernels, launch, layout
from hashcore.cuda.layout import SearchSpace
from hashcore.cuda.operands import Bounds, Operands, Tables, page_tables, set_selection, supported
from hashcore.cuda.tensors import Run, counts_bits, sm_count

_NUMBERS = int, type(None)


def search(
    query: torch.Tensor,
    keys: torch.Tensor,
    k: int | torch.Tensor,
    weights: Sequence[int] | None,
    bounds: Bounds,
    scores: torch.Tensor,
    indices: torch.Tensor,
    run: Run | None = None,
    blocks: torch.Tensor | None = None,
) -> None:
    """Score and select in two launches, in ascending index order (eq. 4, eq. 6).

    Rows share each key that is read if the last leading dimension is broadcast in the keys.

    Args:
        query: planes [..., P, W], or without weights codes [..., Q, W].
        keys: [..., N, W]; with blocks pages [..., M, S, W], S a power of two and M above 0.
        k: one count, or an integer tensor on the device that broadcasts to the rows.
        scores, indices: contiguous int32, and int32 or int64, [rows..., K]; unused slots get 0 and -1.
        blocks: page tables int32 or int64 [..., T], which broadcast to the rows; N = T S. Page numbers out of range
            count as M - 1.
    Raises: ValueError if words of keys in pages are not contiguous and aligned.
    Tensors k, lengths and starts need no extra launch if they are int32 or int64 and contiguous, and their shape is a
    prefix of the rows' shape followed by ones; for blocks: operands.page_tables.
    """
    if not scores.numel():
        return
    device = scores.device
    weights = None if weights is None else tuple(weights)
    at, keys_at = query.data_ptr(), keys.data_ptr()  # alignment, and so copies, depend on the addresses
    tables = None if blocks is None else page_tables(blocks, scores.shape[:-1])
    how = indices.dtype, device, at % 16, keys_at % 16, weights, counts_bits(device)
    more = () if tables is None else (tables.blocks.shape[-1], *tables[1:])
    form = query.shape, query.stride(), keys.shape, keys.stride(), scores.shape, how, *more
    given = query, keys, weights, scores, indices, tables
    prepared = _searches.found.get(form) or _renewed(form, *given)
    held = prepared.bound(bounds, k)
    prepared.place(kept.scratch(prepared.words, device).address)
    if not prepared.direct:
        found = _placed(query, keys, weights, scores.shape[:-1], tables is not None)
        held = held, found
        at, keys_at = found.at.query.data_ptr(), found.at.keys.data_ptr()
    table = None if tables is None else tables.blocks.data_ptr()
    prepared.point(at, keys_at, scores.data_ptr(), indices.data_ptr(), table)
    (launch.run if run is None else run)(prepared.call.launches, device)
    del held  # kept until the launches are in the stream; from here on the allocator may reuse them


class _Prepared:
    """The prepared launches of a search of given shapes; `direct`: operands of these strides are not copied."""

    def __init__(
        self, call: kernels.Search, plan: Callable[[int], SearchSpace], lead: Sequence[int], n: int, width: int,
        direct: bool,
    ):  # fmt: skip
        self.call, self.plan, self.space, self.direct = call, plan, plan(n), direct
        self.lead, self.n, self.width, self.words = lead, n, width, self.space.words
        self.at = 0
        self.rows: object = None
        """The bounds and the count that are set, if they are integers."""

    def resize(self, n: int, width: int) -> bool:
        """Adapt the launches to a new number of keys and width; False if their grids would have to change."""
        space = self.plan(n)
        if space[:2] != self.space[:2] or min(n, self.n) < 2:  # slots, splits; a single row has no stride
            return False
        self.space, self.n, self.width, self.words = space, n, width, space.words
        self.call.space.stride = space.stride
        self.at, self.rows = 0, None
        return True

    def place(self, address: int) -> None:
        """Set the address of the workspace, if it has changed."""
        if address != self.at:
            self.space.place(self.call.space, address)
            self.at = address

    def point(self, query: int, keys: int, scores: int, indices: int, table: int | None) -> None:
        """Set the addresses of the operands and results; table: of pages."""
        call = self.call
        call.query.value, call.keys.value, call.values.value, call.indices.value = query, keys, scores, indices
        call.pages.table = table

    def bound(self, bounds: Bounds, k: int | torch.Tensor) -> object:
        """Set the eligible positions and the counts; return the tensors whose addresses were set."""
        lengths, starts = bounds.lengths, bounds.starts
        # Check for integers, because isinstance(x, torch.Tensor) is slow.
        if isinstance(k, int) and isinstance(lengths, _NUMBERS) and isinstance(starts, _NUMBERS):
            if self.rows == (rows := (bounds, k)):
                return None
            self.rows = rows
        else:
            self.rows = None
        call = self.call
        return bounds.window(call.window, self.lead, self.n), set_selection(call.selection, k, self.lead, self.width)


_searches: kept.Table[_Prepared] = kept.Table()


def _renewed(form: tuple[Any, ...], *given: Any) -> _Prepared:
    """Return the search for a form: that with one key fewer, updated, or a new one; given: of `_prepare`."""
    query, keys, _, scores, _, tables = given
    if tables is not None:
        return _searches.keep(form, _prepare(*given))
    (*lead, n, words), (*rows, width) = keys.shape, scores.shape
    kind = query.shape, query.stride(), *lead, words, keys.stride(), *rows, *form[5:]
    return _searches.renew(form, kind, n, lambda found: found.resize(n, width), lambda: _prepare(*given))


def _prepare(
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: Sequence[int] | None,
    scores: torch.Tensor,
    indices: torch.Tensor,
    tables: Tables | None,
) -> _Prepared:
    """Prepare the launches of a search."""
    (n, words), lead, width = keys.shape[-2:], scores.shape[:-1], scores.shape[-1]
    pages = None if tables is None else _pages(keys, tables)
    n = n if tables is None else tables.blocks.shape[-1] * n
    layout.require_positions(n)
    at, direct = _placed(query, keys, weights, lead, tables is not None)
    rows = math.prod(lead)
    slots, group = _slots(at.map, rows, rows if tables is None else tables.per)
    sms, index_bits = sm_count(scores.device), 8 * indices.element_size()

    def plan(n: int) -> SearchSpace:
        return SearchSpace.plan(slots, group, n, sms)

    tensor = counts_bits(scores.device)
    call = kernels.search(at.map, words, weights or (1,), rows, group, index_bits, plan(n), tensor, pages)
    return _Prepared(call, plan, lead, n, width, direct)


def _pages(keys: torch.Tensor, tables: Tables) -> layout.Pages:
    """Return the kernels' argument for keys in pages [..., M, S, W]."""
    count, size, _ = keys.shape[-3:]
    return layout.Pages(None, keys.stride(-3), tables.width, tables.per, size.bit_length() - 1, count - 1)


def _slots(map: layout.RowMap, rows: int, per: int) -> tuple[int, int]:
    """Return the workspace slots of rows, and the rows per group; rows with shared keys are padded to whole groups.

    per: consecutive rows that share a page table; keys without pages count as one table.
    """
    line = map.size[3]
    if line == 1 or map.keys[3] or per % line:
        return rows, 1
    return rows // line * -(-line // layout.MAX_GROUP) * layout.MAX_GROUP, layout.MAX_GROUP


class _Placed(NamedTuple):
    """Operands for planes, and whether none of them is a copy."""

    at: Operands
    direct: bool


def _placed(
    query: torch.Tensor, keys: torch.Tensor, weights: Sequence[int] | None, lead: Sequence[int], paged: bool = False
) -> _Placed:
    """Return the operands of a search: without weights each of the Q queries is one plane of weight 1.

    Args:
        paged: keys are in pages [..., M, S, W]; the operand is the first page.
    """
    if paged:
        _require_in_place(keys)
        keys = keys.select(-3, 0)
    if weights is None:
        query, keys = query.unsqueeze(-2), keys.unsqueeze(-3)
    at = supported(query, keys, lead)
    if paged and at.keys is not keys:
        raise ValueError(f"on CUDA the rows of a search in pages may have at most four strides, got rows {[*lead]}")
    return _Placed(at, at.query is query and at.keys is keys)


def _require_in_place(pages: torch.Tensor) -> None:
    """Raise ValueError unless the kernels can read keys in pages [..., M, S, W] where they lie."""
    unit = math.gcd(pages.shape[-1], 4)
    steps = zip(pages.stride()[:-1], pages.shape[:-1], strict=True)
    apart = pages.stride(-1) != 1 and pages.shape[-1] > 1
    if apart or pages.data_ptr() % (4 * unit) or any(step % unit for step, size in steps if size > 1):
        raise ValueError(
            f"on CUDA the words of a key in pages must be contiguous and aligned to {4 * unit} bytes, got strides "
            f"{[4 * step for step in pages.stride()]}; copy the pages to such a layout"
        )
