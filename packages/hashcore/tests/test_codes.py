"""Laws of pack and unpack (eq. 1)."""

import hashcore
import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hashcore import reference
from hashcore_samples import assert_same, random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = [1, 2, 3, 4, 5]
# Integers, or floats that went through the same operations: tolerance 0 everywhere.


DTYPES = ["f4", "f8", "f2", "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">f4", ">f2"]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_unpack_inverts_pack(data):
    shape = (*data.draw(arrays.array_shapes(max_dims=2, min_side=0, max_side=3)), 32 * data.draw(st.integers(1, 5)))
    x = data.draw(arrays.arrays(np.float32, shape, elements=st.floats(width=32)))
    assert_same(hashcore.unpack(hashcore.pack(x)), x > 0)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_pack_inverts_unpack(data):
    shape = data.draw(arrays.array_shapes(max_dims=3, max_side=5))
    codes = data.draw(arrays.arrays(np.int32, shape))
    assert_same(hashcore.pack(hashcore.unpack(codes)), codes)


@pytest.mark.parametrize("dimension", [0, 1, 31, 32, 63, 64, 95])
def test_bit_j_of_word_w_is_dimension_32_w_plus_j(dimension):
    x = np.full(96, -1.0, np.float32)
    x[dimension] = 1.0
    words = hashcore.pack(x).view(np.uint32).tolist()
    assert words == [1 << dimension % 32 if w == dimension // 32 else 0 for w in range(3)]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f2"])
def test_negative_zero_and_nan_are_zero_bits_and_the_smallest_positive_is_one(dtype):
    x = np.tile(np.array([-0.0, np.nan, -np.nan, 0.0, 1.0, np.inf, -np.inf, -1.0], dtype), 4)
    x[8] = np.nextafter(np.zeros((), np.dtype(dtype).newbyteorder("=")), np.ones((), np.dtype(dtype).newbyteorder("=")))
    expected = np.tile([False, False, False, False, True, True, False, False], 4)
    expected[8] = True
    assert_same(hashcore.unpack(hashcore.pack(x)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_equals_the_reference_for_every_dtype(rng, dtype):
    x = (rng.normal(size=(2, 3, 64)) * 3 if np.dtype(dtype).kind in "fi" else rng.integers(0, 3, (2, 3, 64))).astype(
        dtype
    )
    assert_same(hashcore.pack(x), reference.pack(x))


@pytest.mark.parametrize("words", WORDS)
def test_unpack_equals_the_reference(rng, words):
    codes = random_codes(rng, 3, 2, words)
    assert_same(hashcore.unpack(codes), reference.unpack(codes))


@pytest.mark.parametrize("lead", [(), (0,), (2, 0, 3)])
def test_any_leading_shape_packs_and_unpacks(lead):
    codes = hashcore.pack(np.ones((*lead, 64), np.float32))
    assert_same(codes, np.full((*lead, 2), -1, np.int32))
    assert_same(hashcore.unpack(codes), np.ones((*lead, 64), bool))


def test_strides_do_not_change_the_code(rng):
    x = rng.normal(size=(96, 4, 64)).astype(np.float32)
    for view in (x.T, x[::-2, 1:, ::2], x[..., ::-1], np.broadcast_to(x[:1, :1], (5, 2, 64)), x.swapaxes(0, 1)):
        view = view[..., :32]
        assert_same(hashcore.pack(view), reference.pack(np.ascontiguousarray(view)))
    codes = random_codes(rng, 6, 4)
    for view in (codes.T, codes[::2, ::-1], np.broadcast_to(codes[0], (3, 4))):
        assert_same(hashcore.unpack(view), reference.unpack(np.ascontiguousarray(view)))
