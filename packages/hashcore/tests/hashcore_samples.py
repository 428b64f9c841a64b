"""What many tests begin and end with: codes, and equality to the last bit and the type."""

import numpy as np


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def assert_same(actual, expected) -> None:
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected, strict=True)


def unaligned(x: np.ndarray) -> np.ndarray:
    """Return a copy that begins one byte after where its elements should."""
    memory = np.empty(x.nbytes + 1, np.uint8)
    moved = memory[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    assert not moved.flags.aligned
    return moved
