"""Predicts the bytes that a search on CUDA moves, to compare with measurements.

All traffic between SMs and the L2 cache or memory counts. Memory moves in sectors of 32 bytes; partial sectors count as
whole ones.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from hashcore.cuda import layout
from hashcore.cuda.layout import SearchSpace

SECTOR = 32
SAMPLED = 2048
"""Keys of a sample: those of a block's first read, with four keys of 128 bits to a thread."""


class Traffic(NamedTuple):
    """Bytes that a search moves, by kind."""

    codes: float
    samples: float  # codes that each block reads to find the floor, in sectors
    candidates: float  # lists and their lengths: written and read
    results: float
    tables: float = 0.0  # page numbers

    @property
    def total(self) -> float:
        return self.codes + self.samples + self.candidates + self.results + self.tables

    @property
    def beside(self) -> float:
        """All other bytes relative to those of the codes."""
        return (self.samples + self.candidates + self.results + self.tables) / self.codes


def search(
    rows: int,
    n: int,
    words: int,
    weights: Sequence[int],
    k: int,
    sms: int,
    index_bytes: int = 8,
    page: int = 0,
) -> Traffic:
    """Predict the bytes of a search of rows that do not share keys, with scores distributed as for random bits.

    Args:
        k: keys to select per row; sms: number of SMs of the device; index_bytes: per index of the result.
        page: keys in a page, in which the keys of a head are contiguous and start a sector; 0: all are contiguous.
    """
    space = SearchSpace.plan(rows, 1, n, sms)
    blocks, lists = rows * space.splits, rows * space.splits * layout.WARPS
    listed = candidates(n, words, weights, k) * rows
    sectors = listed * 4 / SECTOR + lists  # each list starts and ends within a sector
    written = SECTOR * sectors + 4 * lists
    samples = blocks * min(n, SAMPLED) * -(-4 * words // SECTOR) * float(SECTOR)
    codes = rows * n * words * 4.0
    tables = 0.0
    if page:  # a warp reads the numbers of consecutive pages; a list's first may be in the middle of a sector
        codes = rows * -(-n // page) * float(-(-page * words * 4 // SECTOR) * SECTOR)
        tables = rows * 4.0 * n / page + lists * SECTOR
    return Traffic(codes, samples, written * 2, rows * k * (4 + index_bytes), tables)


def candidates(n: int, words: int, weights: Sequence[int], k: int) -> float:
    """Predict the number of candidates of a row: 1.25 k and a few, plus the rest of the sample's last bin."""
    top = layout.top_score(words, weights)
    deviation = math.sqrt(32 * words) * math.sqrt(sum(w * w for w in weights)) / 2  # independent planes
    scores = statistics.NormalDist(top / 2, deviation)
    share = min(1.0, 1.25 * k / n + 24 / min(n, SAMPLED))
    if share >= 1:
        return n
    bin_width = 1 << layout.sample_shift(top)
    floor = math.floor(scores.inv_cdf(1 - share) / bin_width) * bin_width
    return n * (1 - scores.cdf(floor - 0.5))
