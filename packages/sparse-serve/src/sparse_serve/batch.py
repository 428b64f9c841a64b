"""The rows of an engine step on the CPU: which process prompts, which decode. No engine is imported."""

from typing import Any

import torch
from sparse_decode.budget import LayerBudget
from torch import Tensor


class Prompts:
    """The rows of a step that process prompts, or chunks of them, and a copy of their pages for the engine's kernel.

    Attributes:
        rows: their query tokens in the step, int64 [Q].
        starts, lengths: start of each row among these, int32 [R + 1], and its visible tokens at the end, int32 [R].
        blocks: pages of each row in the copy, int32 [R, T]: 0, 1, 2, ..., by row.
        slots: slot in the copy of each visible token, row after row, int64 [N].
        sources: what is copied there: its page, and its position in the page, int64 [N] each.
        metadata: the engine's, of these rows on the copy.
    """

    metadata: Any = None

    def __init__(self, table: Tensor, lengths: Tensor, counts: Tensor, first: Tensor, size: int) -> None:
        """Args:
            table: pages of each row, [R, T]; lengths: of its visible tokens, int64 [R]; size: tokens per page.
            counts, first: numbers of its query tokens, and the first of them in the step, int64 [R].
        """  # fmt: skip
        needed = -(-lengths // size)
        before, width = needed.cumsum(0) - needed, int(needed.max())
        blocks = (before[:, None] + torch.arange(width)).clamp(max=int(needed.sum()) - 1)
        row, token = _each(lengths)
        block, place = token // size, token % size
        self.sources: tuple[Tensor, Tensor] = table.long()[row, block], place
        self.slots: Tensor = blocks[row, block] * size + place
        self.starts: Tensor = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        self.lengths, self.blocks = lengths.int(), blocks.int()
        row, token = _each(counts)
        self.rows: Tensor = first[row] + token

    def copied(self, pages: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values of all visible tokens, [N, Hkv, D] each, and an empty copy, [M, Hkv, S, 2 D]."""
        page, place = self.sources
        k, v = pages.k[page, :, place], pages.v[page, :, place]
        _, heads, size, dim = pages.k.shape
        return k, v, k.new_zeros(int(self.blocks.max()) + 1, heads, size, 2 * dim)


class Batch:
    """The rows of a step.

    Attributes: prompts: rows that process prompts; None if there are none. rows: query tokens of the others, which
        decode, int64 [B].
    """

    def __init__(self, metadata: Any, size: int, prefilling: Tensor | None, budget: LayerBudget) -> None:
        """Split the rows of a step. A row decodes if it has one token, a non-empty cache and a processed prompt.

        Args:
            metadata: vLLM's attention metadata: query_start_loc [R + 1], seq_lens [R], block_table [R, T].
            size: tokens per page; prefilling: rows whose prompt is not processed yet, bool [R]; None if no prompt is
                chunked; budget: of decode rows.
        """
        starts, lengths, table = metadata.query_start_loc.long(), metadata.seq_lens.long(), metadata.block_table
        counts = starts.diff()
        decodes = (counts == 1) & (lengths > 1)
        if prefilling is not None:
            decodes &= ~prefilling[: len(counts)]
        self.rows: Tensor = starts[:-1][decodes]
        self._decoding, self._budget, self._step = (table[decodes], lengths[decodes]), budget, None
        reads = ~decodes & (counts > 0)  # rows of padding have no tokens
        given = table[reads], lengths[reads], counts[reads], starts[:-1][reads]
        self.prompts: Prompts | None = Prompts(*given, size) if reads.any() else None

    def step(self, pages: int, size: int) -> Any:
        """Return the decode rows as a `sparse_decode.pages.Step`, created once for all layers."""
        if self._step is None:
            from sparse_decode.pages import Step

            table, lengths = self._decoding
            self._step = Step.of(table[:, : -(-int(lengths.max()) // size)], lengths, self._budget, pages, size)
        return self._step


def _each(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of each of so many tokens, row after row, and its number in its row: int64 [N] each."""
    row = torch.arange(len(counts)).repeat_interleave(counts)
    return row, torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
