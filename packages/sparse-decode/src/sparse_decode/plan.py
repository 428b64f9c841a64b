"""One sparse layer of an attachment: selection, counting and attention, block by block."""

from __future__ import annotations

from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_decode import flash
from sparse_decode.attend import LeftOut, attend, attention_weights
from sparse_decode.blocks import AttentionArgs, Blocks, RowRule, SomeRows, Step, rows_at_once
from sparse_decode.budget import Budget, Tally
from sparse_decode.cache import CodedDynamicLayer, Encoder
from sparse_decode.fused import FusedStep
from sparse_decode.modes import ordinary_tensors
from sparse_decode.opaque import register
from sparse_decode.positions import Sights, include, readable, visible_rows
from sparse_decode.remainder import RunningMoments, StaticMoments
from sparse_decode.select import AttendingSelector, HashSelector, Rows, Selector

Backend = Literal["gather", "flash"]
"""The attention over a selection: our own kernels, or torch's gather and flash-attn."""


class LayerPlan:
    """One sparse layer of one attachment.

    Attributes:
        tally: numbers of tokens selected and visible.
        blocks: splits calls into blocks of rows.
        remainder: coefficients [Hq, 5] of the remainder's weight (eq. 15); None: no remainder is added.
        number: the number by which a compiled graph refers to this plan.
    """

    def __init__(
        self,
        layer: int,
        selector: Selector,
        budget: Budget,
        rule: RowRule,
        remainder: Tensor | None = None,
        backend: Backend = "gather",
        sights: Sights | None = None,
        device: torch.device | None = None,
    ):
        self.layer: int = layer
        self.selector: Selector = selector
        self.budget: Budget = budget
        self.rule: RowRule = rule
        self.backend: Backend = backend
        self._exact = bool(getattr(selector, "fills_counts", False))
        self._own = selector if isinstance(selector, AttendingSelector) else None
        ends = (0, 0) if self._own else (budget.sink, budget.recent)  # sink and recent tokens
        self.blocks: Blocks = Blocks(layer, budget, rule, *ends, sights or Sights())
        self.remainder: Tensor | None = None if remainder is None else remainder[:, :-1].float().contiguous()
        self._slopes: Tensor | None = None if remainder is None else remainder[:, -1].float().clone()
        self._placed: dict[tuple[torch.device, float], tuple[Tensor, Tensor]] = {}
        self.encoder: Encoder = _encoder(selector, layer)
        self.tally: Tally = Tally(torch.zeros(2, dtype=torch.int64, device=device))
        self.number: int = register(self)
        self._start = 1 if rule.start is None else rule.start
        self._sparse_from = max(self._start + 1, cast(int, budget.dense_below))  # shortest context of a sparse step
        self._fused: FusedStep | None = None
        if backend == "gather" and isinstance(selector, HashSelector):
            self._fused = FusedStep(layer, selector, budget)

    @property
    def weighs_itself(self) -> bool:
        """Whether the selector computes attention itself."""
        return self._own is not None

    def all_dense(self, n: int) -> bool:
        """Whether a call that ends at token `n` is below `dense_below`, so that all of its rows are dense."""
        return n < cast(int, self.budget.dense_below)

    def rows_at_once(self, batch: int, query_heads: int, rows: int, n: int) -> int:
        """Return the number of a call's query rows per block, for `n` tokens."""
        return min(rows, rows_at_once(batch, query_heads, n))

    def count_short(self, rows: int, n: int) -> None:
        """Count a dense decode step over `n` tokens; rows: sequences times query heads."""
        if n > self._start:
            self.tally.add(rows * n, rows * n)

    def count_dense(self, x: AttentionArgs, tally: Tally | None = None) -> None:
        """Count a call that was dense because of `dense_below`."""
        (batch, hq, n_queries, _), n, tally = x.q.shape, x.k.shape[2], tally or self.tally
        if x.mask is None and n_queries == 1:  # a decode step, which the caller has checked may be sparse
            return tally.add(batch * hq * n, batch * hq * n)
        visible, sparse = self.blocks.seen(x)
        tally.add_rows(visible * hq, visible * hq, sparse)

    def attend_at_once(
        self,
        held: object,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | None:
        """Run a decode step without a mask in one kernel call: [B, 1, Hq, Dv]; None if only `attend` supports it.

        Args: as in `AttentionArgs`; held: the cache layer that stores k and v.
        """
        fused, n = self._fused, k.shape[2]
        if (
            fused is None
            or q.device.type != "cpu"
            or not isinstance(held, CodedDynamicLayer)
            or held.on_host
            or held.keys is not k
            or held.values is not v
        ):
            return None
        if n < self._sparse_from:
            return None
        left_out = None if self.remainder is None else self._coefficients(q.device, scaling)
        out = fused.attend(held, q, k, v, scaling, softcap, sinks, left_out)
        if out is not None:
            heads = len(q) * q.shape[1]
            self.tally.add(heads * self.budget.count_row(n), heads * n)
        return out

    def attend(self, x: AttentionArgs, tally: Tally | None = None) -> tuple[Tensor, Tensor | None]:
        """Attend sparsely in the rows that the rule makes sparse.

        Returns: [B, Q, Hq, Dv], with zeros in the other rows unless `x.all_rows`; and which rows were sparse, bool
            [B, Q]; None if all were, or if the host would have to wait for the device.
        """
        tally = tally or self.tally
        if tally.tensor.device != x.q.device and not torch.compiler.is_compiling():
            tally.tensor = tally.tensor.to(x.q.device)
        moments = x.moments or RunningMoments()
        if self._is_step(x):
            block = self.blocks.step(x)
            sparse = block.sight.sparse if block.sight is not None and readable(x.q) else None
            return self._attend_block(x, block, moments, tally), sparse
        visible, sparse = self.blocks.seen(x)
        pieces = [
            self._attend_block(x, block, moments, tally) if block.counts.any() else self._nothing(x, block)
            for block in self.blocks.others(x, visible, sparse)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1), sparse

    def traces(self, x: AttentionArgs) -> bool:
        """Whether a compiled graph can contain a call as operators: a decode step with a static cache and our hash."""
        if not isinstance(self.selector, HashSelector) or x.mask is None or x.codes is None or x.length is None:
            return False
        ready = self.remainder is None or (isinstance(x.moments, StaticMoments) and x.moments.ready)
        placed = self.remainder is None or (x.q.device, x.scaling) in self._placed
        here = self.tally.tensor.device == x.q.device and self.backend == "gather" and self.budget.values == 1
        return here and ready and placed and self._is_step(x) and self.selector.traceable(self.layer, x.q)

    def learn(self, k: Tensor, v: Tensor, mask: Tensor | None, moments: StaticMoments, scaling: float) -> None:
        """Add a prompt's keys and values to the remainder's sums of a static cache, so that no later step has to."""
        if self.remainder is not None:
            self._coefficients(k.device, scaling)  # a compiled step needs them on the device already
            rows, n = (1 if mask is None else mask.shape[2]), k.shape[2]
            seen = None if mask is None else visible_rows(mask, rows - 1, rows, rows, n, k.device)
            moments.learn(k, v, None if seen is None else seen[:, 0, 0].expand(len(k), n))

    def _is_step(self, x: AttentionArgs) -> bool:
        """Whether a call is a decode step: one row per sequence."""
        return x.q.shape[2] == 1 and self._own is None and self.rule.may_be_sparse(1, x.k.shape[2])

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
        """Run a step of a compiled graph, [B, Q, Hq, Dv]; rows that are not sparse attend to all visible tokens."""
        room = v
        k, v, codes = trim(k, v, codes, length)
        if codes is None and self.selector.needs_codes:
            codes = self.encoder(k)
        moments = StaticMoments(sums) if sums else None
        x = AttentionArgs(q, k, v, mask, codes, None, scaling, softcap, sinks, moments, all_rows=True)
        counted = Tally(tally)
        if self.all_dense(k.shape[2]) and softcap is None and sinks is None:
            self.count_dense(x, counted)
            out = _dense(x)
        else:
            out, _ = self.attend(x, counted)
        if mask is None or mask.dtype == torch.bool or sinks is not None:  # such a row attends to the sink alone
            return out
        return _blind(out, room, self.blocks.seen(x)[0] > 0)

    def _attend_block(
        self, x: AttentionArgs, block: Step | SomeRows, moments: RunningMoments | StaticMoments, tally: Tally
    ) -> Tensor:
        """Select tokens, count them, and attend to them, with the remainder if there is one: [B, R, Hq, Dv].

        In a decode step, if the selector always fills its budget, sink and recent tokens are not added to the indices:
        the attention kernel reads them itself.
        """
        rows = block.rows
        indices, ends = self.selector.select(rows), (0, 0)
        if self.blocks.any_ends:
            if self._exact and isinstance(block, Step):
                ends = block.ends
            else:
                indices = block.complete(indices)
        block.count(tally, indices, self._exact)
        if x.weights is not None or self.backend == "flash":
            indices, ends = include(indices, rows.k.shape[2], ends), (0, 0)
        if x.weights is not None:
            found = attention_weights(rows.q, rows.k, indices, x.scaling, x.softcap, x.sinks)
            at = block.first if isinstance(block, SomeRows) else 0
            x.weights[:, :, at : at + found.shape[2], : found.shape[-1]] = found
        left_out = None
        if self.remainder is not None:
            coefficients, slopes = self._coefficients(x.q.device, x.scaling)
            left_out = LeftOut(coefficients, *block.stand_in(x, slopes, moments, indices))
        return self._attend(x, rows, indices, left_out, ends)

    def _nothing(self, x: AttentionArgs, block: SomeRows) -> Tensor:
        return x.q.new_zeros(x.q.shape[0], block.last - block.first, x.q.shape[1], x.v.shape[3])

    def _coefficients(self, device: torch.device, scaling: float) -> tuple[Tensor, Tensor]:
        """Return the remainder's coefficients, and its slopes times `scaling`; copied to the device once."""
        assert self.remainder is not None
        assert self._slopes is not None
        if (known := self._placed.get((device, scaling))) is None:
            with ordinary_tensors():  # they outlive torch modes of this call
                known = self.remainder.to(device), (self._slopes * scaling).to(device)
            self._placed[device, scaling] = known
        return known

    def _attend(
        self, x: AttentionArgs, rows: Rows, indices: Tensor, left_out: LeftOut | None, ends: tuple[int, int] | Tensor
    ) -> Tensor:
        """Attend to the selection: [B, Q, Hq, Dv]."""
        q = rows.q
        if self._own is not None:
            return self._own.attend(rows, x.v[:, :, : rows.k.shape[2]], indices)
        if self.backend == "flash":
            flash.refuse(x.mask, x.sinks, 0.0)
            return flash.attend(q, x.k, x.v, indices, x.scaling, x.softcap)
        if x.host is not None:
            read = include(indices, x.k.shape[2], ends) if readable(indices) else indices
            x.host.cross(int((read >= 0).sum()) if readable(indices) else indices.numel())
        how = {"softcap": x.softcap, "sinks": x.sinks, "left_out": left_out, "ends": ends}
        return attend(q, x.k, x.v, indices, x.scaling, values=self.budget.values, **how)


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
    """Trim keys, values and codes of a static cache to its first `length` tokens."""
    if length is None:
        return k, v, codes
    n = int(length)
    return k[:, :, :n], v[:, :, :n], None if codes is None else codes[:, :, :n]


def _dense(x: AttentionArgs) -> Tensor:
    """Attend to all visible tokens with torch's own attention: [B, Q, Hq, Dv]."""
    seen = x.seen(0, x.q.shape[2])
    out = F.scaled_dot_product_attention(x.q, x.k, x.v, seen, scale=x.scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def _blind(out: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Set rows of out [B, Q, Hq, Dv] without visible tokens to the mean of all values, as eager attention does.

    Its mask adds the most negative number of the dtype to each logit, so that all logits become equal.
    """
    if sees.all():
        return out
    mean = v.float().mean(2).repeat_interleave(out.shape[2] // v.shape[1], 1).to(out.dtype)
    return torch.where(sees[..., None, None], out, mean[:, None])
