"""Search on torch tensors in device memory: prepares its launches, and keeps them for calls of the same form.

torch_ops has checked the arguments, as for `hashcore.cuda.tensors`.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from hashcore.cuda import kept, kernels, launch, layout
from hashcore.cuda.layout import SearchSpace
from hashcore.cuda.operands import Operands, Tables, as_operands, page_tables, set_rows
from hashcore.validation import RowLimits


def search(
    query: torch.Tensor,
    keys: torch.Tensor,
    weights: Sequence[int] | None,
    rows: RowLimits,
    scores: torch.Tensor,
    indices: torch.Tensor,
    blocks: torch.Tensor | None = None,
) -> None:
    """Score and select in two launches, in ascending index order (eq. 4, eq. 6).

    Args:
        query: planes [..., P, W], or without weights codes [..., Q, W].
        keys: [..., N, W]; with blocks pages [..., M, S, W], S a power of two and M above 0.
        rows: of which k, lengths and starts are integer tensors on the device that broadcast to the rows.
        scores, indices: contiguous int32 and int64 [rows..., K]; unused slots get 0 and -1.
        blocks: page tables int32 or int64 [..., T], which broadcast to the rows; N = T S. Page numbers out of range
            count as M - 1.
    Raises: ValueError if words of keys in pages are not contiguous and aligned.
    Tensors k, lengths and starts need no extra launch if they are int32 or int64 and contiguous, and their shape is a
    prefix of the rows' shape followed by ones; for blocks: operands.page_tables.
    """
    if not scores.numel():
        return
    device, lead = scores.device, scores.shape[:-1]
    weights = None if weights is None else tuple(weights)
    at, keys_at = query.data_ptr(), keys.data_ptr()  # alignment, and so copies, depend on the addresses
    tables = None if blocks is None else page_tables(blocks, lead)
    n = keys.shape[-2] * (1 if tables is None else tables.blocks.shape[-1])
    layout.require_positions(n)
    how = device, at % 16, keys_at % 16, weights, launch.counts_bits(device)
    # Not the number of keys: a cache that grows by a token needs no new launches.
    lengths = (keys.shape[:-2], keys.shape[-1]) if tables is None else (keys.shape, *tables[1:])
    form = query.shape, query.stride(), *lengths, keys.stride(), n == 1, lead, how
    found = _searches.found.get(form) or _searches.keep(form, _Search(query, keys, weights, lead, tables))
    launches = found.launches(n)
    held: Any = set_rows(found.interval, found.wanted, rows, lead, n)
    memory = kept.scratch(found.plan.words, device)
    found.plan.place(found.space, memory.data_ptr())
    if not found.direct:
        placed = _placed(query, keys, weights, lead, tables is not None)
        held = *held, placed
        at, keys_at = placed.query.data_ptr(), placed.keys.data_ptr()
        ctypes.memmove(ctypes.byref(found.map), ctypes.byref(placed.map), ctypes.sizeof(found.map))  # strides of copies
    found.query.value, found.keys.value, found.pages.table = at, keys_at, tables and tables.blocks.data_ptr()
    found.values.value, found.indices.value = scores.data_ptr(), indices.data_ptr()
    launch.run(launches, device)
    del held, memory  # kept until the launches are in the stream; from here on the allocator may reuse them


class _Search:
    """The arguments of searches of one form, which each call sets, and their launches."""

    def __init__(
        self, query: torch.Tensor, keys: torch.Tensor, weights: Sequence[int] | None, lead: Sequence[int],
        tables: Tables | None,
    ):  # fmt: skip
        at = _placed(query, keys, weights, lead, tables is not None)
        self.map, self.direct, self.rows = at.map, at.direct, math.prod(lead)
        self.sms, words, weights = launch.sm_count(query.device), keys.shape[-1], weights or (1,)
        self.query, self.keys, self.values, self.indices = (ctypes.c_void_p() for _ in range(4))
        self.interval, self.wanted, top = layout.Window(), layout.Selection(), 32 * words * sum(weights)
        self.space = layout.Space(shift=layout.sample_shift(top), top=top)
        self.codes = layout.Codes(layout.Weights(tuple(weights)), len(weights), words)
        self.pages = layout.Pages() if tables is None else _pages(keys, tables)
        self.paged = [] if tables is None else [("HASHCORE_PAGES", "1")]
        self.macros = [*kernels.score_macros(words, weights, launch.counts_bits(query.device)), *self.paged]
        self.made: dict[tuple[int, int], list[kernels.Launch]] = {}
        self.n, self.plan = 0, SearchSpace.plan(self.rows, 1, self.sms)

    def launches(self, n: int) -> list[kernels.Launch]:
        """Plan for n keys in a row, and return the launches, two per turn.

        There is one turn unless the workspace would be too large; all use it one after the other.
        """
        if n != self.n:
            self.n, self.plan = n, SearchSpace.plan(self.rows, n, self.sms)
        sizes = self.plan.slots, self.plan.splits
        if sizes not in self.made:
            turns = range(0, self.rows, self.plan.slots)
            self.made[sizes] = [one for first in turns for one in self._turn(first)]
        return self.made[sizes]

    def _turn(self, first: int) -> tuple[kernels.Launch, kernels.Launch]:
        """Return the launches for as many rows as one turn has, from `first` on."""
        grid = min(self.plan.slots, self.rows - first), self.plan.splits
        rows, last = (self.map, self.interval, self.wanted), (self.space, ctypes.c_int32(first), self.pages)
        given = self.query, self.keys, *rows, self.codes.weights, *last
        one = kernels.make_launch("score.cu", "list_candidates", grid, layout.THREADS, given, self.macros, True)
        given = self.query, self.keys, self.values, self.indices, *rows, self.codes, *last
        return one, kernels.make_launch("choose.cu", "select_64", grid, layout.THREADS, given, self.paged, True)


_searches: kept.Table[_Search] = kept.Table()


def _pages(keys: torch.Tensor, tables: Tables) -> Any:
    """Return the kernels' argument for keys in pages [..., M, S, W]."""
    count, size, _ = keys.shape[-3:]
    return layout.Pages(None, keys.stride(-3), tables.width, tables.per, size.bit_length() - 1, count - 1)


def _placed(
    query: torch.Tensor, keys: torch.Tensor, weights: Sequence[int] | None, lead: Sequence[int], paged: bool = False
) -> Operands:
    """Return the operands of a search: without weights each of the Q queries is one plane of weight 1.

    Args:
        paged: keys are in pages [..., M, S, W], which are read where they lie; the operand is the first page.
    """
    pool, unit = keys, math.gcd(keys.shape[-1], 4)
    keys = keys.select(-3, 0) if paged else keys
    if weights is None:
        query, keys = query.unsqueeze(-2), keys.unsqueeze(-3)
    at = as_operands(query, keys, lead)
    if paged and (at.keys is not keys or (pool.shape[-3] > 1 and pool.stride(-3) % unit)):
        raise ValueError(
            f"on CUDA keys in pages must have contiguous words, aligned to {4 * unit} bytes, and rows of at most four "
            f"strides, got strides {[4 * step for step in pool.stride()]}; copy the pages to such a layout"
        )
    return at
