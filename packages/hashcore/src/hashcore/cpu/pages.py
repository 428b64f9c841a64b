"""Plans of searches over keys in pages, which are read in place.

A pool [..., M, S, W] has M pages of S keys. Position j of a row is key j % S of page blocks[j // S]. For the checks and
the plan, a row has N = T S keys, T its number of blocks; the kernel adds the offset of each block.
"""

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hashcore import validation
from hashcore.arguments import Layout, layout_of
from hashcore.cpu import launch_plan
from hashcore.cpu.launch_plan import Plan


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


def paged(made: Plan, pool: NDArray[Any], blocks: NDArray[Any]) -> Plan:
    """Return a search plan whose rows have their bounds, with the page table of each row.

    Raises: ValueError if blocks do not broadcast to one table per row, or a row sees a page out of range.
    """
    numbers = _tables(made.shape[:-1], blocks.shape)
    _check(blocks, numbers, made.rows, pool.shape[-3], pool.shape[-2])
    header, rows = made.header.copy(), made.rows.copy()
    header[launch_plan.PAGE] = pool.shape[-2]
    rows[:, launch_plan.TABLE] = numbers * blocks.shape[-1]
    table = np.multiply(blocks, pool.strides[-3], dtype=np.int64).ravel()
    return made._replace(header=header, rows=rows, table=table)


@functools.lru_cache(16)
def _tables(lead: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the number of each row's table, for rows of shape `lead` and tables [..., T] that broadcast to them."""
    try:
        return np.broadcast_to(np.arange(math.prod(shape[:-1])).reshape(shape[:-1]), lead).ravel()
    except ValueError:
        raise validation.not_a_table_per_row(lead, shape) from None


def _check(blocks: NDArray[Any], numbers: NDArray[np.int64], rows: NDArray[np.int64], pages: int, size: int) -> None:
    """Raise ValueError if a row sees a page out of range; other entries of the table may be anything."""
    if not blocks.size or not len(numbers) or (blocks.min() >= 0 and blocks.max() < pages):
        return
    low, high = rows[:, launch_plan.LOW, None], rows[:, launch_plan.HIGH, None]
    first, of_rows = np.arange(blocks.shape[-1]) * size, blocks.reshape(-1, blocks.shape[-1])[numbers]
    seen = (first + size > low) & (first < high) & (low < high)
    wrong = seen & ((of_rows < 0) | (of_rows >= pages))
    if wrong.any():
        raise ValueError(
            f"blocks of positions that a row sees must be pages in 0..{pages - 1}, got "
            f"{int(of_rows[wrong][0])}; shorten lengths or fill the table"
        )
