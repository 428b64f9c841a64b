"""The rows of an engine step: whose pages are in vLLM's layout, which process prompts, which decode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sparse_decode.budget import LayerBudget
from torch import Tensor

from sparse_serve.layout import Moves, RowPages

Schedule = Callable[[Tensor, Tensor], Any]
"""Returns scheduler metadata of vLLM's kernel for starts int32 [R + 1] and lengths int32 [R] of rows."""


class Part(NamedTuple):
    """Some rows of a step for vLLM's kernel.

    Either rows whose pages are in vLLM's layout, beside others: prompts, and decode rows below the break-even. Or
    prompts, or chunks of them, whose pages are by rows, and a copy of these pages.
    """

    rows: Tensor | slice
    """Their query tokens in the step, int64 [Q]."""
    starts: Tensor
    """Start of each row among these query tokens, int32 [R + 1]."""
    lengths: Tensor
    """Number of visible tokens of each row's last query token, int32 [R]."""
    blocks: Tensor
    """Pages of each row, int32 [R, T]; of a copy 0, 1, 2, ..., by row."""
    slots: Tensor
    """Slot of each token of the step, int64 [T], -1 for tokens of other rows; of a copy, of each visible token."""
    schedule: Any
    """Scheduler metadata of vLLM's kernel."""
    sources: tuple[Tensor, Tensor] | None = None
    """What is copied: page, and position in the page, of each visible token, row after row, int64 [N]."""


class Batch:
    """The rows of a step.

    Attributes:
        moves: changes in the layout of pages, before anything is written.
        plain: whether all rows have their pages in vLLM's layout, so that the step is vLLM's own.
        read: number of tokens that decode rows read there: all that they see.
        stock: rows whose pages are in vLLM's layout; None if there are none, or nothing else.
        written: query tokens whose keys are written by rows, int64 [W], and their slots, int64 [W].
        prompts: rows by rows that process prompts; None if there are none.
        rows: query tokens of decode rows by rows, int64 [B].
    """

    moves: Moves
    plain: bool
    read: int
    stock: Part | None = None
    written: tuple[Tensor, Tensor]
    prompts: Part | None = None
    rows: Tensor
    _step: Any = None
    _decoding: Tensor
    _given: tuple[Tensor, Tensor, LayerBudget]

    @classmethod
    def of(
        cls,
        metadata: Any,
        size: int,
        prefilling: Tensor | None,
        budget: LayerBudget,
        schedule: Schedule,
        held: RowPages,
    ) -> "Batch":
        """Split the rows of a step. A row decodes if it has one token, a non-empty cache and a processed prompt.

        Args:
            metadata: vLLM's attention metadata: query_start_loc [R + 1], seq_lens [R], block_table [R, T],
                slot_mapping [Q].
            size: tokens per page; prefilling: rows whose prompt is not processed yet, bool [R]; None if no prompt is
                chunked; budget: of decode rows, which need their pages by rows from `dense_below` on.
        """
        starts, lengths = metadata.query_start_loc.numpy(), metadata.seq_lens.numpy().astype(np.int64)
        counts = np.diff(starts).astype(np.int64)
        decodes = (counts == 1) & (lengths > 1)
        if prefilling is not None:
            decodes &= ~prefilling[: len(counts)].numpy()
        sparse = decodes & (lengths >= budget.dense_below)
        moves = held.settle(*_pages(metadata.block_table, lengths, counts, size), sparse)
        found = cls()
        found.moves, found.plain = moves, not moves.by_rows.any()
        found.read = int(lengths[decodes & ~moves.by_rows].sum())
        if not found.plain:
            found._split(metadata, size, (starts, lengths, counts), decodes, schedule)
            found._given = metadata.block_table, torch.from_numpy(lengths), budget
        return found

    def _split(
        self, metadata: Any, size: int, rows: tuple[NDArray[Any], ...], decodes: NDArray[np.bool_], schedule: Schedule
    ) -> None:
        starts, lengths, counts = rows
        by_rows, live = self.moves.by_rows, counts > 0
        tokens = np.repeat(by_rows, counts)
        slots = metadata.slot_mapping[: len(tokens)].long()
        at = torch.from_numpy(np.flatnonzero(tokens))
        self.written = at, slots[at]
        self._decoding = torch.from_numpy(np.flatnonzero(decodes & by_rows))
        self.rows = torch.from_numpy(starts[:-1].astype(np.int64))[self._decoding]
        reads = torch.from_numpy(by_rows & ~decodes & live)
        if reads.any():
            given = torch.from_numpy(starts).long(), torch.from_numpy(lengths), torch.from_numpy(counts)
            self.prompts = _prompts(metadata, reads, *given, size, schedule)
        stock = ~by_rows & live
        if stock.any():
            others = torch.from_numpy(np.flatnonzero(~tokens))
            begins = torch.from_numpy(np.concatenate([[0], counts[stock].cumsum()]).astype(np.int32))
            seen = torch.from_numpy(lengths[stock].astype(np.int32))
            blocks = metadata.block_table[torch.from_numpy(stock)]
            own = slots.masked_fill(torch.from_numpy(tokens), -1)
            self.stock = Part(others, begins, seen, blocks, own, schedule(begins, seen))

    def step(self, pages: int, size: int) -> Any:
        """Return the decode rows by rows as a `sparse_decode.pages.Step`, created once for all layers."""
        if self._step is None:
            from sparse_decode.pages import Step

            table, lengths, budget = self._given
            lengths = lengths[self._decoding]
            width = -(-int(lengths.max()) // size)
            self._step = Step.of(table[self._decoding, :width], lengths, budget, pages, size)
        return self._step


def _pages(
    table: Tensor, lengths: NDArray[np.int64], counts: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return each row's pages, [R, T], and which of them hold tokens, and to which a first token is written now."""
    lengths = np.where(counts > 0, lengths, 0)
    first = np.arange(-(-int(lengths.max(initial=0)) // size)) * size
    used = first < lengths[:, None]
    return table[:, : len(first)].numpy().astype(np.int64), used, used & (first >= (lengths - counts)[:, None])


def _prompts(
    metadata: Any, reads: Tensor, starts: Tensor, lengths: Tensor, counts: Tensor, size: int, schedule: Schedule
) -> Part:
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
    return Part(rows, begins, lengths, blocks.int(), slots, schedule(begins, lengths), sources)
