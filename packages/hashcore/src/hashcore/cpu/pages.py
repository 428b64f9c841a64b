"""Plans of searches over keys in pages, which are read in place.

A pool [..., M, S, W] has M pages of S keys. Position j of a row is key j % S of page blocks[j // S]. For the checks and
the plan, a row has N = T S keys, T its number of blocks; the kernel adds the offset of each block.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore import validation
from hashcore.arguments import Layout, layout_of
from hashcore.cpu import launch_plan
from hashcore.cpu.launch_plan import Plan
from hashcore.validation import RowBounds


def laid(pool: NDArray[Any], blocks: Any) -> Layout:
    """Check the pool, and return the layout [..., N, W] of a row's keys."""
    keys = layout_of(pool)
    validation.codes("keys", keys, "[..., M, S, W]")
    if not (pool.flags.aligned and (keys.strides[-1] == 4 or keys.shape[-1] == 1)):
        raise ValueError(
            f"the words of a key in pages must be contiguous and aligned, got strides {list(keys.strides)}; "
            "copy the pages to such a layout"
        )
    n = blocks.shape[-1] * keys.shape[-2]
    return Layout(
        keys.dtype, (*keys.shape[:-3], n, keys.shape[-1]), (*keys.strides[:-3], keys.strides[-2], keys.strides[-1])
    )


def paged(made: Plan, pool: NDArray[Any], blocks: NDArray[Any], wanted: RowBounds, lead: tuple[int, ...]) -> Plan:
    """Return a search plan with the page table of its rows.

    Raises: ValueError if blocks do not broadcast to one table per row, or a row sees a page out of range.
    """
    shape = blocks.shape[:-1]
    try:
        offsets = np.arange(math.prod(shape)).reshape(shape)
        numbers = np.broadcast_to(offsets, lead).ravel()
    except ValueError:
        raise validation.not_a_table_per_row(lead, blocks.shape) from None
    size, width = pool.shape[-2], blocks.shape[-1]
    table = blocks.reshape(math.prod(shape), width).astype(np.int64)
    _check(table, numbers, wanted, pool.shape[-3], size)
    header, rows = made.header.copy(), made.rows.copy()
    header[launch_plan.PAGE], rows[:, launch_plan.TABLE] = size, numbers * width
    table *= pool.strides[-3]
    return made._replace(header=header, rows=rows, table=table.ravel())


def _check(table: NDArray[np.int64], numbers: NDArray[np.int64], wanted: RowBounds, pages: int, size: int) -> None:
    """Raise ValueError if a row sees a page out of range; other entries of the table may be anything."""
    if not table.size or not len(numbers) or (table.min() >= 0 and table.max() < pages):
        return
    low, high = (np.broadcast_to(np.asarray(x), numbers.shape)[:, None] for x in (wanted.low, wanted.high))
    first = np.arange(table.shape[1]) * size
    seen, of_rows = (first + size > low) & (first < high) & (low < high), table[numbers]
    wrong = seen & ((of_rows < 0) | (of_rows >= pages))
    if wrong.any():
        raise ValueError(
            f"blocks of positions that a row sees must be pages in 0..{pages - 1}, got "
            f"{int(of_rows[wrong][0])}; shorten lengths or fill the table"
        )
