"""The query rows of a call in blocks: what the rows of each see, may select, and read anyway.

A block is what the pipeline works on at once: the one row of each sequence in a decode step, or rows of any other call.
What a step needs to know is never looked at, so that a GPU is not waited for: without a mask it is a number, with one
it stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_decode.budget import Budget, Tally
from sparse_decode.modes import ordinary_tensors
from sparse_decode.offload import HostLayer
from sparse_decode.positions import (
    Counted,
    Seen,
    Sights,
    count_visible,
    first_visible,
    last_visible,
    merge,
    readable,
    see,
    visible_rows,
    visible_span,
    with_ends,
)
from sparse_decode.remainder import RunningMoments, StaticMoments
from sparse_decode.select import Rows

Moments = RunningMoments | StaticMoments

_CHUNK_SCORES = 1 << 23  # scores at once, B x Hq x rows x N: 32 MiB of int32 or float32, whatever the context


@dataclass(frozen=True)
class RowRule:
    """Which query rows may be sparse."""

    start: int | None
    """Rows from this position of their own sequence on; None: the rows of decode steps."""
    decode_rows: int
    """A call with a past and at most this many query rows is a decode step."""

    def may_be_sparse(self, n_queries: int, n: int) -> bool:
        """Say whether a call of `n_queries` rows that ends at token `n` can hold a sparse row."""
        if self.start is not None:
            return n > self.start
        return n_queries <= self.decode_rows and n_queries < n

    def rows(self, visible: Tensor, n_queries: int, n: int) -> Tensor:
        """Say which rows are sparse, bool like `visible` [B, Q], the tokens that each row sees."""
        if self.start is None:
            # A row that sees nothing has nothing to select: it gets what dense attention makes of it. A step on CUDA
            # gives it zeros, as torch's attention does: eager attention's mean of all values would cost a read of all.
            return (visible > 0) & self.may_be_sparse(n_queries, n)
        # A padded row is as far along as the tokens it sees, so it turns sparse where it would alone.
        return visible > self.start


@dataclass(frozen=True)
class Inputs:
    """The tensors of one attention call, trimmed to the tokens that exist.

    Attributes:
        q: [B, Hq, Q, D]; k: [B, Hkv, N, D]; v: [B, Hkv, N, Dv]; mask: [B or 1, 1, Q, N or more] or None for causal.
        codes: int32 [B, H, N, W], None if the selector needs none.
        host: the cache layer whose k and v are in host memory, if they are.
        scaling, softcap, sinks: what the model does to its logits.
        moments: running sums over the keys and values, kept by the cache if it can.
        weights: where to write the attention weights [B, Hq, Q, N or more], zeros so far; None if nobody asked.
        length: of a static cache whose k and v are all its room, int64 [].
        all_rows: rows that are not sparse attend here too, to all they see; else the caller does that.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    codes: Tensor | None
    host: HostLayer | None
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    moments: Moments | None = None
    weights: Tensor | None = None
    length: Tensor | None = None
    all_rows: bool = False

    def seen(self, first: int, last: int) -> Tensor | None:
        """Say which tokens query rows first..last-1 see, bool [B or 1, 1, R, N]; None if all see all."""
        return visible_rows(self.mask, first, last, self.q.shape[2], self.k.shape[2], self.q.device)


