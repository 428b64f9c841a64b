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


class Traffic(NamedTuple):
    """Bytes that a search moves, by kind."""

    codes: float  # with a shortlist: first words of all keys, and whole codes of keys on it
    samples: float  # histograms of the rows: added to, read, cleared
    candidates: float  # lists, their lengths, floors: written and read
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
    shortlist: int = 0,
    page: int = 0,
) -> Traffic:
    """Predict the bytes of a search of rows that do not share keys, with scores distributed as for random bits.

    Args:
        k: keys to select per row; sms: number of SMs of the device; index_bytes: per index of the result.
        shortlist: about this many times k keys are scored in full, with contiguous first words; 0: all.
        page: keys in a page, in which the keys of a head are contiguous and start a sector; 0: all are contiguous.
    """
    space = SearchSpace.plan(rows, 1, n, k, sms)
    blocks, lists = rows * space.splits, rows * space.splits * layout.WARPS
    if listed_all := not shortlist or n < 2 * layout.EARLY_SAMPLE or shortlist * k >= n:
        listed = candidates(n, words, weights, k, space.splits) * rows
    else:
        listed = min(shortlist * k, _rank(n, k) * n / layout.EARLY_SAMPLE) * rows
    sectors = listed * 4 / SECTOR + lists  # each list starts and ends within a sector
    written = SECTOR * sectors + 4 * lists + SECTOR * blocks
    bins = blocks * layout.SAMPLE_BINS * 4 * 2 + rows * layout.SAMPLE_BINS * 4
    codes = rows * n * words * 4.0
    tables = 0.0
    if page:  # a warp reads the numbers of consecutive pages; a list's first may be in the middle of a sector
        codes = rows * -(-n // page) * float(-(-page * words * 4 // SECTOR) * SECTOR)
        tables = rows * 4.0 * n / page + lists * SECTOR
    if not listed_all:
        codes = rows * n * (4 + _gathered(words, shortlist * k / n))
        bins = rows * layout.EARLY_SAMPLE * _whole(words) + rows * 4 * layout.SHORT_ROW * space.splits
    return Traffic(codes, bins, written * (1 + space.parts), rows * k * (4 + index_bytes), tables)


def _whole(words: int) -> int:
    """Return the bytes of the sectors that a code touches."""
    return -(-4 * words // SECTOR) * SECTOR


def _gathered(words: int, share: float) -> float:
    """Return the bytes per key of sectors with a code on the shortlist, if a random share of keys is on it.

    A sector is read once: its keys are scored at about the same time.
    """
    together = max(1, SECTOR // (4 * words))
    return _whole(words) / together * (1 - (1 - share) ** together)


def _rank(n: int, k: int) -> float:
    """Return the rank of the sampled key that sets the floor of the candidates (kernels/shortlist.cu)."""
    share = k * layout.EARLY_SAMPLE / n
    return share + 3 * math.sqrt(share) + 4


def candidates(n: int, words: int, weights: Sequence[int], k: int, splits: int) -> float:
    """Predict the number of candidates of a row: 1.25 k, plus the rest of the sample's last bin."""
    top = layout.top_score(words, weights)
    deviation = math.sqrt(32 * words) * math.sqrt(sum(w * w for w in weights)) / 2  # independent planes
    scores = statistics.NormalDist(top / 2, deviation)
    sampled = min(n, 4 * layout.THREADS * splits)
    share = min(1.0, 1.25 * k / n + 32 / sampled)
    if share >= 1:
        return n
    bin_width = 1 << layout.sample_shift(top)
    floor = math.floor(scores.inv_cdf(1 - share) / bin_width) * bin_width
    return n * (1 - scores.cdf(floor - 0.5))
