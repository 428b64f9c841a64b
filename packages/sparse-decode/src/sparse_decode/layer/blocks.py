"""Query rows of a call, processed in blocks: which tokens each row sees, may select, and always reads.

A block is either the one row of each sequence in a decode step, or consecutive rows of any other call.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sparse_decode.budget import Tally
from sparse_decode.caches.offload import HostLayer
from sparse_decode.positions import Seen, last_row, visible_rows, with_ends
from sparse_decode.select import Rows
from sparse_decode.unselected.remainder import RunningMoments
from sparse_decode.unselected.static_moments import StaticMoments

Moments = RunningMoments | StaticMoments

_CHUNK_SCORES = 1 << 23  # scores per block, B x Hq x rows x N: 32 MiB of int32 or float32 at any context length


@dataclass(frozen=True)
class RowRule:
    """Which query rows may be sparse."""

    start: int | None
    """Rows from this position of their sequence on are sparse; None: the rows of decode steps are, calls of one row
    with a non-empty cache."""

    def may_be_sparse(self, n_queries: int, n: int) -> bool:
        """Whether a call of `n_queries` rows that ends at token `n` can contain a sparse row."""
        if self.start is not None:
            return n > self.start
        return n_queries == 1 < n

    def rows(self, visible: Tensor, n_queries: int, n: int) -> Tensor:
        """Return which rows are sparse, bool like `visible` [B, Q], the number of visible tokens of each row."""
        if self.start is None:
            # A row without visible tokens is left to dense attention. A step on CUDA gives it zeros, as torch's
            # attention does; the attention function then gives it what eager attention would.
            return (visible > 0) & self.may_be_sparse(n_queries, n)
        # Only visible tokens count, so a padded sequence turns sparse at the same position as without padding.
        return visible > self.start


@dataclass(frozen=True)
class AttentionArgs:
    """The arguments of one attention call, with keys and values trimmed to the tokens in the cache.

    Attributes:
        q: [B, Hq, Q, D]; k: [B, Hkv, N, D]; v: [B, Hkv, N, Dv]; mask: [B or 1, 1, Q, N or more] or None for causal.
        codes: int32 [B, H, N, W], None if the selector needs none.
        host: the cache layer, if k and v are in host memory.
        scaling, softcap, sinks: as in `attend`.
        moments: running sums over the keys and values, if the cache stores them.
        length: number of tokens, int64 [], of a static cache if k and v are its whole buffers.
        all_rows: rows that are not sparse are computed, too, over all visible tokens; else the caller does that.
        planes: of a step's queries, as `Rows.planes`, if they were hashed with the new keys.
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
    length: Tensor | None = None
    all_rows: bool = False
    planes: tuple[Tensor, tuple[int, ...]] | None = None

    def seen(self, first: int, last: int) -> Tensor | None:
        """Return which tokens query rows first..last-1 see, bool [B or 1, 1, R, N]; None if all see all."""
        return visible_rows(self.mask, first, last, self.q.shape[2], self.k.shape[2], self.q.device)


@dataclass(frozen=True)
class Block:
    """Consecutive query rows of a call, the input of the selector; in a decode step, the one row of each sequence.

    Attributes:
        visible: number of tokens that each row sees, int64 [B, R]; None in a decode step without a mask: all.
        sparse: which rows are sparse, bool [B, R]; None if all are.
        reads: number of tokens that each row reads in a head, int64 [B, R], 0: computed elsewhere; None in a step.
        first: position of the first row in the call.
        sight, known: in a decode step, what each row sees, with a mask; `Budget.count_heads`, without one.
    """

    rows: Rows
    visible: Tensor | None = None
    sparse: Tensor | None = None
    reads: Tensor | None = None
    first: int = 0
    sight: Seen | None = None
    known: list[int] | None = None

    def complete(self, indices: Tensor, exact: bool) -> tuple[Tensor, tuple[int, int] | Tensor]:
        """Add sink and recent tokens to a selection [B, H, R, K].

        In a step of an `exact` selector, which always fills its budget, the attention kernel reads them itself. They
        are then the second result, the `ends` of `attend`.
        """
        rows, sight = self.rows, self.sight
        if not rows.sink + rows.recent:
            return indices, (0, 0)
        if exact and self.reads is None:
            return indices, (rows.sink, rows.recent) if sight is None else sight.ends
        starts, ends = rows.span()
        if self.reads is not None:
            starts = torch.where(self.reads > 0, starts, ends)  # rows that are computed elsewhere read nothing
        return with_ends(indices, starts, ends, rows.sink, rows.recent), (0, 0)

    def count(self, tally: Tally, indices: Tensor, exact: bool) -> None:
        """Add the tokens read to the tally; in a step of an `exact` selector, their number is that of the budget."""
        (batch, hq), n = self.rows.q.shape[:2], self.rows.k.shape[2]
        if exact and self.sight is not None:
            return tally.add_step(self.sight.totals, hq // self.rows.heads)
        if exact and self.known is not None:
            return tally.add(batch * hq * sum(self.known) // len(self.known), batch * hq * n)
        found = (indices >= 0).sum((1, 3)) * (hq // indices.shape[1])  # once for each query head that shares them
        visible = torch.full_like(found, n) if self.visible is None else self.visible
        return tally.add_rows(found, visible * hq, self.sparse)

    def stand_in(self, x: AttentionArgs, slopes: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return mean keys and values of all visible tokens (eq. 16), by one kernel if only one token is new.

        The third result is the number of these tokens, int64 [B, R]; None for all.
        Raises: ValueError if the mask of a row is not causal apart from padding.
        """
        if self.reads is None and (found := moments.step(x.q, slopes, x.k, x.v, self.sight, x.length)) is not None:
            return *found, self.visible
        (batch, _, n, _), q = x.k.shape, self.rows.q
        first = n - x.q.shape[2] + self.first
        seen = last_row(x.mask, batch, n) if self.sight is None else self.sight.tokens
        *means, summed = moments.rows(q, slopes, x.k, x.v, seen, first, first + q.shape[2])
        if x.mask is not None and self.reads is not None:
            _require_causal(summed, cast(Tensor, self.visible), self.reads > 0)
        return means[0], means[1], self.visible


def _require_causal(summed: Tensor, visible: Tensor, used: Tensor) -> None:
    """Raise ValueError unless the mask of `used` rows is causal: the sums cover all earlier tokens except padding."""
    if ((summed != visible) & used).any():
        raise ValueError(
            "the remainder needs a causal mask, optionally with padding, got one that hides other tokens; "
            "attach with remainder=False"
        )


def rows_at_once(batch: int, query_heads: int, n: int) -> int:
    """Return the number of query rows per block, for `n` tokens."""
    return max(1, _CHUNK_SCORES // max(1, batch * query_heads * n))
