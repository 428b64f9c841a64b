"""What a launch reads: operands, counts and bounds of rows, in a layout that the kernels support."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hashcore.cuda import layout
from hashcore.validation import RowLimits


class Operands(NamedTuple):
    query: torch.Tensor
    keys: torch.Tensor
    map: Any
    direct: bool  # none of them is a copy


def as_operands(query: torch.Tensor, keys: torch.Tensor, lead: Sequence[int]) -> Operands:
    """Return the operands in a layout that the kernels support, copied only if necessary."""
    layout.require_rows(math.prod(lead))
    given, query, keys = (query, keys), _rows(query), _rows(keys, apart=True)
    for attempt in range(3):
        query_lead, keys_lead = query.expand(*lead, *query.shape[-2:]), keys.expand(*lead, *keys.shape[-2:])
        found = layout.collapse(lead, query_lead.stride()[:-2], keys_lead.stride()[:-2], keys_lead.stride(-2))
        if found is not None:
            return Operands(query, keys, found, query is given[0] and keys is given[1])
        if attempt == 0:
            query = query_lead.contiguous()  # small; keys are copied only if that does not help
        else:
            keys = keys_lead.contiguous()
    raise AssertionError("contiguous operands collapse to one dimension")


def _rows(codes: torch.Tensor, apart: bool = False) -> torch.Tensor:
    """Return codes aligned for the kernels' loads; apart: rows may have gaps. Copied only if necessary."""
    rows, words = codes.shape[-2:]
    unit = math.gcd(words, 4)
    dense = (codes.stride(-1) == 1 or words == 1) and (apart or codes.stride(-2) == words or rows == 1)
    steps = zip(codes.stride()[:-1], codes.shape[:-1], strict=True)
    aligned = codes.data_ptr() % (4 * unit) == 0 and not any(step % unit for step, size in steps if size > 1)
    return codes if dense and aligned else codes.clone(memory_format=torch.contiguous_format)


def set_rows(window: Any, wanted: Any, rows: RowLimits, lead: Sequence[int], n: int) -> tuple[torch.Tensor | None, ...]:
    """Set the kernels' arguments, a Window and a Selection, and return the tensors that they point to."""
    given = rows.lengths, rows.starts, rows.k
    pairs = [(None, 1) if x is None else per_row(integers(x), lead) for x in given]
    (lengths, window.lengths_per), (starts, window.starts_per), (k, wanted.k_per) = pairs
    window.lengths, window.starts, wanted.k = (x if x is None else x.data_ptr() for x in (lengths, starts, k))
    window.length, window.start, window.n = rows.length, rows.start, n
    window.sink, window.recent = min(rows.sink, n), min(rows.recent, n)
    window.wide, wanted.wide = _is_wide(lengths) | _is_wide(starts) << 1, _is_wide(k)
    wanted.count = wanted.width = rows.width
    return lengths, starts, k


def per_row(values: torch.Tensor, lead: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return contiguous values that broadcast to the rows, and the number of consecutive rows that share a value."""
    shape = (*(1,) * (len(lead) - values.ndim), *values.shape)
    own = max((d + 1 for d, size in enumerate(shape) if size > 1), default=0)
    if shape[:own] == tuple(lead[:own]) and values.is_contiguous():
        return values, math.prod(lead[own:])
    return values.expand(lead).contiguous(), 1


class Tables(NamedTuple):
    """Page tables as the kernels read them: int32 [..., T], the entries from one to the next, and the rows of each."""

    blocks: torch.Tensor
    width: int
    per: int


def page_tables(blocks: torch.Tensor, lead: Sequence[int]) -> Tables:
    """Return the tables of rows for blocks [..., T] that broadcast to them, copied only if necessary.

    Nothing is copied if blocks are int32, their shape is a prefix of the rows' shape followed by ones, and their
    entries and their rows have one stride each.
    """
    blocks = blocks if blocks.dtype == torch.int32 else blocks.to(torch.int32)
    *shape, width = (*(1,) * (len(lead) + 1 - blocks.ndim), *blocks.shape)
    own = max((d + 1 for d, size in enumerate(shape) if size > 1), default=0)
    steps = [0] * (len(shape) - blocks.ndim + 1) + [*blocks.stride()[:-1]]
    apart = [(size, step) for size, step in zip(shape, steps, strict=True) if size > 1]
    regular = all(step == size * inner for (_, step), (size, inner) in itertools.pairwise(apart))
    if shape[:own] == [*lead[:own]] and regular and (blocks.stride(-1) == 1 or width == 1):
        return Tables(blocks, apart[-1][1] if apart else 0, math.prod(lead[own:]))
    return Tables(blocks.expand(*lead, width).contiguous(), width, 1)


def integers(values: torch.Tensor) -> torch.Tensor:
    """Return integers as int32 or int64; the kernels clamp them."""
    if values.dtype in (torch.int32, torch.int64):
        return values
    return values.to(torch.int32 if values.element_size() < 4 else torch.int64)


def _is_wide(values: torch.Tensor | None) -> int:
    return int(values is not None and values.dtype == torch.int64)
