"""Decode steps over keys, values and codes in pages, as serving engines store them. No engine is imported.

A pool is one tensor whose first dimension counts pages of S tokens. A row (one sequence that decodes one token) has
token j in page blocks[j // S], at position j % S. Pages may have any stride, so that keys, values and codes of a page
can be adjacent: an engine that copies, shares or frees a page then does the same to its codes.

Steps are those of `attach`, with the same kernels: visible tokens -> budget -> selection by the hash -> sink and recent
-> attention. There is no remainder here.
"""

from typing import Any, NamedTuple, cast

import hashcore
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode.budget import LayerBudget
from sparse_decode.cpu.step import Block, CpuStep, Precomputed
from sparse_decode.inputs import Inputs, require
from sparse_decode.select import HashSelector

_LINE = 64  # bytes of a cache line


class Pages(NamedTuple):
    """Keys, values and codes of a layer in pages: views with any strides, except that the last is 1."""

    k: Tensor
    """Keys after RoPE, [M, Hkv, S, D], float32, bfloat16 or float16."""
    v: Tensor
    """Values, [M, Hkv, S, Dv], in the dtype of the keys."""
    codes: Tensor
    """Codes of the keys, int32 [M, Hkv, S, W]."""

    def write(self, slots: Tensor, k: Tensor, v: Tensor, codes: Tensor) -> None:
        """Write tokens to their slots.

        Args:
            slots: int64 [T]: page times S plus position in the page, below the pages' end; below 0 skips a token.
            k, v: [T, Hkv, D] and [T, Hkv, Dv], in the dtype of the pages; codes: int32 [T, Hkv, W].
        """
        kept, size = slots >= 0, self.k.shape[2]
        at = slots[kept]
        for x, target in zip((k, v, codes), self, strict=True):
            target[at // size, :, at % size] = x[kept]


def tail_bytes(block_size: int, heads: int, words: int, others: int) -> int:
    """Return the bytes to add to a page of `others` bytes to make room for codes.

    The page gets an odd number of whole cache lines: in pages of 2^n bytes, the codes of all pages would map to the
    same few cache sets.
    """
    lines = -(-(others + 4 * block_size * heads * words) // _LINE)
    return (lines + 1 - lines % 2) * _LINE - others


class Step(NamedTuple):
    """The rows of a decode step, for all layers with the same budget."""

    blocks: NDArray[np.int64]
    """Pages of each row, [B, T]."""
    spans: NDArray[np.int64]
    """What each row sees, and where its last always-read tokens begin: those of `cpu.step_kernels.tasks`, [B, 3]."""
    reads: NDArray[np.int64]
    """Number of tokens that each row reads, [B, 1]."""
    budget: LayerBudget

    @classmethod
    def of(cls, blocks: Tensor, lengths: Tensor, budget: LayerBudget, pages: int, size: int) -> "Step":
        """Create a step from an engine's page table.

        Args:
            blocks: the page table, int32 or int64 [B, T]; entries after a row's last page may be anything.
            lengths: integers [B], above 0, at most T times `size`: number of tokens each row sees, with its own.
            pages, size: number of pages in the pool, and tokens per page.
        Raises: ValueError if the shapes do not match, or a length or a page is out of range.
        """
        table, seen = blocks.numpy().astype(np.int64), lengths.numpy().astype(np.int64)
        if table.ndim != 2 or seen.shape != table.shape[:1]:
            raise ValueError(f"blocks must be [B, T] and lengths [B], got {table.shape} and {seen.shape}")
        if len(seen) and not 0 < seen.min() <= seen.max() <= table.shape[1] * size:
            raise ValueError(
                f"lengths must be in 1..{table.shape[1] * size}, the tokens of {table.shape[1]} blocks, got "
                f"{seen.min()}..{seen.max()}"
            )
        used = np.arange(table.shape[1]) * size < seen[:, None]
        if ((table < 0) | (table >= pages))[used].any():
            raise ValueError(f"blocks must be pages in 0..{pages - 1} up to each row's length, got others")
        reads = np.array([budget.count_heads(n) for n in seen.tolist()], np.int64).reshape(-1, 1)
        dense = reads[:, 0] >= seen  # such a row reads all that it sees, without a search
        tail = np.where(dense, 0, np.maximum(seen - budget.recent, 0))
        return cls(np.where(used, table, 0), np.stack([np.zeros_like(seen), tail, seen], 1), reads, budget)


class PagedLayer:
    """One sparse layer of a model whose keys are in pages.

    Args:
        layer: index in the model. selector: hashes and searches; with codes per KV head.
        scaling, softcap, sinks: as in `Inputs`.
    Attributes: selected, visible: numbers of tokens read and visible so far, summed over rows and query heads.
    """

    def __init__(
        self, layer: int, selector: HashSelector, scaling: float, softcap: float | None = None,
        sinks: Tensor | None = None,
    ):  # fmt: skip
        if selector.per_query_head:
            raise ValueError("pages need codes per KV head, got a selector with codes per query head; use another")
        self.layer, self.selector, self.scaling, self.softcap, self.sinks = layer, selector, scaling, softcap, sinks
        self.selected = self.visible = 0
        self._steps: dict[tuple[int, int], CpuStep] = {}

    def encode(self, k: Tensor) -> Tensor:
        """Hash keys [T, Hkv, D] to codes int32 [T, Hkv, W]."""
        return self.selector.encode_keys(self.layer, k.transpose(0, 1)[None])[0].transpose(0, 1)

    def decode(self, q: Tensor, pages: Pages, step: Step) -> Tensor:
        """Select tokens for each row and attend to them, in CPU memory. On CUDA: `cuda.pages.decode`.

        Args: q: [B, Hq, D], in the dtype of the pages, which must already contain the row's own key.
        Returns: [B, Hq, Dv] in q's dtype.
        Raises: ValueError on other shapes, dtypes or devices.
        """
        require(q.device, q.dtype)
        heads = pages.k.shape[1]
        if q.device.type != "cpu" or q.dtype != pages.k.dtype or len(q) != len(step.spans) or q.shape[1] % heads:
            raise ValueError(
                f"q must be {pages.k.dtype} [{len(step.spans)}, a multiple of {heads}, {pages.k.shape[3]}] in CPU "
                f"memory, got {q.dtype} {tuple(q.shape)} on {q.device}"
            )
        x = Inputs(q[:, :, None], pages.k, pages.v, self.scaling, self.softcap, self.sinks)
        given = Precomputed(torch.from_numpy(self._choose(x.q, pages.codes, step)), table=step.blocks)
        always = step.budget.sink, step.budget.recent
        own = self._steps.setdefault(always, CpuStep(self.layer, None, *always))
        block = Block(step.spans, step.reads, int(step.spans[:, 2].max(initial=0)), 0, 0)
        out, used = cast("tuple[Tensor, NDArray[np.int64]]", own.run(x, block, given=given))
        self.selected += int(used.sum()) * (q.shape[1] // heads)
        self.visible += int(step.spans[:, 2].sum()) * q.shape[1]
        return out[:, 0]

    def _choose(self, rows: Tensor, codes: Tensor, step: Step) -> NDArray[np.int64]:
        """Search for the tokens that sparse rows read besides sink and recent: indices [B, H, 1, K]."""
        budget, dense, lengths = step.budget, step.spans[:, 1] == 0, step.spans[:, 2]
        if dense.all():
            return np.empty((len(rows), codes.shape[1], 1, 0), np.int64)
        planes, weights = self.selector.encode_queries(self.layer, rows)
        k = np.where(dense[:, None], 0, np.maximum(step.reads - budget.sink - budget.recent, 0))
        how: dict[str, Any] = {"sink": budget.sink, "recent": budget.recent, "order": "index"}
        pool, by_row = codes.numpy().transpose(1, 0, 2, 3)[:, None], (slice(None), None, None)
        how |= {"blocks": step.blocks[by_row], "lengths": lengths[by_row]}
        return hashcore.search(planes.numpy(), pool, k[:, :, None], weights, **how)[1]
