"""What one attachment does in one layer: which query rows are sparse, what they select, and the count of it.

The way of a query row: tokens it sees -> its budget -> the selector's choice -> sink and recent -> attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_decode import flash
from sparse_decode.attend import LeftOut, attend, attention_weights
from sparse_decode.budget import Budget
from sparse_decode.cache import Encoder
from sparse_decode.modes import ordinary_tensors
from sparse_decode.offload import HostLayer
from sparse_decode.opaque import enrol
from sparse_decode.positions import (
    around,
    count_visible,
    first_visible,
    last_visible,
    merge,
    visible_rows,
    visible_span,
    with_ends,
)
from sparse_decode.remainder import RunningMoments, StaticMoments
from sparse_decode.select import AttendingSelector, Rows, Selector

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
            # A row that sees nothing has nothing to select: it gets what dense attention makes of it.
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
    moments: RunningMoments | StaticMoments | None = None
    weights: Tensor | None = None


class Part(NamedTuple):
    """Query rows of a call that are worked on at once, and what is known of them before they select.

    Attributes:
        first, last: rows first..last-1, R of them.
        visible: tokens that each sees, int64 [B, R]; None in a plain step: all.
        counts: tokens that each reads, int64 [B, R], 0 where it is not sparse; in a plain step those that the selector
            is to choose: the others are the same for all rows.
        sparse: which are sparse, bool [B, R]; None in a plain step: all.
        each: in a plain step, `counts` as a number; reads: the tokens that each row reads, those it does not choose
            included.
    """

    first: int
    last: int
    visible: Tensor | None
    counts: Tensor
    sparse: Tensor | None
    each: int | None = None
    reads: int = 0


Kernel = Literal["gather", "flash"]
"""What attends to a selection: our own kernels, or torch's gather and flash-attn."""


