"""Quest (Tang et al. 2024, arXiv 2406.10774): pages of keys, ranked by an upper bound on their logits.

1. A page is 16 consecutive tokens; it stores the minimum and the maximum of its keys in each dimension.
2. score(page) = sum_d max(q_d min_d, q_d max_d), an upper bound on the page's logits.
3. A row attends to whole pages: the current one, which contains its own token, and the best others.
"""

from dataclasses import dataclass, replace

import torch
from sparse_decode import Rows
from sparse_decode.select import NoCodes, best_floats
from torch import Tensor

from evals.rivals.seen import listed, ranks, seen_by


@dataclass(eq=False)
class QuestSelector(NoCodes):
    """Selects pages of tokens.

    A row with a budget of k tokens attends to max(3, k // page) pages, including the current one, or to all there are.
    That is not k tokens: compare by measured density. Rows whose budget covers all visible tokens attend to all.

    Args:
        per_query_head: one set per query head, as published; else one per KV head by the group's summed scores.
        page: tokens per page.
        dense_rows: rows that see at most this many tokens attend to all of them (the first 128 of a text, as in its
            perplexity protocol). See `after_prompt`.
        min_pages: smallest number of pages of a sparse row.
    """

    per_query_head: bool = False
    page: int = 16
    dense_rows: int = 128
    min_pages: int = 3

    def __post_init__(self) -> None:
        if self.page < 1 or self.dense_rows < 0 or self.min_pages < 1:
            got = f"{self.page}, {self.min_pages}, {self.dense_rows}"
            raise ValueError(f"page and min_pages must be 1 or more, dense_rows 0 or more, got {got}")

    def kept_bits(self, head_dim: int) -> int:
        """Return the bits that it stores per token and KV head: two keys per page, 16 bits per number."""
        return 2 * 16 * head_dim // self.page

    def after_prompt(self, tokens: int) -> "QuestSelector":
        """Return the selector for rows after a dense prompt: all are sparse, however short the prompt is."""
        return replace(self, dense_rows=0)

    def select(self, rows: Rows) -> Tensor:
        """Select whole pages, int64 [B, Hq or Hkv, Q, K]; see `Selector`."""
        seen = seen_by(rows)
        total = seen.sum(-1)  # [B, Q]
        pages = ranks(seen).clamp(min=0) // self.page  # [B, N]
        current = (total - 1).clamp(min=0) // self.page
        budget = rows.counts + rows.sink + rows.recent  # counts are of tokens beyond those always read
        wanted = (budget // self.page).clamp(min=self.min_pages).minimum(current + 1)
        wanted = torch.where((budget >= total) | (total <= self.dense_rows), current + 1, wanted)
        wanted = wanted.masked_fill(budget.minimum(total) == 0, 0)
        scores = self._scores(rows, seen.any(1), pages)
        numbers = torch.arange(scores.shape[-1], device=scores.device)
        at = current[:, None, :, None]
        scores = scores.masked_fill(numbers == at, torch.inf).masked_fill(numbers > at, -torch.inf)
        chosen = best_floats(scores, wanted[:, None].expand(scores.shape[:-1]))
        # Unused slots are scattered to one extra page.
        mask = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool, device=scores.device)
        mask.scatter_(-1, chosen.masked_fill(chosen < 0, scores.shape[-1]), True)
        tokens = mask.gather(-1, pages[:, None, None].expand(*mask.shape[:-1], -1))
        return listed(tokens & seen[:, None])

    def _scores(self, rows: Rows, ever: Tensor, pages: Tensor) -> Tensor:
        """Return an upper bound on the logits of each page: float32 [B, Hq or Hkv, Q, pages]."""
        (batch, hq, n_rows, dim), hkv = rows.q.shape, rows.k.shape[1]
        k = rows.k.detach().float()
        to = pages[:, None, :, None].expand_as(k)
        bounds, count = [], int(pages.max()) + 1
        for way, none in (("amax", -torch.inf), ("amin", torch.inf)):
            start = k.new_full((batch, hkv, count, dim), none)
            found = start.scatter_reduce(2, to, k.masked_fill(~ever[:, None, :, None], none), way)
            bounds.append(found.masked_fill(found.isinf(), 0).transpose(-1, -2))  # pages of padding only
        q = rows.q.detach().float().reshape(batch, hkv, -1, dim)
        scores = (q.clamp(min=0) @ bounds[0] + q.clamp(max=0) @ bounds[1]).view(batch, hq, n_rows, -1)
        return scores if self.per_query_head else scores.unflatten(1, (hkv, hq // hkv)).sum(2)
