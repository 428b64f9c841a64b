"""Laws of the quantiser (eq. 5) and of group planes (eq. 3)."""

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


PLANES = range(1, 9)


def signs(codes: np.ndarray) -> np.ndarray:
    return 2 * reference.unpack(codes).astype(np.int64) - 1


@pytest.mark.parametrize("planes", PLANES)
@settings(deadline=None, max_examples=15)
@given(w=arrays.arrays(np.float32, (3, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_quantise_and_planes_equal_the_reference(planes, w):
    assert_same(hashcore.quantise(w, planes), reference.quantise(w, planes))
    actual, weights = hashcore.planes(w, planes)
    expected, expected_weights = reference.planes(w, planes)
    assert_same(actual, expected)
    assert weights == expected_weights


@pytest.mark.parametrize("planes", PLANES)
@settings(deadline=None, max_examples=15)
@given(w=arrays.arrays(np.float32, (3, 32), elements=st.floats(width=32)))
def test_unchecked_planes_equal_the_reference_for_any_float(planes, w):
    assert_same(hashcore.planes(w, planes, check=False)[0], reference.planes(w, planes)[0])


def test_unchecked_nan_has_level_minus_one_and_infinities_are_the_largest_floats():
    w = np.tile(np.array([np.nan, np.inf, -np.inf, 1.0, -1.0, -np.nan, 0.0, 3e38], np.float32), 4)
    finite = np.clip(np.where(np.isnan(w), np.float32(-1), w), -np.finfo(np.float32).max, np.finfo(np.float32).max)
    for planes in PLANES:
        assert_same(hashcore.planes(w, planes, check=False)[0], hashcore.planes(finite, planes)[0])
    assert_same(hashcore.planes(np.full(32, np.nan), 1, check=False)[0], np.zeros((1, 1), np.int32))
    assert_same(hashcore.planes(np.full(32, 1e300), 1, check=False)[0], np.full((1, 1), -1, np.int32))


def test_levels_without_a_check_are_those_of_the_planes(rng):
    w = rng.normal(size=(3, 64)).astype(np.float32)
    w[0, 3], w[1, 5] = np.nan, np.inf
    levels = hashcore.quantise(w, 3, check=False)[0]
    digits = hashcore.unpack(hashcore.planes(w, 3, check=False)[0])
    assert_same(levels, (2 * (digits * np.array([[1], [2], [4]])).sum(1) - 7).astype(np.int8))
    assert (levels[0, 3], levels[1, 5]) == (-1, 7)


@pytest.mark.parametrize("planes", PLANES)
def test_levels_are_the_odd_integers_up_to_m(planes):
    levels, scale = hashcore.quantise(np.linspace(-1, 1, 2048).reshape(1, -1), planes)
    m = 2**planes - 1
    assert levels.dtype == (np.int8 if planes < 8 else np.int16)
    assert scale.dtype == np.float32
    assert scale.shape == (1, 1)
    assert set(np.unique(levels)) == set(range(-m, m + 1, 2))


@pytest.mark.parametrize("planes", PLANES)
def test_unclipped_weights_lie_within_one_scale_of_their_level(rng, planes):
    w = rng.normal(size=(20, 64)).astype(np.float32)
    levels, scale = hashcore.quantise(w, planes)
    inside = np.abs(w) <= scale * (2**planes - 1)
    assert np.all(np.abs(w - levels * scale)[inside] <= np.broadcast_to(scale * 1.001, w.shape)[inside])


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("words", WORDS)
def test_plane_score_equals_the_quantised_inner_product(rng, planes, words):
    w, keys = rng.normal(size=(6, 32 * words)), random_codes(rng, 33, words)
    codes, weights = hashcore.planes(w, planes)
    inner = hashcore.quantise(w, planes)[0].astype(np.int64) @ signs(keys).T
    doubled = inner + 32 * words * (2**planes - 1)
    assert_same(hashcore.score(codes, keys, weights), (doubled // 2).astype(np.int32))
    assert not np.any(doubled % 2)


def test_one_plane_is_the_sign_code(rng):
    w = rng.normal(size=(5, 64))
    codes, weights = hashcore.planes(w, 1)
    assert weights == (1,)
    assert_same(codes[:, 0], hashcore.pack(w))


@pytest.mark.parametrize("planes", PLANES)
def test_a_row_of_zeros_has_level_one_and_a_tiny_positive_scale(planes):
    levels, scale = hashcore.quantise(np.array([[0.0, -0.0]]), planes)
    assert levels.tolist() == [[1, 1]]
    assert 0 < scale.item() < 1e-30


@pytest.mark.parametrize("magnitude", [3.4e38, 1e-37, 1e-45])
def test_extreme_magnitudes_keep_their_signs(magnitude):
    levels, scale = hashcore.quantise(np.array([magnitude, -magnitude], np.float32), 1)
    assert levels.tolist() == [1, -1]
    assert np.isfinite(scale).all()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "?"])
def test_quantise_computes_in_float32_for_every_dtype(rng, dtype):
    w = (4 * rng.normal(size=(3, 32))).astype(dtype)
    assert_same(hashcore.quantise(w), hashcore.quantise(w.astype(np.float32)))


@pytest.mark.parametrize("group", range(1, 10))
def test_group_planes_score_as_the_sum_over_the_group(rng, group):
    queries, keys = random_codes(rng, 3, group, 4), random_codes(rng, 3, 65, 4)
    codes, weights = hashcore.group_planes(queries)
    assert codes.shape == (3, group.bit_length(), 4)
    assert_same(hashcore.score(codes, keys, weights), hashcore.score(queries, keys).sum(-2, dtype=np.int32))


@pytest.mark.parametrize("group", [*range(1, 10), 15, 16, 17, 40])
def test_group_planes_equal_the_reference(rng, group):
    queries = random_codes(rng, 2, group, 3)
    codes, weights = hashcore.group_planes(queries)
    expected, expected_weights = reference.group_planes(queries)
    assert_same(codes, expected)
    assert weights == expected_weights
    assert sum(weights) == group


@pytest.mark.parametrize("group", range(1, 20))
def test_every_count_of_a_group_is_spelt_exactly(group):
    bits = np.arange(32) < np.arange(group)[:, None]  # bit j is set in min(group, max(0, group - 1 - j)) codes
    codes, weights = hashcore.group_planes(hashcore.pack(bits))
    counts = (hashcore.unpack(codes) * np.array(weights)[:, None]).sum(0)
    assert_same(counts, bits.sum(0))


def test_strides_do_not_change_planes(rng):
    w = rng.normal(size=(64, 6)).astype(np.float32)
    for view in (w.T, w.T[::-2], np.broadcast_to(w.T[0], (3, 64))):
        assert_same(hashcore.planes(view)[0], reference.planes(np.ascontiguousarray(view))[0])
    queries = random_codes(rng, 4, 6, 5)
    for view in (queries.T, queries[::2, ::-1], np.broadcast_to(queries[:1], (3, 6, 5))):
        assert_same(hashcore.group_planes(view)[0], reference.group_planes(np.ascontiguousarray(view))[0])


def test_empty_leading_dimensions_quantise_and_merge():
    assert hashcore.planes(np.zeros((0, 64)))[0].shape == (0, 3, 2)
    assert hashcore.group_planes(np.zeros((0, 7, 2), np.int32))[0].shape == (0, 3, 2)
