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

    codes: float  # with a shortlist first words of all keys, and the whole of those on it
    samples: float  # added to the rows' histograms and read there, then cleared
    candidates: float  # written and read: lists, their lengths, floors
    results: float

    @property
    def total(self) -> float:
        return self.codes + self.samples + self.candidates + self.results

    @property
    def beside(self) -> float:
        """What is moved beside the codes, as a fraction of them."""
        return (self.samples + self.candidates + self.results) / self.codes


def search(
    rows: int,
    n: int,
    words: int,
    weights: Sequence[int],
    k: int,
    sms: int,
    index_bytes: int = 8,
    shortlist: int = 0,
) -> Traffic:
    """Predict the bytes of a search of rows with keys of their own, whose scores spread as those of random bits.

    Args:
        k: how many a row selects; sms: multiprocessors of the device.
        shortlist: how many times k keys are scored in full, with first words side by side; 0: all.
    """
    space = SearchSpace.plan(rows, 1, n, k, sms)
    blocks, lists = rows * space.splits, rows * space.splits * layout.WARPS
    if listed_all := not shortlist or n < 2 * layout.EARLY_SAMPLE or shortlist * k >= n:
        listed = candidates(n, words, weights, k, space.splits) * rows
    else:
        listed = min(shortlist * k, _rank(n, k) * n / layout.EARLY_SAMPLE) * rows
    sectors = listed * 4 / SECTOR + lists  # each list begins and ends within a sector
    written = SECTOR * sectors + 4 * lists + SECTOR * blocks
    bins = blocks * layout.SAMPLE_BINS * 4 * 2 + rows * layout.SAMPLE_BINS * 4
    codes = rows * n * words * 4.0
    if not listed_all:
        codes = rows * n * (4 + _gathered(words, shortlist * k / n))
        bins = rows * layout.EARLY_SAMPLE * _whole(words) + rows * 4 * layout.SHORT_ROW * space.splits
    return Traffic(codes, bins, written * (1 + space.parts), rows * k * (4 + index_bytes))


def _whole(words: int) -> int:
    """Bytes of the sectors that a code touches."""
    return -(-4 * words // SECTOR) * SECTOR


def _gathered(words: int, share: float) -> float:
    """Bytes a key of the sectors that hold a code on the list, if such a share of them is, here and there.

    Keys of one sector are scored side by side or nearly so, so it is read once.
    """
    together = max(1, SECTOR // (4 * words))
    return _whole(words) / together * (1 - (1 - share) ** together)


def _rank(n: int, k: int) -> float:
    """Which of the sample's keys is the floor of the candidates (kernels/shortlist.cu)."""
    share = k * layout.EARLY_SAMPLE / n
    return share + 3 * math.sqrt(share) + 4


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
