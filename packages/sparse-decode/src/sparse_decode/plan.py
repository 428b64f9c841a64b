"""One sparse layer of an attachment: selection, counting and attention, block by block."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from sparse_decode import flash
from sparse_decode.attend import LeftOut, attend, attention_weights
from sparse_decode.blocks import AttentionArgs, Block, Blocks, Moments, RowRule
from sparse_decode.budget import Budget, Tally
from sparse_decode.cache_encoder import Encoder
from sparse_decode.cuda_step import CudaStep
from sparse_decode.dense_step import attend_visible, with_means
from sparse_decode.fused import FusedStep
from sparse_decode.modes import ordinary_tensors, readable
from sparse_decode.opaque import register
from sparse_decode.positions import Sights, include, last_row
from sparse_decode.remainder import Coefficients, RunningMoments
from sparse_decode.select import AttendingSelector, HashSelector, Selector
from sparse_decode.static_moments import StaticMoments

Backend = Literal["gather", "flash"]
"""The attention over a selection: our own kernels, or torch's gather and flash-attn."""


class LayerPlan:
    """One sparse layer of one attachment.

    Attributes:
        own: the selector, if it computes attention itself.
        tally: numbers of tokens selected and visible.
        blocks: splits calls into blocks of rows.
        remainder: coefficients of the remainder; None: none is added.
        steps: what runs plain decode steps as a whole, by the type of their device.
        encoder: hashes the layer's keys.
        number: the number by which a compiled graph refers to this plan.
        unused: a tensor without meaning for `opaque.attend_step`.
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
        self.own: AttendingSelector | None = selector if isinstance(selector, AttendingSelector) else None
        ends = (0, 0) if self.own else (budget.sink, budget.recent)  # sink and recent tokens
        self.blocks: Blocks = Blocks(layer, budget, rule, *ends, sights or Sights())
        self.remainder: Coefficients | None = None if remainder is None else Coefficients(remainder)
        self.tally: Tally = Tally(device)
        self.number: int = register(self)
        self.unused: Tensor = torch.zeros(1, device=device)
        self._start = 1 if rule.start is None else rule.start
        in_place: tuple[Any, ...] = ()
        self.steps: dict[str, FusedStep | CudaStep] = {}
        if isinstance(selector, HashSelector):
            in_place = partial(selector.write_codes, layer), partial(selector.traceable, layer)
            shortest = max(self._start + 1, cast(int, budget.dense_below))  # context of a sparse step
            given = layer, selector, budget, shortest, self.remainder, self.tally
            self.steps = {"cpu": FusedStep(*given), "cuda": CudaStep(*given)} if backend == "gather" else {}
        lists = budget.shortlist is not None
        self.encoder: Encoder = Encoder(partial(selector.encode_keys, layer), *in_place, lists=lists)

    def all_dense(self, n: int) -> bool:
        """Whether a call that ends at token `n` is below `dense_below`, so that all of its rows are dense."""
        return n < cast(int, self.budget.dense_below)

    def count_short(self, rows: int, n: int) -> None:
        """Count a dense decode step over `n` tokens; rows: sequences times query heads."""
        if n > self._start:
            self.tally.add(rows * n, rows * n)

    def count_dense(self, x: AttentionArgs) -> None:
        """Count a call that was dense because of `dense_below`."""
        (batch, hq, n_queries, _), n = x.q.shape, x.k.shape[2]
        if x.mask is None and n_queries == 1:
            return self.count_short(batch * hq, n)
        visible, sparse = self.blocks.seen(x)
        return self.tally.add_rows(visible * hq, visible * hq, sparse)

    def attend(self, x: AttentionArgs) -> tuple[Tensor, Tensor | None]:
        """Attend sparsely in the rows that the rule makes sparse.

        Returns: [B, Q, Hq, Dv], with zeros in the other rows unless `x.all_rows`; and which rows were sparse, bool
            [B, Q]; None if all were, or if the host would have to wait for the device.
        """
        if self.tally.tensor.device != x.q.device and not torch.compiler.is_compiling():
            with ordinary_tensors():
                self.tally.tensor = self.tally.tensor.to(x.q.device)
        moments = x.moments or RunningMoments()
        if self._is_step(x):
            block = self.blocks.step(x)
            return self._attend_block(x, block, moments), block.sparse if readable(x.q) else None
        visible, sparse = self.blocks.seen(x)
        pieces = [self._attend_block(x, block, moments) for block in self.blocks.others(x, visible, sparse)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1), sparse

    def _is_step(self, x: AttentionArgs) -> bool:
        """Whether a call is a decode step: one row per sequence."""
        return x.q.shape[2] == 1 and self.own is None and self.rule.may_be_sparse(1, x.k.shape[2])

    def traces(self, x: AttentionArgs) -> bool:
        """Whether a compiled graph can contain a call as operators: a decode step with a static cache and our hash."""
        if not isinstance(self.selector, HashSelector) or x.mask is None or x.codes is None or x.length is None:
            return False
        ready = self.remainder is None or (isinstance(x.moments, StaticMoments) and x.moments.ready)
        placed = self.remainder is None or self.remainder.are_on(x.q.device, x.scaling)
        here = self.tally.tensor.device == x.q.device and self.backend == "gather" and self.budget.values == 1
        return here and ready and placed and self._is_step(x) and self.selector.traceable(self.layer, x.q)

    def learn(self, k: Tensor, v: Tensor, mask: Tensor | None, moments: StaticMoments, scaling: float) -> None:
        """Add a prompt's keys and values to the remainder's sums of a static cache, so that no later step has to."""
        if self.remainder is not None:
            self.remainder.on(k.device, scaling)  # a compiled step needs them on the device already
            moments.learn(k, v, last_row(mask, len(k), k.shape[2]))

    def run(self, *given: Any) -> Tensor:
        """Run a step of a compiled graph, [B, Q, Hq, Dv]; rows that are not sparse attend to all visible tokens.

        Args: those of `opaque.attend_step`, in its order, without the number of this plan.
        """
        q, room_k, room_v, room_codes, mask, length, sinks, sums, scaling, softcap = given
        k, v, codes = trim(room_k, room_v, room_codes, length)
        if codes is None and self.selector.needs_codes:
            codes = self.encoder(k)
        moments = StaticMoments(sums) if sums else None
        x = AttentionArgs(q, k, v, mask, codes, None, scaling, softcap, sinks, moments, all_rows=True)
        if self.all_dense(k.shape[2]) and softcap is None and sinks is None:
            self.count_dense(x)
            out = attend_visible(q, k, v, x.seen(0, q.shape[2]), scaling)
        else:
            out, _ = self.attend(x)
        if mask is None or mask.dtype == torch.bool or sinks is not None:  # such a row attends to the sink alone
            return out
        return with_means(out, room_v, self.blocks.seen(x)[0] > 0)

    def _attend_block(self, x: AttentionArgs, block: Block, moments: Moments) -> Tensor:
        """Select tokens, count them, and attend to them, with the remainder if there is one: [B, R, Hq, Dv]."""
        rows, n = block.rows, block.rows.k.shape[2]
        if block.reads is not None and not block.reads.any():
            return x.q.new_zeros(len(x.q), rows.q.shape[2], x.q.shape[1], x.v.shape[3])
        indices, ends = block.complete(self.selector.select(rows), self._exact)
        block.count(self.tally, indices, self._exact)
        if x.weights is not None:
            found = attention_weights(rows.q, rows.k, include(indices, n, ends), x.scaling, x.softcap, x.sinks)
            x.weights[:, :, block.first : block.first + found.shape[2], :n] = found
        if self.own is not None:
            return self.own.attend(rows, x.v[:, :, :n], indices)
        if self.backend == "flash":
            flash.refuse(x.mask, x.sinks, 0.0)
            return flash.attend(rows.q, x.k, x.v, include(indices, n, ends), x.scaling, x.softcap)
        if x.host is not None:
            x.host.cross(indices, ends)
        left_out = None
        if self.remainder is not None:
            coefficients, slopes = self.remainder.on(x.q.device, x.scaling)
            left_out = LeftOut(coefficients, *block.stand_in(x, slopes, moments))
        how = {"softcap": x.softcap, "sinks": x.sinks, "left_out": left_out, "ends": ends}
        return attend(rows.q, x.k, x.v, indices, x.scaling, values=self.budget.values, **how)


def trim(
    k: Tensor, v: Tensor, codes: Tensor | None, length: Tensor | int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Trim keys, values and codes of a static cache to its first `length` tokens."""
    if length is None:
        return k, v, codes
    n = int(length)
    return k[:, :, :n], v[:, :, :n], None if codes is None else codes[:, :, :n]
