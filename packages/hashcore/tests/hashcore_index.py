"""Helpers of the BitIndex tests: codes and vectors drawn from a seed, comparisons."""

import numpy as np
from hashcore import BitIndex
from hypothesis import settings
from hypothesis import strategies as st

# Integers, or floats that went through the same operations: tolerance 0 everywhere, except where a law names another.
LAW = settings(deadline=None, max_examples=40)


def codes_of(seed: int, n: int, words: int, alphabet: int = 2**32) -> np.ndarray:
    """Return random codes; a small alphabet makes ties."""
    drawn = np.random.default_rng(seed).integers(0, alphabet, (n, words), dtype=np.uint64)
    return drawn.astype(np.uint32).view(np.int32)


def vectors_of(seed: int, n: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def brute_force(scores, ids, k):
    """Return the k best of scores [..., N], ties to the earliest, by a stable sort."""
    order = np.argsort(-scores.astype(np.int64), axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(scores, order, -1), ids[order]


def same_state(a: BitIndex, b: BitIndex) -> None:
    assert list(a) == list(b)
    np.testing.assert_array_equal(a.codes, b.codes)


sizes = st.integers(1, 150)
words = st.integers(1, 4)
seeds = st.integers(0, 2**32)
