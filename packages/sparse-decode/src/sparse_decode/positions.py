"""Visible tokens of each row, and the arithmetic of adding sink and recent tokens to a selection."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch
from hashcore.cpu.threads import compiled
from torch import Tensor

from sparse_decode.modes import ordinary_tensors, readable

_BIASES = "the mask must hide or show tokens, got one with biases; sparse attention does not support biases"


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
    candidates: Tensor
    """The candidates of the selection, bool [B, 1, 1, N]."""
    ends: Tensor
    """Indices of sink and recent tokens, int64 [B, E], -1 in unused slots."""
    totals: Tensor
    """Tokens read and visible, summed over sparse rows and the heads of `chosen`: int64 [2]."""


def see(shown: Tensor, count: Callable[[Tensor], tuple[Tensor, Tensor]], sink: int, recent: int) -> Seen:
    """Return what the rows of a decode step see, given their visible tokens, bool [B, 1, 1, N].

    Args: count: maps numbers of visible tokens, int64 [B, 1], to numbers of tokens to read, including sink and recent,
        [B, 1] or [B, H, 1] by head, and to which rows are sparse.
    """
    tokens = shown[:, 0, 0]
    rank = tokens.cumsum(-1, dtype=torch.int32)  # rank of a visible token, from 1
    visible = rank[:, -1:].long()
    reads, sparse = count(visible)
    heads, own = (1, reads) if reads.ndim == 2 else (reads.shape[1], reads[:, 0])  # 0 in one head: in all
    first = torch.arange(1, sink + 1, device=tokens.device).expand(len(tokens), -1)
    last = visible + torch.arange(1 - recent, 1, device=tokens.device)
    wanted = torch.cat([first, last.masked_fill(last <= sink, 0)], -1)
    ends = torch.searchsorted(rank, wanted.int(), out_int32=False)  # the first token of that rank
    ends = ends.masked_fill((wanted < 1) | (wanted > visible) | (own < 1), -1)
    between = tokens & (rank > sink) & (rank <= visible - recent)
    totals = torch.stack([(reads * beside(sparse, reads)).sum(), (visible * sparse).sum() * heads])
    chosen = (reads - sink - recent).clamp(min=0)
    return Seen(tokens, visible, sparse, chosen, between[:, None, None], ends, totals)


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


def visible_span(visible: Tensor | None, n: int) -> tuple[Tensor | int, Tensor | int] | None:
    """Return starts and ends (exclusive) of the rows' visible tokens, integers or int64 [B or 1, Q].

    Args: visible: bool [B or 1, 1, Q, N]; None if every row sees all `n` tokens.
    Returns: None if the visible tokens of a row are not consecutive.
    """
    if visible is None:
        return 0, n
    seen = visible[:, 0].to(torch.uint8)
    counts = seen.sum(-1)
    first = torch.where(counts > 0, seen.argmax(-1), 0)
    end = torch.where(counts > 0, n - seen.flip(-1).argmax(-1), 0)
    return (first, end) if bool((end - first == counts).all()) else None


def between(
    visible: Tensor | None, sink: int, recent: int, n_queries: int, n: int, device: torch.device
) -> Tensor | None:
    """Return `visible`, bool [B or 1, 1, Q, N] or None for all tokens, without the ends of each row."""
    if not sink and not recent:
        return visible
    slots, span = torch.arange(n, device=device), visible_span(visible, n)
    if span is not None:
        start, end = (torch.as_tensor(x, device=device).expand(1, n_queries) if isinstance(x, int) else x for x in span)
        return ((slots >= start[..., None] + sink) & (slots < end[..., None] - recent))[:, None]
    assert visible is not None
    rank = visible.cumsum(-1, dtype=torch.int32)
    return visible & (rank > sink) & (rank <= rank[..., -1:] - recent)


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


def first_visible(visible: Tensor | None, counts: Tensor, n: int) -> Tensor:
    """Return the first counts [B, Q] visible tokens of each row: int64 [B, Q, K], ascending, then -1."""
    return _by_rank(visible, torch.zeros_like(counts), counts, n)


def last_visible(visible: Tensor | None, counts: Tensor, n: int) -> Tensor:
    """Like `first_visible`, of the last tokens."""
    total = torch.full_like(counts, n) if visible is None else visible[:, 0].sum(-1).expand_as(counts)
    return _by_rank(visible, total - counts, total, n)


def _by_rank(visible: Tensor | None, low: Tensor, high: Tensor, n: int) -> Tensor:
    """Return the visible tokens of ranks low..high-1 of each row, counted from 0: [B, Q, K]."""
    width = int((high - low).max()) if low.numel() else 0
    slots = torch.arange(width, device=low.device)
    if visible is None:
        return torch.where(slots < (high - low)[..., None], slots + low[..., None], -1)
    rank = visible[:, 0].cumsum(-1).expand(*low.shape, n) - 1
    wanted = visible[:, 0] & (rank >= low[..., None]) & (rank < high[..., None])
    batch, row, token = wanted.nonzero(as_tuple=True)
    chosen = low.new_full((*low.shape, width), -1)
    chosen[batch, row, rank[batch, row, token] - low[batch, row]] = token
    return chosen


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


def merge(selected: Tensor, extra: Tensor, n: int) -> Tensor:
    """Return the union of two sets of tokens per row.

    Args: selected: int64 [B, H, Q, K]; extra: int64 [B, Q, E]; both with -1 in unused slots; tokens are below `n`.
    Returns: int64 [B, H, Q, K'], ascending, then -1; K' is the size of the largest union on the CPU, else K + E.
    """
    extra = extra[:, None].expand(*selected.shape[:-1], -1)
    both = torch.cat([selected, extra], dim=-1)
    both = both.masked_fill(both < 0, n).sort(-1).values
    repeated = torch.zeros_like(both, dtype=torch.bool)
    repeated[..., 1:] = both[..., 1:] == both[..., :-1]
    both = both.masked_fill(repeated, n).sort(-1).values
    if readable(both):
        both = both[..., : int((both < n).sum(-1).max()) if both.numel() else 0]
    return both.masked_fill(both == n, -1)
