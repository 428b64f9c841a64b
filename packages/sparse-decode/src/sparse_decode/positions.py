"""Visible tokens of each row, and the arithmetic of adding sink and recent tokens to a selection."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch
from hashcore.cpu.threads import compiled
from torch import Tensor

from sparse_decode.modes import ordinary_tensors, readable

_BIASES = "the mask must hide or show tokens, got one with biases; sparse attention does not support biases"
_HOLES = (
    "each row of a mask must see consecutive tokens for sparse attention, got one with holes; pad on the left only, or "
    "call detach()"
)
Span = tuple[Tensor, Tensor]
"""First visible tokens of rows, and where they end."""


def visible_rows(
    mask: Tensor | None, first: int, last: int, n_queries: int, n: int, device: torch.device
) -> Tensor | None:
    """Return which of `n` tokens the query rows first..last-1 see.

    Args: mask: Hugging Face's mask, [B or 1, 1, n_queries, n]: bool, or 0 for visible and the dtype's most negative
        number for hidden tokens; None is causal.
    Returns: bool [B or 1, 1, last - first, n]; None if every row sees every token.
    Raises: ValueError if the mask differs by head or contains biases.
    """
    if mask is None:
        if n_queries == 1:
            return None
        positions = torch.arange(first, last, device=device) + (n - n_queries)
        return (torch.arange(n, device=device) <= positions[:, None])[None, None]
    if mask.shape[1] != 1:
        raise ValueError(f"the mask must be shared by all heads, shape [B, 1, Q, N], got {tuple(mask.shape)}")
    rows = mask[:, :, first:last, :n]
    if rows.dtype == torch.bool:
        return rows
    seen = rows == 0
    right = (seen | (rows <= torch.finfo(rows.dtype).min / 2)).all()
    if n_queries == 1 and not readable(rows):
        torch._assert_async(right, _BIASES)  # pyright: ignore[reportPrivateImportUsage]
    elif not right:
        raise ValueError(_BIASES)
    return seen


def last_row(mask: Tensor | None, batch: int, n: int) -> Tensor | None:
    """Return which of `n` tokens the last row of a mask sees, bool [batch, n]; None if it sees every token."""
    if mask is None:
        return None
    rows = mask.shape[2]
    seen = visible_rows(mask, rows - 1, rows, rows, n, mask.device)
    return None if seen is None else seen[:, 0, 0].expand(batch, n)


class Seen(NamedTuple):
    """What the one row of each sequence in a decode step sees, according to a mask. No shape depends on data."""

    tokens: Tensor
    """The visible tokens, bool [B, N]."""
    visible: Tensor
    """Their number, int64 [B, 1]."""
    sparse: Tensor
    """Whether the row is sparse, bool [B, 1]."""
    chosen: Tensor
    """Number of tokens to select, int64 [B, 1], or [B, H, 1] by head."""
    span: Span
    """The row sees tokens start..end - 1, int64 [B, 1] each; none of them if it reads nothing here."""
    ends: Tensor
    """Indices of sink and recent tokens, int64 [B, E], -1 in unused slots."""
    totals: Tensor
    """Tokens read and visible, summed over sparse rows and the heads of `chosen`: int64 [2]."""


def see(shown: Tensor, count: Callable[[Tensor], tuple[Tensor, Tensor]], sink: int, recent: int) -> Seen:
    """Return what the rows of a decode step see, given their visible tokens, bool [B, 1, 1, N].

    Args: count: maps numbers of visible tokens, int64 [B, 1], to numbers of tokens to read, including sink and recent,
        [B, 1] or [B, H, 1] by head, and to which rows are sparse.
    Raises: as `visible_span`.
    """
    tokens = shown[:, 0, 0]
    start, end = visible_span(shown)
    visible = end - start
    reads, sparse = count(visible)
    heads, own = (1, reads) if reads.ndim == 2 else (reads.shape[1], reads[:, 0])  # 0 in one head: in all
    start = torch.where(own < 1, end, start)
    first = start + torch.arange(sink, device=tokens.device)
    last = end + torch.arange(-recent, 0, device=tokens.device)
    ends = torch.cat([first.masked_fill(first >= end, -1), last.masked_fill(last < start + sink, -1)], -1)
    totals = torch.stack([(reads * beside(sparse, reads)).sum(), (visible * sparse).sum() * heads])
    return Seen(tokens, visible, sparse, (reads - sink - recent).clamp(min=0), (start, end), ends, totals)


def beside(x: Tensor, counts: Tensor) -> Tensor:
    """Return x [B, Q] so that it broadcasts against counts [B, Q] or [B, H, Q]."""
    return x if counts.ndim == 2 else x[:, None]


class Numbers:
    """Counts on a device without a copy there: views of 0, 1, 2, ..."""

    def __init__(self) -> None:
        self._all: Tensor | None = None

    def of(self, counts: list[int], q: Tensor) -> Tensor:
        """Return a count for each sequence of q [B, Hq, 1, D], int64 [B, 1], or several, [B, H, 1], on its device."""
        numbers, most = self._all, max(counts)
        if numbers is None or len(numbers) <= most or numbers.device != q.device:
            with ordinary_tensors():
                numbers = self._all = torch.arange(2 * most + 1024, device=q.device)
        if len(counts) == 1:
            return numbers[most].expand(q.shape[0], 1)
        return torch.stack([numbers[count] for count in counts])[:, None].expand(q.shape[0], -1, 1)


class Sights:
    """What the rows of the current step see: computed by the first sparse layer, shared by those with the same mask."""

    def __init__(self) -> None:
        self._step: tuple[Tensor, list[int], dict[Hashable, Seen]] | None = None  # mask, last layer, results

    def of(self, mask: Tensor, layer: int, key: Hashable, find: Callable[[], Seen]) -> Seen:
        """Return the result of `find`, or that of an earlier layer with the same mask and key.

        A later step may reuse the mask tensor with new values. It is recognised by its layer: a new step starts at an
        earlier layer, or at the same one.
        """
        step = self._step
        if step is None or step[0] is not mask or layer <= step[1][0]:
            step = self._step = mask, [layer], {}  # one assignment: other threads have their own steps
        step[1][0], found = layer, step[2]
        if (known := found.get(key)) is None:
            known = found[key] = find()
        return known


def visible_span(visible: Tensor) -> Span:
    """Return starts and ends (exclusive) of the rows' visible tokens, int64 [B or 1, Q] each; equal for none.

    Args: visible: bool [B or 1, 1, Q, N].
    Raises: ValueError if the visible tokens of a row are not consecutive; on a device, where the host does not look, an
        error of the device.
    """
    seen = visible[:, 0]
    start = seen.to(torch.uint8).argmax(-1)
    end = start + seen.sum(-1)
    slots = torch.arange(seen.shape[-1], device=seen.device)
    right = (seen == ((slots >= start[..., None]) & (slots < end[..., None]))).all()
    if not readable(seen):
        torch._assert_async(right, _HOLES)  # pyright: ignore[reportPrivateImportUsage]
    elif not right:
        raise ValueError(_HOLES)
    return start, end


def count_visible(mask: Tensor | None, batch: int, n_queries: int, n: int, device: torch.device, chunk: int) -> Tensor:
    """Count the visible tokens of each query row, int64 [B, n_queries], `chunk` rows at a time."""
    if mask is None:
        return torch.arange(n - n_queries + 1, n + 1, device=device).expand(batch, -1)
    counts = []
    for first in range(0, n_queries, chunk):
        seen = visible_rows(mask, first, min(first + chunk, n_queries), n_queries, n, device)
        assert seen is not None
        counts.append(seen[:, 0].sum(-1))
    return torch.cat(counts, dim=1).expand(batch, -1)


def with_ends(selected: Tensor, starts: Tensor | int, ends: Tensor | int, sink: int, recent: int) -> Tensor:
    """Add the first `sink` and the last `recent` tokens of each row's visible interval to a selection.

    Args:
        selected: int64 [B, H, Q, K], ascending, then -1; sink, recent and invisible tokens in it are dropped.
        starts, ends: the row sees tokens starts..ends-1, integers or int64 [B or 1, Q]; none if they are equal.
    Returns: int64 [B, H, Q, K + sink + recent], ascending, then -1.
    """
    batch, heads, n_queries, width = selected.shape
    bounds = [torch.as_tensor(x, device=selected.device).expand(batch, n_queries) for x in (starts, ends)]
    if selected.device.type == "cpu":
        merged = selected.new_empty(batch, heads, n_queries, width + sink + recent)
        arrays = (selected.numpy(), *(x.numpy() for x in bounds))
        compiled(_with_ends)(*arrays, sink, recent, merged.numpy())
        return merged
    return ends_by_sorting(selected, bounds[0], bounds[1], sink, recent)


def around(selected: Tensor, n: int, sink: int, recent: int) -> Tensor:
    """Like `with_ends`, for rows that see all `n` tokens; unused slots stay where they are."""
    if not sink and not recent:
        return selected
    first = torch.arange(min(sink, n), device=selected.device)
    last = torch.arange(max(n - recent, len(first)), n, device=selected.device)
    rows = selected.shape[:3]
    return torch.cat([first.expand(*rows, -1), selected, last.expand(*rows, -1)], dim=-1)


def include(selected: Tensor, n: int, ends: tuple[int, int] | Tensor) -> Tensor:
    """Return the tokens that attention reads: a selection [B, H, Q, K] and the `ends` of `sparse_decode.attend`."""
    if isinstance(ends, Tensor):
        return torch.cat([ends[:, None, None].expand(*selected.shape[:3], -1), selected], dim=-1)
    return around(selected, n, *ends)


def ends_by_sorting(selected: Tensor, starts: Tensor, ends: Tensor, sink: int, recent: int) -> Tensor:
    """Like `with_ends`, with torch operations, for GPUs."""
    start, end = (x[:, None, :, None] for x in (starts, ends))
    first = start + torch.arange(sink, device=selected.device)
    last = end - recent + torch.arange(recent, device=selected.device)
    kept = (selected >= start + sink) & (selected < end - recent)
    parts = ((first, first < end), (selected, kept), (last, last >= start + sink))
    shape, none = selected.shape[:3], torch.iinfo(torch.int64).max
    whole = torch.cat([torch.where(used, x, none).expand(*shape, -1) for x, used in parts], -1).sort(-1).values
    return whole.masked_fill(whole == none, -1)


def _with_ends(selected, starts, ends, sink, recent, merged):  # pragma: no cover - compiled
    for b, h, q in np.ndindex(selected.shape[:3]):
        row, out, used = selected[b, h, q], merged[b, h, q], 0
        start, end = starts[b, q], ends[b, q]
        for token in range(start, min(start + sink, end)):
            out[used] = token
            used += 1
        for token in row:
            if start + sink <= token < end - recent:
                out[used] = token
                used += 1
        for token in range(max(start + sink, end - recent), end):
            out[used] = token
            used += 1
        out[used:] = -1
