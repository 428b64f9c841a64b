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
    Counted,
    Seen,
    Sights,
    count_visible,
    first_visible,
    include,
    last_visible,
    merge,
    readable,
    see,
    visible_rows,
    visible_span,
    with_ends,
)
from sparse_decode.remainder import RunningMoments, StaticMoments
from sparse_decode.select import AttendingSelector, HashSelector, Rows, Selector

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
        length: of a static cache whose k and v are all its room, int64 [].
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
    length: Tensor | None = None


class Part(NamedTuple):
    """Query rows of a call that are worked on at once, and what is known of them before they select.

    Attributes:
        first, last: rows first..last-1, R of them.
        chosen: tokens that the selector is to choose for each, int64 [B, R].
        visible: tokens that each sees, int64 [B, R]; None in a step without a mask: all.
        counts: tokens that each reads, 0 where it is not sparse, int64 [B, R]; sparse: which are, bool [B, R]. None in
            a step.
        each, reads: in a step without a mask, `chosen` and what is read as numbers.
        sight, most: in a step with a mask, what it says, and the most that a row chooses; counted: what is counted so
            far, before and with it, but in a graph.
    """

    first: int
    last: int
    chosen: Tensor
    visible: Tensor | None = None
    counts: Tensor | None = None
    sparse: Tensor | None = None
    each: int | None = None
    reads: int = 0
    sight: Seen | None = None
    most: int | None = None
    counted: Counted | None = None


Kernel = Literal["gather", "flash"]
"""What attends to a selection: our own kernels, or torch's gather and flash-attn."""


