"""One sparse layer of an attachment: a plain step in few operations, and any other call block by block."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from hashcore.cuda.launch import lane
from hashcore.torch_ops import OPERATORS as SEARCH
from hashtrain.layers import LayerHasher
from torch import Tensor

from sparse_decode.attention import gather
from sparse_decode.attention.attend import attend
from sparse_decode.attention.attend_inputs import Inputs, LeftOut
from sparse_decode.budget import LayerBudget, Tally
from sparse_decode.caches.cache import CodedDynamicLayer, trim
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.opaque import register
from sparse_decode.hashing import encode_cuda
from sparse_decode.layer.blocks import AttentionArgs, Block, Moments, RowRule, rows_at_once
from sparse_decode.layer.dense_step import attend_visible, with_means
from sparse_decode.layer.fused import Fitted, FusedStep
from sparse_decode.modes import in_graph, ordinary_tensors, readable
from sparse_decode.positions import (
    Numbers,
    Seen,
    Sights,
    beside,
    count_visible,
    last_row,
    see,
    visible_rows,
    visible_span,
)
from sparse_decode.select import AttendingSelector, HashSelector, Rows, Selector
from sparse_decode.unselected.remainder import Coefficients, RunningMoments
from sparse_decode.unselected.static_moments import StaticMoments

PlainStep = Callable[[CodedDynamicLayer, Inputs, Fitted, list[int]], Tensor | None]
"""Runs a plain step, given `Budget.count_heads`. Returns None if it does not support the call."""


class LayerPlan:
    """One sparse layer of one attachment.

    Attributes:
        own: the selector, if it computes attention itself. tally: numbers of tokens selected and visible.
        sights: what rows see according to masks; shared by all layers.
        remainder: coefficients of the remainder; None: none is added.
        plain: what runs plain steps, by the type of their device. encoder: hashes the layer's keys.
        number: by which compiled graphs refer to this plan. unused: a tensor without meaning for `opaque.attend_step`.
    """

    def __init__(
        self, layer: int, selector: Selector, budget: LayerBudget, rule: RowRule, remainder: Tensor | None = None,
        sights: Sights | None = None, device: torch.device | None = None,
    ):  # fmt: skip
        self.layer: int = layer
        self.selector: Selector = selector
        self.budget: LayerBudget = budget
        self.rule: RowRule = rule
        self._fills_counts = bool(getattr(selector, "fills_counts", False))
        self.own: AttendingSelector | None = selector if isinstance(selector, AttendingSelector) else None
        self._sink, self._recent = (0, 0) if self.own else (budget.sink, budget.recent)
        self.sights: Sights = sights or Sights()
        self._numbers: Numbers = Numbers()
        self.remainder: Coefficients | None = None if remainder is None else Coefficients(remainder)
        self.tally: Tally = Tally(device)
        self.number: int = register(self)
        self.unused: Tensor = torch.zeros(1, device=device)
        self._start = 1 if rule.start is None else rule.start
        hashed: tuple[Any, ...] = (partial(selector.encode_keys, layer),)
        self.plain: dict[str, PlainStep] = {}
        if isinstance(selector, HashSelector):
            hashed += partial(selector.write_codes, layer), partial(selector.traceable, layer)
            self._shortest = max(self._start + 1, cast(int, budget.dense_below))  # context of a sparse step
            self.plain["cpu"] = FusedStep(layer, selector, budget).run
            if (placed := selector.placed) is not None:
                whole = layer, placed, selector.per_query_head, budget, self._numbers
                self.plain["cuda"] = partial(_in_operators, *whole)
        self.encoder: Encoder = Encoder(*hashed)

    def all_dense(self, n: int) -> bool:
        """Whether a call that ends at token `n` is below `dense_below`, so that all of its rows are dense."""
        return n < cast(int, self.budget.dense_below)

    def count_short(self, rows: int, n: int) -> None:
        """Count a dense decode step over `n` tokens; rows: sequences times query heads."""
        if n > self._start:
            self.tally.add(rows * n, rows * n)

    def count_dense(self, x: AttentionArgs) -> None:
        """Count a call that was dense because of `dense_below`."""
        hq = x.q.shape[1]
        if x.mask is None and x.q.shape[2] == 1:
            return self.count_short(len(x.q) * hq, x.k.shape[2])
        visible, sparse = self.seen(x)
        return self.tally.add_rows(visible * hq, visible * hq, sparse)

    def step(self, held: object, x: Inputs) -> Tensor | None:
        """Run a plain decode step, [B, 1, Hq, Dv]: one new token per sequence, no mask, a growing cache.

        `attend` gives the same result but for rounding. The caller checks that there is one row and no mask.

        Args: held: the cache layer that stores k and v. Returns: None if the call is not supported here.
        """
        plain, n = self.plain.get(x.q.device.type), x.k.shape[2]
        if plain is None or n < self._shortest or not isinstance(held, CodedDynamicLayer) or held.on_host:
            return None
        if held.keys is not x.k or held.values is not x.v:
            return None
        here, rest = (x.q.device, x.scaling), self.remainder
        left_out = None if rest is None else rest.placed.get(here) or rest.on(*here)
        heads, reads = x.q.shape[0] * x.q.shape[1], self.budget.count_heads(n)
        out = plain(held, x, left_out, reads)
        if out is not None:
            self.tally.add(heads * sum(reads) // len(reads), heads * n)
        return out

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
            block = self._one_row(x)
            return self._attend_block(x, block, moments), block.sparse if readable(x.q) else None
        visible, sparse = self.seen(x)
        pieces = [self._attend_block(x, block, moments) for block in self._blocks(x, visible, sparse)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1), sparse

    def _is_step(self, x: AttentionArgs) -> bool:
        """Whether a call is a decode step: one row per sequence."""
        return x.q.shape[2] == 1 and self.own is None and self.rule.may_be_sparse(1, x.k.shape[2])

    def traces(self, x: AttentionArgs) -> bool:
        """Whether a compiled graph can contain a call as operators: a decode step with a static cache and our hash."""
        if not isinstance(self.selector, HashSelector) or x.mask is None or x.codes is None or x.length is None:
            return False
        ready = self.remainder is None or (isinstance(x.moments, StaticMoments) and x.moments.ready)
        placed = self.remainder is None or (x.q.device, x.scaling) in self.remainder.placed
        here = self.tally.tensor.device == x.q.device
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
        return with_means(out, room_v, self.seen(x)[0] > 0)

    def _one_row(self, x: AttentionArgs) -> Block:
        """Return the one block of a decode step, without waiting for the device.

        It has few tensor operations: after the other layers have filled the CPU's caches, each takes ten times as long.
        """
        n, ends = x.k.shape[2], self._sink + self._recent
        if x.mask is None:
            known = self.budget.count_heads(n)
            counts = _searched(known, ends)
            how = {"most": max(counts)} if len(counts) > 1 else {"uniform_count": counts[0]}
            return Block(self._rows(x, 0, 1, self._numbers.of(counts, x.q), None, **how), known=known)
        sight = self.see(x, x.mask)
        most = max(0, max(self.budget.most(n), min(n, self.rule.start or 0)) - ends)
        rows = self._rows(x, 0, 1, sight.chosen, sight.tokens[:, None, None], most=most, known_span=sight.span)
        return Block(rows, sight.visible, sight.sparse, sight=sight)

    def seen(self, x: AttentionArgs) -> tuple[Tensor, Tensor]:
        """Return the number of tokens that each row sees, int64 [B, Q], and which rows are sparse, bool [B, Q]."""
        (batch, hq, n_queries, _), n = x.q.shape, x.k.shape[2]
        visible = count_visible(x.mask, batch, n_queries, n, x.q.device, rows_at_once(batch, hq, n))
        return visible, self.rule.rows(visible, n_queries, n)

    def _blocks(self, x: AttentionArgs, visible: Tensor, sparse: Tensor) -> Iterator[Block]:
        """Split the rows of a call that is not a decode step; `visible` and `sparse` come from `seen`."""
        (batch, hq, n_queries, _), n = x.q.shape, x.k.shape[2]
        reads = self._reads(visible, sparse, x.all_rows)
        chosen, most = (reads - self._sink - self._recent).clamp(min=0), rows_at_once(batch, hq, n)
        of_a_head = reads if reads.ndim == 2 else reads[:, 0]
        for first in range(0, n_queries, most):
            at = slice(first, last := min(first + most, n_queries))
            seen = x.seen(first, last)
            span = None if seen is None else visible_span(seen)
            rows = self._rows(x, first, last, chosen[..., at], seen, known_span=span)
            yield Block(rows, visible[:, at], sparse[:, at], of_a_head[:, at], first)

    def _reads(self, visible: Tensor, sparse: Tensor, every: bool) -> Tensor:
        """Count what each row reads (`Budget.count`); rows that are not sparse read all they see if `every`, or 0."""
        counts = self.budget.count(visible, visible[:, -1:])
        return torch.where(beside(sparse, counts), counts, beside(visible, counts) if every else 0)

    def _rows(self, x: AttentionArgs, first: int, last: int, chosen: Tensor, seen: Tensor | None, **known: Any) -> Rows:
        """Return the input of the selector for query rows first..last-1, which select `chosen` (`Rows.counts`)."""
        n_queries, n = x.q.shape[2], x.k.shape[2]
        end = n if x.mask is not None else n - n_queries + last  # without a mask, these rows see no token from there on
        seen = None if seen is None else seen[..., :end]
        q, k, codes = x.q[:, :, first:last], x.k[:, :, :end], None if x.codes is None else x.codes[:, :, :end]
        known |= {"sink": self._sink, "recent": self._recent, "planes": x.planes}
        return Rows(self.layer, q, k, codes, seen, chosen, x.scaling, x.softcap, x.sinks, **known)

    def see(self, x: AttentionArgs, mask: Tensor) -> Seen:
        """Return what the rows of a decode step see; computed once for all layers, except in a compiled graph."""
        batch, n = x.q.shape[0], x.k.shape[2]

        def count(visible: Tensor) -> tuple[Tensor, Tensor]:
            sparse = self.rule.rows(visible, 1, n)
            # If the host cannot read `sparse`, rows that are not sparse read all visible tokens here.
            return self._reads(visible, sparse, x.all_rows or not readable(visible)), sparse

        def find() -> Seen:
            shown = visible_rows(mask, 0, 1, 1, n, mask.device)
            return see(cast(Tensor, shown).expand(batch, -1, -1, -1), count, self._sink, self._recent)

        if x.all_rows or torch.compiler.is_compiling():
            return find()
        # What was computed outside of a capture, or in another one, is not computed again when this one is replayed.
        capture = lane(x.q.device) if in_graph(x.q.device) else ()
        return self.sights.of(mask, self.layer, (self.budget, self.rule, batch, n, capture), find)

    def _attend_block(self, x: AttentionArgs, block: Block, moments: Moments) -> Tensor:
        """Select tokens, count them, and attend to them, with the remainder if there is one: [B, R, Hq, Dv]."""
        rows = block.rows
        if block.reads is not None and not block.reads.any():
            return x.q.new_zeros(len(x.q), rows.q.shape[2], x.q.shape[1], x.v.shape[3])
        indices, ends = block.complete(self.selector.select(rows), self._fills_counts)
        block.count(self.tally, indices, self._fills_counts)
        if self.own is not None:
            return self.own.attend(rows, x.v[:, :, : rows.k.shape[2]], indices)
        if x.host is not None:
            x.host.cross(indices, ends)
        left_out = None
        if self.remainder is not None:
            coefficients, slopes = self.remainder.on(x.q.device, x.scaling)
            left_out = LeftOut(coefficients, *block.stand_in(x, slopes, moments))
        how = {"softcap": x.softcap, "sinks": x.sinks, "left_out": left_out, "ends": ends}
        return attend(rows.q, x.k, x.v, indices, x.scaling, **how)


def _in_operators(
    layer: int, placed: encode_cuda.PlacedHasher, per_query_head: bool, budget: LayerBudget, numbers: Numbers,
    held: CodedDynamicLayer, x: Inputs, left_out: Fitted, reads: list[int],
) -> Tensor | None:  # fmt: skip
    """Run a plain step on a GPU (`PlainStep`), with one operator each to encode, select, add to the sums and attend."""
    q, k, v, *options = x
    n, ends = k.shape[2], (budget.sink, budget.recent)
    own = placed.layer(layer, q.device)
    if not _fits(own, x) or not (left_out is None or held.moments.cover(q, k)):
        return None
    room, missing = held.room_for_code()
    if missing is None:
        return None
    planes, of_planes = encode_cuda.step(own, k[:, :, n - 1 :], room[:, :, n - 1 : n], q, per_query_head)
    missing.length += 1
    among, counts = (None, None, n, 0, *ends, False, None), _searched(reads, sum(ends))
    by_head = numbers.of(counts, q) if len(counts) > 1 else None
    indices = SEARCH.search(planes, room[:, :, None, :n], max(counts), by_head, of_planes, *among)[1]
    rest: tuple[Tensor | None, ...] = (None,) * 4
    if left_out is not None:
        rest = left_out[0], *held.moments.step_on_device(q, left_out[1], k, v), None
    return gather.OPERATORS.gather(q, k, v, indices, *options, *rest, *ends, None)


def _searched(reads: list[int], ends: int) -> list[int]:
    """Return how many tokens each head selects, given how many it reads and how many of these are always read."""
    return [max(0, each - ends) for each in reads]


def _fits(own: LayerHasher, x: Inputs) -> bool:
    """Whether operators support the tensors of a plain step and a layer's hash functions."""
    q, k, v = x[:3]
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    sizes = (q.shape[1], k.shape[1], v.shape[1], k.shape[3]) == (own.hq, own.hkv, own.hkv, own.d)
    return alike and sizes and not (k.requires_grad or v.requires_grad) and encode_cuda.supports(own, q)