@dataclass(frozen=True)
class Step:
    """The one row of each sequence in a decode step.

    Attributes:
        rows: what a selector is told.
        reads: how many tokens each row reads, where there is no mask: all rows alike.
        sight: what the mask says, if there is one: what differs by row stays on the device.
        counted: what was counted before this step and with it; None where the tally is told itself.
    """

    rows: Rows
    reads: int = 0
    sight: Seen | None = None
    counted: Counted | None = None

    @property
    def ends(self) -> tuple[int, int] | Tensor:
        """What is read anyway: how many of the first and last tokens, or which, int64 [B, E], -1 in unused slots."""
        return (self.rows.sink, self.rows.recent) if self.sight is None else self.sight.ends

    def complete(self, indices: Tensor) -> Tensor:
        """Add the tokens that are read anyway to a selection [B, H, 1, K]."""
        rows, n = self.rows, self.rows.k.shape[2]
        if self.sight is not None:
            return merge(indices, self.sight.ends[:, None], n)
        return with_ends(indices, 0, n, rows.sink, rows.recent)

    def count(self, tally: Tally, indices: Tensor, exact: bool) -> None:
        """Count what is read: as much as was asked for, if the selector is `exact`."""
        (batch, hq), n, sight = self.rows.q.shape[:2], self.rows.k.shape[2], self.sight
        if sight is None:
            found = batch * hq * self.reads if exact else int(_per_row(indices, hq).sum())
            tally.add(found, batch * hq * n)
        elif not exact:
            tally.add_rows(_per_row(indices, hq), sight.visible * hq, sight.sparse)
        elif self.counted is None:
            tally.tensor.add_(sight.totals, alpha=hq)
        else:
            tally.add_link(self.counted, hq)

    def stand_in(
        self, x: Inputs, slopes: Tensor, moments: Moments, indices: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return mean keys and values of all tokens seen (eq. 16), by one kernel if one token alone is new.

        Returns also how many tokens that are, int64 [B, 1]; None for all.
        """
        sight, n = self.sight, x.k.shape[2]
        if (found := moments.step(x.q, slopes, x.k, x.v, sight, x.length)) is None:
            seen = None if sight is None else sight.tokens
            found = moments.rows(x.q, slopes, x.k, x.v, seen, n - 1, n)[:2]
        return *found, None if sight is None else sight.visible


@dataclass(frozen=True)
class SomeRows:
    """Rows first..last-1 of any other call: what each sees is counted, and looked at.

    Attributes:
        rows: what a selector is told.
        visible, counts: tokens that each sees, and reads, 0 where it is not worked on, int64 [B, R].
        sparse: which are sparse, bool [B, R].
    """

    rows: Rows
    first: int
    last: int
    visible: Tensor
    counts: Tensor
    sparse: Tensor

    def complete(self, indices: Tensor) -> Tensor:
        """Put the tokens that rows read anyway around a selection [B, H, R, K]."""
        rows, n = self.rows, self.rows.k.shape[2]
        if (span := visible_span(rows.visible, n)) is not None:
            starts, ends = span
            starts = torch.where(self.counts > 0, starts, ends)  # rows that are not worked on read nothing here
            return with_ends(indices, starts, ends, rows.sink, rows.recent)
        for size, listed in ((rows.sink, first_visible), (rows.recent, last_visible)):
            if size:
                indices = merge(indices, listed(rows.visible, self.counts.clamp(max=size), n), n)
        return indices

    def count(self, tally: Tally, indices: Tensor, exact: bool) -> None:
        """Count what is read."""
        hq = self.rows.q.shape[1]
        tally.add_rows(_per_row(indices, hq), self.visible * hq, self.sparse)

    def stand_in(self, x: Inputs, slopes: Tensor, moments: Moments, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean keys and values of what is left out (eq. 16), and of how many tokens, int64 [B, R].

        Raises: ValueError if a row that is worked on sees other tokens than all before it but padding.
        """
        past = x.k.shape[2] - x.q.shape[2]
        *found, tokens = moments.rows(self.rows.q, slopes, x.k, x.v, _unpadded(x), past + self.first, past + self.last)
        if x.mask is not None:
            _require_causal(tokens, self.visible, (indices >= 0).any(-1).any(1))
        return found[0], found[1], self.visible


class Blocks:
    """Cuts the calls of one sparse layer into blocks.

    Args:
        layer, budget, rule: the layer, what its rows may read, and which of them are sparse.
        sink, recent: how many of the first and of the last tokens each row reads anyway.
        sights: what masks say, shared with the other layers.
    """

    def __init__(self, layer: int, budget: Budget, rule: RowRule, sink: int, recent: int, sights: Sights):
        self.layer: int = layer
        self.budget: Budget = budget
        self.rule: RowRule = rule
        self.sink: int = sink
        self.recent: int = recent
        self.any_ends: bool = sink + recent > 0
        self._sights = sights
        self._numbers: Tensor | None = None  # 0, 1, 2, ...: a count on the device is a view of it

    def step(self, x: Inputs) -> Step:
        """Return the one block of a step: what is the same for all rows is a number, what differs is not looked at.

        After the rest of a model has filled the caches of a processor, each operation costs ten times its time.
        """
        n, ends = x.k.shape[2], self.sink + self.recent
        if x.mask is None:
            reads = self.budget.count_row(n)
            each = max(0, reads - ends)
            rows = self._rows(x, 0, 1, self._number(each, x.q), None, each=each)
            return Step(rows, reads)
        sight, counted = self.see(x, x.mask)
        most = max(0, max(self.budget.most(n), min(n, self.rule.start or 0)) - ends)
        seen = sight.tokens[:, None, None]
        rows = self._rows(x, 0, 1, sight.chosen, seen, most=most, among=sight.candidates)
        return Step(rows, 0, sight, counted)

    def seen(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Count the tokens that each row sees, int64 [B, Q], and say which rows are sparse, bool [B, Q]."""
        n_queries, n = x.q.shape[2], x.k.shape[2]
        visible = count_visible(
            x.mask, x.q.shape[0], n_queries, n, x.q.device, rows_at_once(x.q.shape[0], x.q.shape[1], n)
        )
        return visible, self.rule.rows(visible, n_queries, n)

    def others(self, x: Inputs, visible: Tensor, sparse: Tensor) -> Iterator[SomeRows]:
        """Cut the rows of a call that is no step; `visible` and `sparse` are of `seen`."""
        n_queries, most = x.q.shape[2], rows_at_once(x.q.shape[0], x.q.shape[1], x.k.shape[2])
        counts = torch.where(sparse, self._counts(visible), visible if x.all_rows else 0)
        chosen = (counts - self.sink - self.recent).clamp(min=0)
        for first in range(0, n_queries, most):
            last = min(first + most, n_queries)
            at = slice(first, last)
            rows = self._rows(x, first, last, chosen[:, at], x.seen(first, last))
            yield SomeRows(rows, first, last, visible[:, at], counts[:, at], sparse[:, at])

    def _counts(self, visible: Tensor) -> Tensor:
        """Count the tokens that each row reads, [B, Q]."""
        return self.budget.count(visible, visible[:, -1:])

    def _rows(self, x: Inputs, first: int, last: int, chosen: Tensor, seen: Tensor | None, **known: Any) -> Rows:
        """Describe query rows first..last-1 to a selector that is to choose `chosen` [B, R] tokens for each."""
        n_queries, n = x.q.shape[2], x.k.shape[2]
        # Without a mask, these rows see nothing from there on.
        end = n if x.mask is not None else n - n_queries + last
        return Rows(
            self.layer,
            x.q[:, :, first:last],
            x.k[:, :, :end],
            None if x.codes is None else x.codes[:, :, :end],
            None if seen is None else seen[..., :end],
            chosen,
            x.scaling,
            x.softcap,
            x.sinks,
            sink=self.sink,
            recent=self.recent,
            shortlist=self.budget.shortlist,
            **known,
        )

    def _number(self, count: int, q: Tensor) -> Tensor:
        """Return a count for each sequence, int64 [B, 1], without writing it to the device."""
        numbers = self._numbers
        if numbers is None or len(numbers) <= count or numbers.device != q.device:
            with ordinary_tensors():
                numbers = self._numbers = torch.arange(2 * count + 1024, device=q.device)
        return numbers[count].expand(q.shape[0], 1)

    def see(self, x: Inputs, mask: Tensor) -> tuple[Seen, Counted | None]:
        """Describe what the rows of a step see, once for all layers but in a graph."""
        batch, n = x.q.shape[0], x.k.shape[2]

        def count(visible: Tensor) -> tuple[Tensor, Tensor]:
            sparse = self.rule.rows(visible, 1, n)
            # Where nobody can look, rows that are not sparse read all they see here.
            others = visible if x.all_rows or not readable(visible) else 0
            return torch.where(sparse, self._counts(visible), others), sparse

        def find() -> Seen:
            shown = x.seen(0, 1)
            assert shown is not None
            return see(shown.expand(batch, -1, -1, -1), count, self.sink, self.recent)

        if x.all_rows or _in_graph(x.q.device):
            return find(), None
        return self._sights.of(mask, self.layer, (self.budget, self.rule), (batch, n), find)


def rows_at_once(batch: int, query_heads: int, n: int) -> int:
    """Return how many query rows are worked on at once, of `n` tokens each."""
    return max(1, _CHUNK_SCORES // max(1, batch * query_heads * n))


def _per_row(indices: Tensor, hq: int) -> Tensor:
    """Count a selection [B, H, R, K] once for each query head that shares it, [B, R]."""
    return (indices >= 0).sum((1, 3)) * (hq // indices.shape[1])


def _unpadded(x: Inputs) -> Tensor | None:
    """Say which tokens the last row sees, bool [B, N]: all but padding, if the mask is causal."""
    if x.mask is None or (seen := x.seen(x.q.shape[2] - 1, x.q.shape[2])) is None:
        return None
    return seen[:, 0, 0].expand(x.q.shape[0], x.k.shape[2])


def _require_causal(summed: Tensor, visible: Tensor, used: Tensor) -> None:
    """Refuse a mask of another form for rows that are `used`: the sums are of all earlier tokens but padding."""
    if ((summed != visible) & used).any():
        raise ValueError(
            "the remainder needs a causal mask, with padding at most, got one that hides other tokens; "
            "attach with remainder=False"
        )


def _in_graph(device: torch.device) -> bool:
    """Say whether what is done now is written down, to be done again without Python."""
    if torch.compiler.is_compiling() or device.type != "cuda" or not torch.cuda.is_initialized():
        return torch.compiler.is_compiling()
    return torch.cuda.is_current_stream_capturing()
