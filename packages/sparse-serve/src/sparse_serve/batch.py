"""The rows of an engine step, split into prompts and decode rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sparse_decode.budget import Budget
from torch import Tensor


class Prompts(NamedTuple):
    """Rows that process a prompt or a chunk of one, and the layout of the copy of their pages for vLLM's kernel."""

    rows: Tensor | slice
    """Their query tokens in the step."""
    starts: Tensor
    """Start of each row among these query tokens, int32 [R + 1]."""
    lengths: Tensor
    """Number of visible tokens of each row's last query token, int32 [R]."""
    sources: tuple[Tensor, Tensor]
    """Page, and position in the page, of each visible token, row after row, int64 [N]."""
    slots: Tensor
    """Slot of each of these tokens in the copy, int64 [N]; all other slots are never read."""
    blocks: Tensor
    """Pages of the copy, 0, 1, 2, ..., by row, int32 [R, T]."""
    pages: int
    """Number of pages of the copy."""
    schedule: Any
    """Scheduler metadata of vLLM's kernel."""

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the visible keys and values of these rows from pages [M, H, S, D]: [N, H, D] each."""
        page, place = self.sources
        return k[page, :, place], v[page, :, place]


class Batch:
    """The rows of a step.

    Attributes:
        prompts: rows that process prompts; None if there are none.
        rows: query tokens of decode rows, int64 [B].
    """

    def __init__(self, prompts: Prompts | None, rows: Tensor, blocks: Tensor, lengths: Tensor, budget: Budget) -> None:
        self.prompts: Prompts | None = prompts
        self.rows: Tensor = rows
        self._given = blocks, lengths, budget
        self._step: Any = None

    @classmethod
    def of(
        cls,
        metadata: Any,
        size: int,
        prefilling: Tensor | None,
        budget: Budget,
        schedule: Callable[[Tensor, Tensor], Any],
    ) -> Batch:
        """Split the rows of a step. A row decodes if it has one token, a non-empty cache and a processed prompt.

        Args:
            metadata: vLLM's attention metadata: query_start_loc [R + 1], seq_lens [R], block_table [R, T].
            size: tokens per page.
            prefilling: rows whose prompt is not processed yet, bool [R]; None if no prompt is chunked.
            budget: how many tokens decode rows read.
            schedule: returns scheduler metadata of vLLM's kernel for starts and lengths of rows.
        """
        starts, lengths = metadata.query_start_loc.long(), metadata.seq_lens.long()
        counts = starts[1:] - starts[:-1]
        decodes = (counts == 1) & (lengths > 1)
        if prefilling is not None:
            decodes &= ~prefilling[: len(counts)]
        reads = ~decodes & (counts > 0)
        prompts = _prompts(metadata, reads, starts, lengths, counts, size, schedule) if reads.any() else None
        return cls(prompts, starts[:-1][decodes], metadata.block_table[decodes], lengths[decodes], budget)

    def step(self, pages: int, size: int) -> Any:
        """Return the decode rows as a `sparse_decode.paged.Step`, created once for all layers."""
        if self._step is None:
            from sparse_decode.paged import Step

            blocks, lengths, budget = self._given
            width = -(-int(lengths.max()) // size)
            self._step = Step.of(blocks[:, :width], lengths, budget, pages, size)
        return self._step


def _prompts(
    metadata: Any,
    reads: Tensor,
    starts: Tensor,
    lengths: Tensor,
    counts: Tensor,
    size: int,
    schedule: Callable[[Tensor, Tensor], Any],
) -> Prompts:
    counts, lengths, first = counts[reads], lengths[reads], starts[:-1][reads]
    needed = -(-lengths // size)
    before, width = needed.cumsum(0) - needed, int(needed.max())
    blocks = (before[:, None] + torch.arange(width)).clamp(max=int(needed.sum()) - 1)
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    token = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
    block, place = token // size, token % size
    sources = metadata.block_table[reads].long()[row, block], place
    slots = blocks[row, block] * size + place
    begins = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    if bool(reads.all()):
        rows: Tensor | slice = slice(0, int(counts.sum()))
    else:
        rows = torch.cat([torch.arange(a, a + n) for a, n in zip(first.tolist(), counts.tolist(), strict=True)])
    lengths = lengths.int()
    return Prompts(rows, begins, lengths, sources, slots, blocks.int(), int(needed.sum()), schedule(begins, lengths))
