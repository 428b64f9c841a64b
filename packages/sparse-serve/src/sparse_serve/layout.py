"""Two layouts of keys and values within a page: that of vLLM's CPU kernel, and one token after another.

vLLM's kernel keeps the keys of a page by columns, or in tiles, so that reading one token touches all cache lines of the
page. Sparse rows therefore need pages by rows. `RowPages` decides which pages are by rows; `Layout` moves pages there.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DIGIT = 256  # integers below it are exact in every type of cache
_AT_ONCE = 256  # pages that are moved together, which bounds the memory for copies

Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Writes tokens k and v [T, H, D] to the key and value parts of pages [M, H, S, D], at their slots int64 [T]."""


def codes_behind(cache: Tensor, words: int) -> Tensor:
    """View the codes in the tails of a layer's pages [M, Hkv, S, 2 D], int32 [M, Hkv, S, W].

    Raises: ValueError if keys and values do not fill the beginning of a page, or codes of `words` words do not fit
        behind them.
    """
    count, heads, size, width = cache.shape
    others, item = heads * size * width, cache.element_size()
    reach = 1 + sum((n - 1) * step for n, step in zip(cache.shape[1:], cache.stride()[1:], strict=True))
    room, page = 4 * heads * size * words, cache.stride(0) * item
    if reach != others or page < others * item + room or page % 16 or others * item % 16:
        raise ValueError(
            f"a page must have room for codes after its keys and values, {others * item + room} bytes in multiples of "
            f"16, got {page} bytes with strides {cache.stride()}"
        )
    whole = cache.as_strided((count, others + room // item), (cache.stride(0), 1)).view(torch.int32)
    return whole[:, others * item // 4 :].unflatten(1, (heads, size, words))


class Layout(NamedTuple):
    """Where vLLM's kernel stores a page's numbers: for each place by rows, the place in its layout; int64 [S D]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def learn(cls, write: Write, size: int, dim: int, dtype: torch.dtype) -> "Layout":
        """Read the layout off a page to which vLLM's function wrote the places' own numbers, digit by digit.

        Raises: ValueError if the function does not only move numbers.
        """
        numbers = torch.arange(size * dim)
        places = torch.zeros(2, size * dim, dtype=torch.int64)
        for digit in (1, _DIGIT, _DIGIT**2):
            tokens = (numbers // digit % _DIGIT).view(size, 1, dim).to(dtype)
            page = torch.zeros(1, 1, 2 * size, dim, dtype=dtype)
            write(tokens, tokens, page[:, :, :size], page[:, :, size:], torch.arange(size))
            places += page.view(2, -1).long() * digit
        if not torch.equal(places.sort().values, numbers.expand(2, -1)):
            raise ValueError(
                f"spotlight needs a vLLM kernel that stores keys and values of {size} tokens of {dim} {dtype} as they "
                "are, got another one; serve without it"
            )
        keys, values = places.argsort()
        return cls(keys, values)

    def to_rows(self, k: Tensor, v: Tensor, pages: Tensor) -> None:
        """Move pages, int64 [P], of keys and values [M, H, S, D] from vLLM's layout to rows, in place."""
        for part in pages.split(_AT_ONCE):
            for x, order in ((k, self.keys), (v, self.values)):
                found = x[part]
                x[part] = found.flatten(2).index_select(2, order).view(found.shape)


class Moves(NamedTuple):
    """What a step changes in the layout of pages."""

    by_rows: NDArray[np.bool_]
    """Which rows of the batch have their pages by rows, [R]; those of the others are in vLLM's layout."""
    fresh: NDArray[np.int64]
    """Pages in vLLM's layout to which a first token is written."""
    moved: NDArray[np.int64]
    """Pages to move from vLLM's layout to rows."""


class RowPages:
    """Which pages of the engine are by rows: those of sparse rows, and all pages of whoever shares one with them.

    A page is by rows until its first token is written anew.
    """

    def __init__(self) -> None:
        self._rows: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def settle(
        self, table: NDArray[np.int64], used: NDArray[np.bool_], new: NDArray[np.bool_], sparse: NDArray[np.bool_]
    ) -> Moves:
        """Decide the layout of all pages of a step.

        Args:
            table: pages of each row, [R, T]; used: those with tokens; new: those whose first token is written now.
            sparse: rows that need their pages by rows, [R].
        """
        self._grow(int(table[used].max(initial=-1)) + 1)
        self._rows[table[new]] = False
        before, table = self._rows.copy(), np.where(used, table, 0)
        by_rows, more = sparse, sparse | (self._rows[table] & used).any(1)
        while more.any():
            self._rows[table[more[:, None] & used]] = True
            by_rows, more = more, more | (self._rows[table] & used).any(1)
            if (by_rows == more).all():
                break
        fresh, old = np.unique(table[new]), np.unique(table[used & ~new])
        return Moves(by_rows, fresh[~self._rows[fresh]], old[self._rows[old] & ~before[old]])

    def _grow(self, pages: int) -> None:
        if pages > len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(pages - len(self._rows), np.bool_)])