class LayerPlan:
    """One sparse layer of one attachment.

    Attributes:
        tally: int64 [2], tokens selected and visible so far, over sparse rows and query heads; those of plain steps,
            where they are numbers anyway, are kept apart. `counted` has the sum.
        remainder: coefficients [Hq, 5] of the weight of what a selection leaves out (eq. 15); None to leave it out.
        number: how a compiled graph names this plan.
    """

    def __init__(
        self,
        layer: int,
        selector: Selector,
        budget: Budget,
        rule: RowRule,
        remainder: Tensor | None = None,
        kernel: Kernel = "gather",
    ):
        self.layer: int = layer
        self.selector: Selector = selector
        self.budget: Budget = budget
        self.rule: RowRule = rule
        self.kernel: Kernel = kernel
        self._exact = bool(getattr(selector, "chooses_all_asked", False))
        self._own = selector if isinstance(selector, AttendingSelector) else None
        self._ends = (0, 0) if self._own else (budget.sink, budget.recent)  # tokens that every row reads unasked
        self.remainder: Tensor | None = None if remainder is None else remainder[:, :-1].float().contiguous()
        self._slopes: Tensor | None = None if remainder is None else remainder[:, -1].float().clone()
        self._placed: dict[tuple[torch.device, float], tuple[Tensor, Tensor]] = {}
        self.encoder: Encoder = Encoder(lambda k: selector.encode_keys(layer, k))
        self.tally: Tensor = torch.zeros(2, dtype=torch.int64)
        self.number: int = enrol(self)
        self._last_counts: tuple[object, Tensor] | None = None
        self._lock = Lock()
        self._selected = self._visible = 0

    @property
    def weighs_itself(self) -> bool:
        """Whether the selector has an attention of its own."""
        return self._own is not None

    def counted(self) -> tuple[int, int]:
        """Return tokens selected and visible so far."""
        selected, visible = self.tally.tolist()
        return selected + self._selected, visible + self._visible

    def forget_counts(self) -> None:
        """Start counting anew."""
        with self._lock:
            self.tally.zero_()
            self._selected = self._visible = 0

    def _count_numbers(self, selected: int, visible: int) -> None:
        with self._lock:
            self._selected += selected
            self._visible += visible

    def all_dense(self, n: int) -> bool:
        """Say whether no row of a call that ends at token `n` sees enough tokens to be worth a selection."""
        return n < cast(int, self.budget.dense_below)

    def rows_at_once(self, batch: int, query_heads: int, rows: int, n: int) -> int:
        """Return how many of a call's query rows are worked on at once, of `n` tokens each."""
        return min(rows, max(1, _CHUNK_SCORES // max(1, batch * query_heads * n)))

    def count_dense(self, x: Inputs) -> None:
        """Count a call in which every row attended to all it saw, because it saw so little."""
        (batch, hq, n_queries, _), n = x.q.shape, x.k.shape[2]
        if x.mask is None and n_queries == 1:  # a step that may be sparse, or there would be nothing to count
            return self._count_numbers(batch * hq * n, batch * hq * n)
        visible, sparse = self._rows(x)
        self._count(visible * x.q.shape[1], visible * x.q.shape[1], sparse, self.tally)

    def attend(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        """Attend sparsely in the rows that the rule makes sparse.

        Returns: [B, Q, Hq, Dv], zeros in the other rows; and which rows were sparse, bool [B, Q], None if all were.
        """
        if self._is_step(x):
            return self._attend_part(x, self._step(x), x.moments or RunningMoments(), self.tally), None
        visible, sparse = self._rows(x)
        counts = self._counts(visible).masked_fill(~sparse, 0)
        return self._select_and_attend(x, visible, sparse, counts, self.tally), sparse

    def _is_step(self, x: Inputs) -> bool:
        """Say whether a call is a plain step: every sequence has one row, without padding."""
        plain = x.mask is None and x.q.shape[2] == 1 and x.host is None
        return plain and self._own is None and self.rule.may_be_sparse(1, x.k.shape[2])

    def _step(self, x: Inputs) -> Part:
        """Return the one part of a plain step: what is the same for all rows is a number, not a tensor.

        After the rest of a model has filled the caches of a processor, each operation costs ten times its time; on a
        GPU nothing here waits for it.
        """
        shape, n = (x.q.shape[0], 1), x.k.shape[2]
        reads = self.budget.count_row(n)
        count = max(0, reads - sum(self._ends))
        alike, last = (count, shape, x.q.device), self._last_counts
        if last is None or last[0] != alike:  # it changes every fiftieth token at 2 %
            with ordinary_tensors():
                last = alike, torch.full(shape, count, dtype=torch.int64, device=x.q.device)
            self._last_counts = last
        return Part(0, 1, None, last[1], None, count, reads)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        codes: Tensor | None,
        mask: Tensor | None,
        length: Tensor | None,
        sinks: Tensor | None,
        tally: Tensor,
        sums: list[Tensor],
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """Do a whole step of a compiled graph: rows that are not sparse attend to all they see. [B, Q, Hq, Dv]"""
        room = v
        k, v, codes = trim(k, v, codes, length)
        if codes is None and self.selector.needs_codes:
            codes = self.encoder(k)
        moments = StaticMoments(sums) if sums else None
        x = Inputs(q, k, v, mask, codes, None, scaling, softcap, sinks, moments)
        visible, sparse = self._rows(x)
        if self.all_dense(k.shape[2]) and softcap is None and sinks is None:
            self._count(visible * q.shape[1], visible * q.shape[1], sparse, tally)
            return _blind(_dense(x), room, mask, visible)
        counts = torch.where(sparse, self._counts(visible), visible)
        return _blind(self._select_and_attend(x, visible, sparse, counts, tally), room, mask, visible)

    def _rows(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Count the tokens that each row sees, and say which rows are sparse: [B, Q] both."""
        n_queries, n = x.q.shape[2], x.k.shape[2]
        visible = count_visible(x.mask, x.q.shape[0], n_queries, n, x.q.device, _chunk(x.q, n))
        return visible, self.rule.rows(visible, n_queries, n)

    def _counts(self, visible: Tensor) -> Tensor:
        """Count the tokens that each row selects, [B, Q]."""
        return self.budget.count(visible, visible[:, -1:])

    def _select_and_attend(self, x: Inputs, visible: Tensor, sparse: Tensor, counts: Tensor, tally: Tensor) -> Tensor:
        """Work through the query rows, a chunk at a time; rows of count 0 stay zero."""
        (batch, hq, n_queries, _), n = x.q.shape, x.k.shape[2]
        chunk, moments = _chunk(x.q, n), x.moments or RunningMoments()
        pieces = []
        for first in range(0, n_queries, chunk):
            last = min(first + chunk, n_queries)
            at = slice(first, last)
            part = Part(first, last, visible[:, at], counts[:, at], sparse[:, at])
            if part.counts.any():
                pieces.append(self._attend_part(x, part, moments, tally))
            else:
                pieces.append(x.q.new_zeros(batch, last - first, hq, x.v.shape[3]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _attend_part(self, x: Inputs, part: Part, moments: RunningMoments | StaticMoments, tally: Tensor) -> Tensor:
        """Select, count what was selected, and attend to it, with the remainder if there is one: [B, R, Hq, Dv]."""
        rows = self._rows_of(x, part)
        indices = self._select(rows, part)
        self._count_selected(x, part, indices, tally)
        ends = self._ends if part.sparse is None and self._exact else (0, 0)  # the others are among the indices
        if x.weights is not None or self.kernel == "flash":
            indices, ends = around(indices, rows.k.shape[2], *ends), (0, 0)
        if x.weights is not None:
            found = attention_weights(rows.q, rows.k, indices, x.scaling, x.softcap, x.sinks)
            x.weights[:, :, part.first : part.last, : found.shape[-1]] = found
        left_out = None if self.remainder is None else self._left_out(x, part, indices, moments)
        return self._attend(x, rows, indices, left_out, ends)

    def _rows_of(self, x: Inputs, part: Part) -> Rows:
        n_queries, n = x.q.shape[2], x.k.shape[2]
        seen = visible_rows(x.mask, part.first, part.last, n_queries, n, x.q.device)
        # Without a mask, these rows see nothing from there on.
        end = n if x.mask is not None else n - n_queries + part.last
        sink, recent = self._ends
        chosen = part.counts if part.each is not None else (part.counts - sink - recent).clamp(min=0)
        return Rows(
            self.layer,
            x.q[:, :, part.first : part.last],
            x.k[:, :, :end],
            None if x.codes is None else x.codes[:, :, :end],
            None if seen is None else seen[..., :end],
            chosen,
            x.scaling,
            x.softcap,
            x.sinks,
            part.each,
            sink,
            recent,
        )

    def _select(self, rows: Rows, part: Part) -> Tensor:
        """Choose tokens by the selector, sink and recent: int64 [B, H, R, K].

        In a plain step the attention adds the last two itself, if the selector is one that chooses no fewer and no
        others than it was asked for.
        """
        indices, n = self.selector.select(rows), rows.k.shape[2]
        sink, recent = self._ends
        if (not sink and not recent) or (part.sparse is None and self._exact):
            return indices
        if part.sparse is None:
            return with_ends(indices, 0, n, sink, recent)
        span = visible_span(rows.visible, n)
        if span is not None:
            starts, ends = span
            starts = torch.where(part.counts > 0, starts, ends)  # rows that are not sparse read nothing here
            return with_ends(indices, starts, ends, sink, recent)
        for size, listed in ((sink, first_visible), (recent, last_visible)):
            if size:
                indices = merge(indices, listed(rows.visible, part.counts.clamp(max=size), n), n)
        return indices

    def _left_out(self, x: Inputs, part: Part, indices: Tensor, moments: RunningMoments | StaticMoments) -> LeftOut:
        """Describe what a selection [B, H, R, K] leaves out; `moments` learn of the part's tokens."""
        coefficients, slopes = self._coefficients(x.q.device, x.scaling)
        rows = x.q[:, :, part.first : part.last], slopes
        found = None
        if part.sparse is None and isinstance(moments, RunningMoments):
            found = moments.step(*rows, x.k, x.v)
        if found is None:
            past = x.k.shape[2] - x.q.shape[2]
            *found, seen = moments.rows(*rows, x.k, x.v, _unpadded(x), past + part.first, past + part.last)
            if x.mask is not None and part.visible is not None:
                _require_causal(seen.to(part.visible.device), part.visible, (indices >= 0).any(-1).any(1))
        visible = part.visible
        if visible is None:
            visible = torch.full((x.q.shape[0], 1), x.k.shape[2], dtype=torch.int64, device=x.q.device)
        known = coefficients, *found, visible
        return LeftOut(*(each if each.device == x.q.device else each.to(x.q.device) for each in known))

    def _coefficients(self, device: torch.device, scaling: float) -> tuple[Tensor, Tensor]:
        """Return the coefficients of the weight and the slopes, times the factor on the logits: copied there once."""
        assert self.remainder is not None
        assert self._slopes is not None
        if (known := self._placed.get((device, scaling))) is None:
            with ordinary_tensors():  # they outlive the mode that this call is in
                known = self.remainder.to(device), (self._slopes * scaling).to(device)
            self._placed[device, scaling] = known
        return known

    def _attend(
        self, x: Inputs, rows: Rows, indices: Tensor, left_out: LeftOut | None, ends: tuple[int, int]
    ) -> Tensor:
        """Attend to what was selected: [B, Q, Hq, Dv]."""
        q = rows.q
        if self._own is not None:
            return self._own.attend(rows, x.v[:, :, : rows.k.shape[2]], indices)
        if self.kernel == "flash":
            flash.refuse(x.mask, x.sinks, 0.0)
            return flash.attend(q, x.k, x.v, indices, x.scaling, x.softcap)
        model = {"softcap": x.softcap, "sinks": x.sinks}
        if x.host is None:
            return attend(q, x.k, x.v, indices, x.scaling, **model, left_out=left_out, ends=ends)
        batch, hq, n_rows, dim = q.shape
        k, v, slots = x.host.rows_on(indices, q.device)
        k, v = k.to(x.k.dtype), v.to(x.v.dtype)  # autocast may have made another type of these
        one_by_one = q.transpose(1, 2).reshape(batch * n_rows, hq, 1, dim)
        if left_out is not None:
            keys, values = (mean.transpose(1, 2).flatten(0, 1)[:, :, None] for mean in left_out[1:3])
            if (group := indices.shape[1] // keys.shape[1]) > 1:  # the rows that came over are those of each set
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            left_out = LeftOut(left_out.coefficients, keys, values, left_out.visible.reshape(-1, 1))
        out = attend(one_by_one, k, v, slots, x.scaling, **model, left_out=left_out)
        return out.view(batch, n_rows, hq, -1)

    def _count_selected(self, x: Inputs, part: Part, indices: Tensor, tally: Tensor) -> None:
        """Count a selection [B, H, R, K], once for each query head that shares it."""
        batch, hq = x.q.shape[:2]
        if part.sparse is None:
            all_asked = batch * hq * part.reads
            chosen = all_asked if self._exact else int((indices >= 0).sum()) * (hq // indices.shape[1])
            return self._count_numbers(chosen, batch * hq * x.k.shape[2])
        assert part.visible is not None
        self._count((indices >= 0).sum((1, 3)) * (hq // indices.shape[1]), part.visible * hq, part.sparse, tally)

    def _count(self, selected: Tensor, visible: Tensor, sparse: Tensor, tally: Tensor) -> None:
        """Add the tokens that the sparse rows selected and saw, [B, Q], summed over query heads."""
        sums = torch.stack([(x * sparse).sum() for x in (selected, visible)])
        with self._lock:
            tally += sums.to(tally.device)


def trim(
    k: Tensor, v: Tensor, codes: Tensor | None, length: Tensor | int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Drop the room that a static cache keeps for later tokens, from token `length` on."""
    if length is None:
        return k, v, codes
    n = int(length)
    return k[:, :, :n], v[:, :, :n], None if codes is None else codes[:, :, :n]


def _unpadded(x: Inputs) -> Tensor | None:
    """Say which tokens the last row sees, bool [B, N]: all but padding, if the mask is causal."""
    n_queries, n = x.q.shape[2], x.k.shape[2]
    if x.mask is None:
        return None
    seen = visible_rows(x.mask, n_queries - 1, n_queries, n_queries, n, x.k.device)
    return None if seen is None else seen[:, 0, 0].expand(x.q.shape[0], n).to(x.k.device)


def _require_causal(counts: Tensor, visible: Tensor, used: Tensor) -> None:
    """Refuse a mask of another form for rows that are `used`: the sums are of all earlier tokens but padding."""
    if ((counts != visible) & used).any():
        raise ValueError(
            "the remainder needs a causal mask, with padding at most, got one that hides other tokens; "
            "attach with remainder=False"
        )


def _dense(x: Inputs) -> Tensor:
    """Attend to all visible tokens with torch's own attention: [B, Q, Hq, Dv]."""
    n_queries, n = x.q.shape[2], x.k.shape[2]
    seen = visible_rows(x.mask, 0, n_queries, n_queries, n, x.q.device)
    out = F.scaled_dot_product_attention(x.q, x.k, x.v, seen, scale=x.scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def _blind(out: Tensor, v: Tensor, mask: Tensor | None, visible: Tensor) -> Tensor:
    """Give the rows of out [B, Q, Hq, Dv] that see nothing what eager attention gives them: the mean of all values.

    Its mask adds to each logit the same most negative number, beside which they are all alike.
    """
    if mask is None or mask.dtype == torch.bool or bool((visible > 0).all()):
        return out
    mean = v.float().mean(2).repeat_interleave(out.shape[2] // v.shape[1], 1).to(out.dtype)
    return torch.where((visible > 0)[..., None, None], out, mean[:, None])


def _chunk(q: Tensor, n: int) -> int:
    return max(1, _CHUNK_SCORES // max(1, q.shape[0] * q.shape[1] * n))
