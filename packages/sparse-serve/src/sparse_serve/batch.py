"""One step of an engine: which of its rows are prompts, which decode, and what each of the two needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sparse_decode.budget import Budget
from torch import Tensor


class Prompts(NamedTuple):
    """Rows that read a prompt, or a chunk of one, and the copy of their pages that vLLM's kernel is given."""

    rows: Tensor | slice
    """Their query tokens in the step."""
    starts: Tensor
    """Where each begins among these, int32 [R + 1]."""
    lengths: Tensor
    """Tokens that each sees in the end, int32 [R]."""
    sources: tuple[Tensor, Tensor]
    """Page and place of each token they see, row after row, int64 [N]."""
    slots: Tensor
    """Where each of these goes in the copy, int64 [N]: no other place of it is ever seen."""
    blocks: Tensor
    """Pages of the copy, 0, 1, 2, ..., by row, int32 [R, T]."""
    pages: int
    """How many pages the copy has."""
    schedule: Any
    """vLLM's plan of its kernel."""

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values [M, H, S, D] of what these rows see: [N, H, D] both."""
        page, place = self.sources
        return k[page, :, place], v[page, :, place]


class Batch:
    """A step's rows.

    Attributes:
        prompts: those that read prompts, None without any.
        rows: query tokens of those that decode, int64 [B].
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
        """Tell the rows of a step apart.

        Args:
            metadata: vLLM's: query_start_loc [R + 1], seq_lens [R], block_table [R, T].
            size: tokens of a page.
            prefilling: bool [R], which have tokens of their prompts to read; None if no prompt is chunked.
        A row decodes if it has one token, with a past, and its prompt is behind it.
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
        """Describe the rows that decode, a `sparse_decode.paged.Step`: once for all layers."""
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
