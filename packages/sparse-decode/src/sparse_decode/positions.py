"""Which tokens a row sees, and the arithmetic of sink and recent tokens on top of a selection."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch
from hashcore.cpu.threads import compiled
from torch import Tensor

_BIASES = "a mask that hides or shows tokens is needed, got one with biases; sparse attention has none"


def readable(x: Tensor) -> bool:
    """Say whether a tensor's numbers can be looked at now: on a GPU that would wait, in a graph there are none yet."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def visible_rows(
    mask: Tensor | None, first: int, last: int, n_queries: int, n: int, device: torch.device
) -> Tensor | None:
    """Say which of `n` tokens the query rows first..last-1 see.

    Args:
        mask: what Hugging Face built: bool, or 0 and a most negative number, [B or 1, 1, n_queries, n]; None is causal.
    Returns: bool [B or 1, 1, last - first, n]; None if every row sees every token.
    """
    if mask is None:
        if n_queries == 1:
            return None
        positions = torch.arange(first, last, device=device) + (n - n_queries)
        return (torch.arange(n, device=device) <= positions[:, None])[None, None]
    if mask.shape[1] != 1:
        raise ValueError(f"a mask shared by all heads is needed, shape [B, 1, Q, N], got {tuple(mask.shape)}")
    rows = mask[:, :, first:last, :n]
    if rows.dtype == torch.bool:
        return rows
    seen = rows == 0
    right = (seen | (rows <= torch.finfo(rows.dtype).min / 2)).all()
    if n_queries == 1 and not readable(rows):
        torch._assert_async(right, _BIASES)  # pyright: ignore[reportPrivateImportUsage] - the device itself stops; a prompt's mask was looked at
    elif not right:
        raise ValueError(_BIASES)
    return seen


class Seen(NamedTuple):
    """What the one row of each sequence in a step sees, where a mask says it; no shape depends on data."""

    tokens: Tensor
    """Which tokens, bool [B, N]."""
    visible: Tensor
    """How many, int64 [B, 1]."""
    sparse: Tensor
    """Whether the row is sparse, bool [B, 1]."""
    chosen: Tensor
    """How many the selector is to choose, int64 [B, 1]."""
    candidates: Tensor
    """Which it may choose, bool [B, 1, 1, N]."""
    ends: Tensor
    """The tokens that are read anyway, int64 [B, E], -1 in unused slots."""
    totals: Tensor
    """Tokens that a query head of all sparse rows reads, and sees, int64 [2]."""


def see(shown: Tensor, count: Callable[[Tensor], tuple[Tensor, Tensor]], sink: int, recent: int) -> Seen:
    """Describe the rows of a step.

    Args:
        shown: bool [B, 1, 1, N], which tokens each row sees.
        count: says of how many tokens rows see, int64 [B, 1], how many they read, ends included, and which are sparse.
        sink, recent: how many of the first and of the last tokens are read anyway.
    """
    tokens = shown[:, 0, 0]
    rank = tokens.cumsum(-1, dtype=torch.int32)  # number of a visible token, from 1
    visible = rank[:, -1:].long()
    reads, sparse = count(visible)
    first = torch.arange(1, sink + 1, device=tokens.device).expand(len(tokens), -1)
    last = visible + torch.arange(1 - recent, 1, device=tokens.device)
    wanted = torch.cat([first, last.masked_fill(last <= sink, 0)], -1)
    ends = torch.searchsorted(rank, wanted.int(), out_int32=False)  # the first token that has a number
    ends = ends.masked_fill((wanted < 1) | (wanted > visible) | (reads < 1), -1)
    between = tokens & (rank > sink) & (rank <= visible - recent)
    totals = torch.stack([(reads * sparse).sum(), (visible * sparse).sum()])
    chosen = (reads - sink - recent).clamp(min=0)
    return Seen(tokens, visible, sparse, chosen, between[:, None, None], ends, totals)


class Counted(NamedTuple):
    """Tokens read and seen so far, int64 [2], before a step and after it: links of a chain, which nobody changes."""

    before: Tensor
    after: Tensor


