"""Bytes that a search on CUDA moves, predicted: a model to be held against the first measurement.

Everything that crosses a multiprocessor's edge counts, also what a launch reads back from the L2 cache. Memory moves in
sectors of 32 bytes; what is written or read in parts of one counts whole.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from hashcore.cuda import layout
from hashcore.cuda.layout import SearchSpace

SECTOR = 32


class Traffic(NamedTuple):
    """Bytes of a search, by what they are."""

    codes: float
    samples: float  # added to the rows' histograms and read there, then cleared
    candidates: float  # written and read: lists, their lengths, floors
    results: float

    @property
    def beside(self) -> float:
        """What is moved beside the codes, as a fraction of them."""
        return (self.samples + self.candidates + self.results) / self.codes


def search(
    rows: int, n: int, words: int, weights: Sequence[int], k: int, processors: int, index_bytes: int = 8
) -> Traffic:
    """Predict the bytes of a search of rows with keys of their own, whose scores spread as those of random bits.

    Args:
        k: how many a row selects; processors: multiprocessors of the device.
    """
    space = SearchSpace.plan(rows, 1, n, k, processors)
    blocks, lists = rows * space.splits, rows * space.splits * layout.WARPS
    listed = candidates(n, words, weights, k, space.splits) * rows
    sectors = listed * 4 / SECTOR + lists  # each list begins and ends within a sector
    written = SECTOR * sectors + 4 * lists + SECTOR * blocks
    bins = blocks * layout.SAMPLE_BINS * 4 * 2 + rows * layout.SAMPLE_BINS * 4
    return Traffic(rows * n * words * 4, bins, written * (1 + space.parts), rows * k * (4 + index_bytes))


def candidates(n: int, words: int, weights: Sequence[int], k: int, splits: int) -> float:
    """Predict how many keys of a row are listed: a quarter more than k, and what the last bin of the sample holds."""
    top = layout.top_score(words, weights)
    deviation = math.sqrt(32 * words) * math.sqrt(sum(w * w for w in weights)) / 2  # planes that vary on their own
    scores = statistics.NormalDist(top / 2, deviation)
    sampled = min(n, 4 * layout.THREADS * splits)
    share = min(1.0, 1.25 * k / n + 32 / sampled)
    if share >= 1:
        return n
    bin_width = 1 << layout.sample_shift(top)
    floor = math.floor(scores.inv_cdf(1 - share) / bin_width) * bin_width
    return n * (1 - scores.cdf(floor - 0.5))