class LayerPlan:
    """One sparse layer of one attachment.

    Attributes:
        tally: int64 [2] on the layer's device, tokens selected and visible so far, over sparse rows and query heads;
            those of steps without a mask, where they are numbers anyway, are kept apart. `counted` has the sum.
        sights: what masks say, shared with the other layers.
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
        sights: Sights | None = None,
        device: torch.device | None = None,
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
        self.encoder: Encoder = _encoder(selector, layer)
        self.tally: Tensor = torch.zeros(2, dtype=torch.int64, device=device)
        self.sights: Sights = sights or Sights()
        self.number: int = enrol(self)
        self._numbers: Tensor | None = None  # 0, 1, 2, ...: a count on the device is a view of it
        self._lock = Lock()
        self._chain: Counted | None = None
        self._heads = 0
        self._selected = self._visible = 0

    @property
    def weighs_itself(self) -> bool:
        """Whether the selector has an attention of its own."""
        return self._own is not None

    def counted(self) -> tuple[int, int]:
        """Return tokens selected and visible so far."""
        with self._lock:
            self._add_chain()
        selected, visible = self.tally.tolist()
        return selected + self._selected, visible + self._visible

    def forget_counts(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._chain = None
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
        if self.tally.device != x.q.device and not torch.compiler.is_compiling():
            self.tally = self.tally.to(x.q.device)
        if self._is_step(x):
            part = self._step(x)
            out = self._attend_part(x, part, x.moments or RunningMoments(), self.tally)
            # Where nobody can look, rows that are not sparse read all they see.
            return out, part.sight.sparse if part.sight is not None and readable(x.q) else None
        visible, sparse = self._rows(x)
        counts = self._counts(visible).masked_fill(~sparse, 0)
        return self._select_and_attend(x, visible, sparse, counts, self.tally), sparse

    def traces(self, x: Inputs) -> bool:
        """Say whether a compiled graph can hold a call as operators: a step of a static cache, by a hash of ours."""
        if not isinstance(self.selector, HashSelector) or x.mask is None or x.codes is None or x.length is None:
            return False
        ready = self.remainder is None or (isinstance(x.moments, StaticMoments) and x.moments.ready)
        placed = self.remainder is None or (x.q.device, x.scaling) in self._placed
        here = self.tally.device == x.q.device and self.kernel == "gather"
        return here and ready and placed and self._is_step(x) and self.selector.traceable(self.layer, x.q)

    def learn(self, k: Tensor, v: Tensor, mask: Tensor | None, moments: StaticMoments, scaling: float) -> None:
        """Sum a prompt's keys and values for the remainder of a static cache, so that no step has to catch up."""
        if self.remainder is not None:
            self._coefficients(k.device, scaling)  # a compiled step can hold them only if they are in place
            rows, n = (1 if mask is None else mask.shape[2]), k.shape[2]
            seen = None if mask is None else visible_rows(mask, rows - 1, rows, rows, n, k.device)
            moments.learn(k, v, None if seen is None else seen[:, 0, 0].expand(len(k), n))

    def _is_step(self, x: Inputs) -> bool:
        """Say whether a call is a step: every sequence has one row."""
        return x.q.shape[2] == 1 and self._own is None and self.rule.may_be_sparse(1, x.k.shape[2])

    def _step(self, x: Inputs) -> Part:
        """Return the one part of a step: what is the same for all rows is a number, and what differs is not looked at.

        After the rest of a model has filled the caches of a processor, each operation costs ten times its time; on a
        GPU nothing here waits for it.
        """
        n, ends = x.k.shape[2], sum(self._ends)
        if x.mask is None:
            reads = self.budget.count_row(n)
            each = max(0, reads - ends)
            return Part(0, 1, self._number(each, x.q), each=each, reads=reads)
        sight, counted = self._see(x, x.mask)
        most = max(self.budget.most(n), min(n, self.rule.start or 0))
        return Part(0, 1, sight.chosen, sight.visible, sight=sight, most=max(0, most - ends), counted=counted)

    def _number(self, count: int, q: Tensor) -> Tensor:
        """Return a count for each sequence, int64 [B, 1], without writing it to the device."""
        numbers = self._numbers
        if numbers is None or len(numbers) <= count or numbers.device != q.device:
            with ordinary_tensors():
                numbers = self._numbers = torch.arange(2 * count + 1024, device=q.device)
        return numbers[count].expand(q.shape[0], 1)

    def _see(self, x: Inputs, mask: Tensor) -> tuple[Seen, Counted | None]:
        """Describe what the rows of a step see, once for all layers."""
        batch, n = x.q.shape[0], x.k.shape[2]

        def count(visible: Tensor) -> tuple[Tensor, Tensor]:
            sparse = self.rule.rows(visible, 1, n)
            return torch.where(sparse, self._counts(visible), 0 if readable(visible) else visible), sparse

        def find() -> Seen:
            shown = visible_rows(mask, 0, 1, 1, n, x.q.device)
            assert shown is not None
            return see(shown.expand(batch, -1, -1, -1), count, *self._ends)

        if _in_graph(x.q.device):
            return find(), None
        return self.sights.of(mask, self.layer, (self.budget, self.rule), (batch, n), find)

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
            chosen = (counts[:, at] - sum(self._ends)).clamp(min=0)
            part = Part(first, last, chosen, visible[:, at], counts[:, at], sparse[:, at])
            if counts[:, at].any():
                pieces.append(self._attend_part(x, part, moments, tally))
            else:
                pieces.append(x.q.new_zeros(batch, last - first, hq, x.v.shape[3]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _attend_part(self, x: Inputs, part: Part, moments: RunningMoments | StaticMoments, tally: Tensor) -> Tensor:
        """Select, count what was selected, and attend to it, with the remainder if there is one: [B, R, Hq, Dv]."""
        rows = self._rows_of(x, part)
        indices = self._select(rows, part)
        self._count_selected(x, part, indices, tally)
        ends = self._unasked(part)
        if x.weights is not None or self.kernel == "flash":
            indices, ends = include(indices, rows.k.shape[2], ends), (0, 0)
        if x.weights is not None:
            found = attention_weights(rows.q, rows.k, indices, x.scaling, x.softcap, x.sinks)
            x.weights[:, :, part.first : part.last, : found.shape[-1]] = found
        left_out = None if self.remainder is None else self._left_out(x, part, indices, moments)
        return self._attend(x, rows, indices, left_out, ends)

    def _unasked(self, part: Part) -> tuple[int, int] | Tensor:
        """Say which tokens a part's selection lacks, because the attention reads them anyway."""
        if part.counts is not None or not self._exact or not any(self._ends):
            return 0, 0
        return self._ends if part.sight is None else part.sight.ends

    def _rows_of(self, x: Inputs, part: Part) -> Rows:
        n_queries, n, sight = x.q.shape[2], x.k.shape[2], part.sight
        if sight is None:
            seen = visible_rows(x.mask, part.first, part.last, n_queries, n, x.q.device)
        else:
            seen = sight.tokens[:, None, None]
        # Without a mask, these rows see nothing from there on.
        end = n if x.mask is not None else n - n_queries + part.last
        sink, recent = self._ends
        return Rows(
            self.layer,
            x.q[:, :, part.first : part.last],
            x.k[:, :, :end],
            None if x.codes is None else x.codes[:, :, :end],
            None if seen is None else seen[..., :end],
            part.chosen,
            x.scaling,
            x.softcap,
            x.sinks,
            part.each,
            sink,
            recent,
            part.most,
            None if sight is None else sight.candidates,
            self.budget.shortlist,
        )

    def _select(self, rows: Rows, part: Part) -> Tensor:
        """Choose tokens by the selector, sink and recent: int64 [B, H, R, K].

        In a step the attention adds the last two itself, if the selector is one that chooses no fewer and no others
        than it was asked for.
        """
        indices, n = self.selector.select(rows), rows.k.shape[2]
        if not any(self._ends) or (part.counts is None and self._exact):
            return indices
        if part.sight is not None:
            return merge(indices, part.sight.ends[:, None], n)
        if part.each is not None:
            return with_ends(indices, 0, n, *self._ends)
        return self._with_ends(indices, rows, part)

    def _with_ends(self, indices: Tensor, rows: Rows, part: Part) -> Tensor:
        """Put the tokens that several rows read anyway around what was selected of the others."""
        assert part.counts is not None
        (sink, recent), n = self._ends, rows.k.shape[2]
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
        found = None if part.counts is not None else moments.step(*rows, x.k, x.v, part.sight, x.length)
        if found is None:
            past = x.k.shape[2] - x.q.shape[2]
            places = past + part.first, past + part.last
            keys, values, seen = moments.rows(*rows, x.k, x.v, _unpadded(x, part.sight), *places)
            found = keys, values
            if x.mask is not None and part.counts is not None and part.visible is not None:
                _require_causal(seen, part.visible, (indices >= 0).any(-1).any(1))
        return LeftOut(coefficients, *found, part.visible)

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
        self, x: Inputs, rows: Rows, indices: Tensor, left_out: LeftOut | None, ends: tuple[int, int] | Tensor
    ) -> Tensor:
        """Attend to what was selected: [B, Q, Hq, Dv]."""
        q = rows.q
        if self._own is not None:
            return self._own.attend(rows, x.v[:, :, : rows.k.shape[2]], indices)
        if self.kernel == "flash":
            flash.refuse(x.mask, x.sinks, 0.0)
            return flash.attend(q, x.k, x.v, indices, x.scaling, x.softcap)
        if x.host is not None:
            read = include(indices, x.k.shape[2], ends) if readable(indices) else indices
            x.host.cross(int((read >= 0).sum()) if readable(indices) else indices.numel())
        return attend(q, x.k, x.v, indices, x.scaling, softcap=x.softcap, sinks=x.sinks, left_out=left_out, ends=ends)

    def _count_selected(self, x: Inputs, part: Part, indices: Tensor, tally: Tensor) -> None:
        """Count a selection [B, H, R, K], once for each query head that shares it."""
        batch, hq = x.q.shape[:2]
        if part.each is not None:
            all_asked = batch * hq * part.reads
            chosen = all_asked if self._exact else int((indices >= 0).sum()) * (hq // indices.shape[1])
            return self._count_numbers(chosen, batch * hq * x.k.shape[2])
        if part.sight is not None and self._exact:
            return self._count_step(part.sight, part.counted, hq, tally)
        sparse = part.sparse if part.sight is None else part.sight.sparse
        assert sparse is not None
        assert part.visible is not None
        return self._count((indices >= 0).sum((1, 3)) * (hq // indices.shape[1]), part.visible * hq, sparse, tally)

    def _count_step(self, sight: Seen, counted: Counted | None, heads: int, tally: Tensor) -> None:
        """Count a step with a mask, by its link in the chain of all steps; a graph has no such chain."""
        if counted is None:
            tally.add_(sight.totals, alpha=heads)
            return
        with self._lock:
            chain, self._heads = self._chain, heads
            if chain is not None and chain.after is not counted.before:
                self._add_chain()
                chain = None
            self._chain = counted if chain is None else Counted(chain.before, counted.after)

    def _add_chain(self) -> None:
        if self._chain is not None:
            self.tally.add_((self._chain.after - self._chain.before).to(self.tally.device), alpha=self._heads)
            self._chain = None

    def _count(self, selected: Tensor, visible: Tensor, sparse: Tensor, tally: Tensor) -> None:
        """Add the tokens that the sparse rows selected and saw, [B, Q], summed over query heads."""
        tally.add_(torch.stack([(x * sparse).sum() for x in (selected, visible)]).to(tally.device))


def _in_graph(device: torch.device) -> bool:
    """Say whether what is done now is written down, to be done again without Python."""
    if torch.compiler.is_compiling() or device.type != "cuda" or not torch.cuda.is_initialized():
        return torch.compiler.is_compiling()
    return torch.cuda.is_current_stream_capturing()


def _encoder(selector: Selector, layer: int) -> Encoder:
    if not isinstance(selector, HashSelector):
        return Encoder(lambda k: selector.encode_keys(layer, k))
    return Encoder(
        lambda k: selector.encode_keys(layer, k),
        lambda k, codes, at: selector.write_codes(layer, k, codes, at),
        lambda k: selector.traceable(layer, k),
    )


def trim(
    k: Tensor, v: Tensor, codes: Tensor | None, length: Tensor | int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Drop the room that a static cache keeps for later tokens, from token `length` on."""
    if length is None:
        return k, v, codes
    n = int(length)
    return k[:, :, :n], v[:, :, :n], None if codes is None else codes[:, :, :n]


def _unpadded(x: Inputs, sight: Seen | None) -> Tensor | None:
    """Say which tokens the last row sees, bool [B, N]: all but padding, if the mask is causal."""
    n_queries, n = x.q.shape[2], x.k.shape[2]
    if x.mask is None or sight is not None:
        return None if sight is None else sight.tokens
    seen = visible_rows(x.mask, n_queries - 1, n_queries, n_queries, n, x.q.device)
    return None if seen is None else seen[:, 0, 0].expand(x.q.shape[0], n)


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
