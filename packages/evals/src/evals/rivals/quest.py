"""Quest (Tang et al. 2024, arXiv 2406.10774): pages of keys, ranked by an upper bound of their logits.

1. A page is 16 successive tokens; it keeps, per dimension, the least and the greatest of its keys.
2. score(page) = sum_d max(q_d least_d, q_d greatest_d), which no logit of the page exceeds.
3. A row attends to whole pages: the one in progress, which holds its own token, and the best others.
"""

from __future__ import annotations

import torch
from sparse_decode import Rows
from sparse_decode.oracle import best_floats
from sparse_decode.select import NoCodes
from torch import Tensor

from evals.rivals.seen import listed, ranks, seen_by


class QuestSelector(NoCodes):
    """Selects pages of tokens.

    A row of a budget of k tokens attends to max(3, k // page) pages, the page in progress among them, or to all it has.
    That is not k tokens: compare by measured density. Rows whose budget is all they see attend to all of it.

    Args:
        per_query_head: one set per query head, as published; else one per KV head by the group's summed scores.
        page: tokens of a page.
        dense_rows: rows that see at most this many tokens attend to all of them (the first 128 of a text, as in its
            perplexity protocol). See `after_prompt`.
        min_pages: the fewest pages of a sparse row.
    """

    per_query_head: bool
    page: int
    dense_rows: int
    min_pages: int

    def __init__(self, per_query_head: bool = False, page: int = 16, dense_rows: int = 128, min_pages: int = 3):
        if page < 1 or dense_rows < 0 or min_pages < 1:
            raise ValueError(
                f"page and min_pages must be 1 or more, dense_rows 0 or more, got {page}, {min_pages}, {dense_rows}"
            )
        self.per_query_head, self.page, self.dense_rows, self.min_pages = per_query_head, page, dense_rows, min_pages

    def after_prompt(self, tokens: int) -> QuestSelector:
        """Return the selector of rows behind a dense prompt: each takes its pages, however short the prompt was."""
        return QuestSelector(self.per_query_head, self.page, 0, self.min_pages)

    def select(self, rows: Rows) -> Tensor:
        """Choose whole pages, int64 [B, Hq or Hkv, Q, K]; see `Selector`."""
        seen = seen_by(rows)
        total = seen.sum(-1)  # [B, Q]
        pages = ranks(seen).clamp(min=0) // self.page  # [B, N]
        current = (total - 1).clamp(min=0) // self.page  # the page in progress
        wanted = (rows.counts // self.page).clamp(min=self.min_pages).minimum(current + 1)
        wanted = torch.where((rows.counts >= total) | (total <= self.dense_rows), current + 1, wanted)
        wanted = wanted.masked_fill(rows.counts == 0, 0)
        scores = self._scores(rows, seen.any(1), pages)
        numbers = torch.arange(scores.shape[-1], device=scores.device)
        at = current[:, None, :, None]
        scores = scores.masked_fill(numbers == at, torch.inf).masked_fill(numbers > at, -torch.inf)
        chosen = best_floats(scores, wanted[:, None].expand(scores.shape[:-1]))
        # A further page takes the unused slots.
        mask = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool, device=scores.device)
        mask.scatter_(-1, chosen.masked_fill(chosen < 0, scores.shape[-1]), True)
        tokens = mask.gather(-1, pages[:, None, None].expand(*mask.shape[:-1], -1))
        return listed(tokens & seen[:, None])

    def _scores(self, rows: Rows, ever: Tensor, pages: Tensor) -> Tensor:
        """Bound the logits of each page: float32 [B, Hq or Hkv, Q, pages]."""
        (batch, hq, n_rows, dim), hkv = rows.q.shape, rows.k.shape[1]
        k = rows.k.detach().float()
        to = pages[:, None, :, None].expand_as(k)
        bounds, count = [], int(pages.max()) + 1
        for way, none in (("amax", -torch.inf), ("amin", torch.inf)):
            start = k.new_full((batch, hkv, count, dim), none)
            found = start.scatter_reduce(2, to, k.masked_fill(~ever[:, None, :, None], none), way)
            bounds.append(found.masked_fill(found.isinf(), 0).transpose(-1, -2))  # pages that hold padding only
        q = rows.q.detach().float().reshape(batch, hkv, -1, dim)
        scores = (q.clamp(min=0) @ bounds[0] + q.clamp(max=0) @ bounds[1]).view(batch, hq, n_rows, -1)
        return scores if self.per_query_head else scores.unflatten(1, (hkv, hq // hkv)).sum(2)