class Sights:
    """What the rows of the present step see: found by its first sparse layer, for all layers with the same mask.

    It counts as well: a layer that took part in one step after the other knows its count from the first and the last
    link of the chain, and launches nothing in between.
    """

    def __init__(self) -> None:
        self._step: _Step | None = None
        self._counted: dict[Hashable, Tensor] = {}

    def of(
        self, mask: Tensor, layer: int, rule: Hashable, size: tuple[int, int], find: Callable[[], Seen]
    ) -> tuple[Seen, Counted]:
        """Return what `find` finds in the mask, or found in it for an earlier layer by the same rule and size.

        A later step may bring the same mask with other numbers in it: it begins with a layer that is no later one.
        """
        step = self._step
        if step is None or step.mask is not mask or layer <= step.layer:
            step = self._step = _Step(mask)  # whole at once: other threads have steps of their own
        step.layer = layer
        if (known := step.found.get((rule, size))) is None:
            seen = find()
            before = self._counted.get(rule)
            if before is None or before.device != seen.totals.device:
                before = torch.zeros_like(seen.totals)
            known = step.found[rule, size] = seen, Counted(before, before + seen.totals)
            self._counted[rule] = known[1].after
        return known


class _Step:
    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.layer = -1
        self.found: dict[Hashable, tuple[Seen, Counted]] = {}


def visible_span(visible: Tensor | None, n: int) -> tuple[Tensor | int, Tensor | int] | None:
    """Find the stretch of tokens that each row sees, if all it sees is one stretch.

    Args:
        visible: bool [B or 1, 1, Q, N]; None if every row sees all `n` tokens.
    Returns: first tokens and the ends behind the last ones, integers or int64 [B or 1, Q]; None if a row sees tokens
        on both sides of one that it does not see.
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
    """Leave out the first `sink` and the last `recent` tokens that each row sees.

    Args:
        visible: bool [B or 1, 1, Q, N]; None if every row sees all `n` tokens.
    Returns: bool [B or 1, 1, Q, N]; None if every row keeps every token.
    """
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
    """Count the tokens each query row sees, int64 [B, n_queries], `chunk` rows at a time."""
    if mask is None:
        return torch.arange(n - n_queries + 1, n + 1, device=device).expand(batch, -1)
    counts = []
    for first in range(0, n_queries, chunk):
        seen = visible_rows(mask, first, min(first + chunk, n_queries), n_queries, n, device)
        assert seen is not None
        counts.append(seen[:, 0].sum(-1))
    return torch.cat(counts, dim=1).expand(batch, -1)


def first_visible(visible: Tensor | None, counts: Tensor, n: int) -> Tensor:
    """List the first counts [B, Q] tokens each row sees: int64 [B, Q, K], ascending, then -1."""
    return _by_rank(visible, torch.zeros_like(counts), counts, n)


def last_visible(visible: Tensor | None, counts: Tensor, n: int) -> Tensor:
    """List the last counts [B, Q] tokens each row sees: int64 [B, Q, K], ascending, then -1."""
    total = torch.full_like(counts, n) if visible is None else visible[:, 0].sum(-1).expand_as(counts)
    return _by_rank(visible, total - counts, total, n)


def _by_rank(visible: Tensor | None, low: Tensor, high: Tensor, n: int) -> Tensor:
    """List the visible tokens number low..high-1 of each row, counting from 0: [B, Q, K]."""
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
    """Put the first `sink` and the last `recent` tokens of a stretch around what was selected of the others.

    Args:
        selected: int64 [B, H, Q, K], ascending, then -1; other tokens than those it is to be put between are dropped.
        starts, ends: the row sees tokens starts..ends-1: integers or int64 [B or 1, Q]; none where they are equal.
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
    """Do what `with_ends` does for rows that see all `n` tokens, of a selection without unused slots."""
    if not sink and not recent:
        return selected
    first = torch.arange(min(sink, n), device=selected.device)
    last = torch.arange(max(n - recent, len(first)), n, device=selected.device)
    rows = selected.shape[:3]
    return torch.cat([first.expand(*rows, -1), selected, last.expand(*rows, -1)], dim=-1)


def include(selected: Tensor, n: int, ends: tuple[int, int] | Tensor) -> Tensor:
    """List what attention reads of `n` tokens: a selection [B, H, Q, K] and the `ends` of `sparse_decode.attend`."""
    if isinstance(ends, Tensor):
        return torch.cat([ends[:, None, None].expand(*selected.shape[:3], -1), selected], dim=-1)
    return around(selected, n, *ends)


def ends_by_sorting(selected: Tensor, starts: Tensor, ends: Tensor, sink: int, recent: int) -> Tensor:
    """Do what `with_ends` does, in operations of torch: on a GPU."""
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
    """Merge sets of tokens, each token once.

    Args:
        selected: int64 [B, H, Q, K]; extra: int64 [B, Q, E]; both with -1 in unused slots; tokens are below `n`.
    Returns: int64 [B, H, Q, K'], ascending, then -1; K' is the size of the largest union, where it can be looked at.
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
