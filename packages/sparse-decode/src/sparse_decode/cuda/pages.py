"""Decode steps over pages on CUDA: the steps of `sparse_decode.pages`, with lengths and page tables on the device.

The host knows the number of rows, how wide a table is, and `longest`, an upper bound of the lengths; everything else is
computed on the device, so that nothing waits and a CUDA graph of a step serves any lengths up to that bound. A row's
selection has as many slots as the longest row would use, with -1 in those that it does not.

Rows that read all visible tokens are no special case: they select all that lie between the first and the last ones.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from hashcore.cuda import launch
from hashcore.cuda.kernels import make_launch
from hashcore.cuda.source import structure
from torch import Tensor

from sparse_decode.budget import LayerBudget
from sparse_decode.cuda.gather import KERNELS, Run, operator
from sparse_decode.cuda.gather import OPERATORS as OPERATORS
from sparse_decode.intervals import seen_on_device
from sparse_decode.pages import PagedLayer, Pages

SEARCH: Any = torch.ops.hashcore
THREADS = 256  # of kernels/place.cu
Target: Any = structure(KERNELS, "place.cu", "Target")


class DeviceStep(NamedTuple):
    """The rows of a decode step, for all layers with the same budget. Tensors are on the device of the pages."""

    blocks: Tensor
    """Page tables, int32 [B, T]."""
    lengths: Tensor
    """Visible tokens of each row, including its own, integers [B, 1, 1]; a row of 0 has no result."""
    wanted: Tensor
    """Tokens to select besides the first and the last ones, int64 [B, 1, 1]."""
    always: Tensor
    """The first and the last tokens, int64 [B, sink + recent], -1 in unused slots."""
    width: int
    """Slots of a row's selection."""
    budget: LayerBudget

    @classmethod
    def of(cls, blocks: Tensor, lengths: Tensor, budget: LayerBudget, size: int, longest: int) -> "DeviceStep":
        """Create a step from an engine's page table.

        Args:
            blocks: int32 [B, T]; entries after a row's last page may be anything. Read again at every use, so that a
                graph may be replayed on other pages.
            lengths: int32 or int64 [B], at most `longest`. Greater ones count as T times `size`, and then `width` may
                be too small for them.
            size: tokens per page.
            longest: upper bound of the lengths, at most T times `size`.
        """
        own = torch.stack([torch.zeros_like(lengths), lengths], -1).long()[:, None]
        seen, _ = seen_on_device(own, budget)
        most = max(0, budget.most(longest) - budget.sink - budget.recent)
        rows = lengths[:, None, None]
        return cls(blocks, rows, seen.counts, seen.always[:, 0], most, budget)


def place_codes(codes: Tensor, slots: Tensor, pages: Tensor, run: Run | None = None) -> None:
    """Write codes int32 [T, H, W] to pages int32 [M, H, S, W] at slots int64 [T]: page times S plus place in the page.

    The words of a code in a page are contiguous. Tokens whose slot is out of range, such as -1, are skipped: the host
    does not see the slots.
    """
    (tokens, heads, words), (count, _, size, _) = codes.shape, pages.shape
    total = tokens * heads * words
    if not total:
        return
    codes, slots = codes.contiguous(), slots.contiguous()
    target = Target(pages.data_ptr(), *pages.stride()[:3], count * size, size)
    arguments = ctypes.c_void_p(codes.data_ptr()), ctypes.c_void_p(slots.data_ptr()), target
    sizes = ctypes.c_int32(heads), ctypes.c_int32(words), ctypes.c_int64(total)
    one = make_launch("place.cu", "place_codes", (-(-total // THREADS), 1), THREADS, (*arguments, *sizes))
    (launch.run if run is None else run)([one], pages.device, KERNELS)


operator("place_codes(Tensor codes, Tensor slots, Tensor(a!) pages) -> ()", lambda *_: None, cuda=place_codes)


def decode(layer: PagedLayer, q: Tensor, pages: Pages, step: DeviceStep) -> Tensor:
    """Select tokens for each row and attend to them: `PagedLayer.decode` on CUDA, without counting them.

    Args: q: [B, Hq, D], in the dtype of the pages, which must already contain the row's own key.
    Returns: [B, Hq, Dv] in q's dtype; zeros for rows of length 0.
    Raises: ValueError on dtypes, head sizes or page sizes that the kernels do not support.
    """
    rows = q[:, :, None]
    how = layer.scaling, layer.softcap, layer.sinks
    chosen = choose(layer, rows, pages.codes, step)
    return OPERATORS.gather(rows, pages.k, pages.v, chosen, *how, *(None,) * 4, 0, 0, step.always, step.blocks)[:, 0]


def choose(layer: PagedLayer, rows: Tensor, codes: Tensor, step: DeviceStep) -> Tensor:
    """Search for the tokens that rows [B, Hq, 1, D] read besides the first and the last: int64 [B, Hkv, 1, width]."""
    if not step.width:
        return step.always.new_empty(len(rows), codes.shape[1], 1, 0)
    planes, weights = layer.selector.encode_queries(layer.layer, rows)
    pool, tables = codes.transpose(0, 1)[:, None], step.blocks[:, None, None]
    n, budget = step.blocks.shape[1] * codes.shape[2], step.budget
    # The operator takes the number of slots as an argument; `hashcore.search` would read the largest count.
    limits = step.width, step.wanted, step.lengths, None, n, 0, budget.sink, budget.recent
    return SEARCH.search(planes, pool, weights, False, tables, *limits)[1]
