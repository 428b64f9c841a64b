"""Laws of the scores (eq. 2 and eq. 4)."""

import hashcore
import numpy as np
import pytest
from hashcore import reference
from hashcore.arguments import aligned, readable
from hashcore.cpu import launch_plan
from hashcore_samples import assert_same, on_threads, random_codes, unaligned
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = [1, 31, 32, 33, 63, 64, 65, 97]  # around the 32 and 64 of words and masks
WORDS = [1, 2, 3, 4, 5]
# Integers, or floats that went through the same operations: tolerance 0 everywhere.


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_flipping_one_bit_changes_the_score_by_the_planes_weight(data):
    planes, words = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    weights = tuple(data.draw(st.integers(1, 200)) for _ in range(planes))
    query, key = random_codes(rng, planes, words), random_codes(rng, 1, words)
    plane, bit = data.draw(st.integers(0, planes - 1)), data.draw(st.integers(0, 32 * words - 1))
    matched = (reference.unpack(query)[plane] == reference.unpack(key)[0])[bit]
    flipped = query.copy()
    flipped.view(np.uint32)[plane, bit // 32] ^= np.uint32(1 << bit % 32)
    change = hashcore.score(flipped, key, weights) - hashcore.score(query, key, weights)
    assert change.item() == (-weights[plane] if matched else weights[plane])


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("words", WORDS)
def test_codes_score_as_the_reference(rng, n, words):
    query, keys = random_codes(rng, 2, 3, words), random_codes(rng, 2, n, words)
    assert_same(hashcore.score(query, keys), reference.score(query, keys))


@pytest.mark.parametrize("planes", range(1, 9))
@pytest.mark.parametrize("words", [*WORDS, 8, 12])
def test_planes_score_as_the_reference(rng, planes, words):
    weights = tuple(int(w) for w in rng.integers(1, 300, planes))
    for n in (1, 33, 97):
        query, keys = random_codes(rng, 3, planes, words), random_codes(rng, n, words)
        assert_same(hashcore.score(query, keys, weights), reference.score(query, keys, weights))


@pytest.mark.parametrize("words", WORDS)
def test_a_code_matches_itself_in_every_bit_and_its_complement_in_none(rng, words):
    codes = random_codes(rng, 7, words)
    assert np.diagonal(hashcore.score(codes, codes)).tolist() == [32 * words] * 7
    assert np.diagonal(hashcore.score(codes, ~codes)).tolist() == [0] * 7


def test_unweighted_score_is_symmetric(rng):
    a, b = random_codes(rng, 5, 4), random_codes(rng, 9, 4)
    assert_same(hashcore.score(a, b), np.ascontiguousarray(hashcore.score(b, a).T))


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ((2, 3, 5, 2, 4), (2, 3, 1, 33, 4)),
        ((2, 4), (2, 3, 33, 4)),
        ((5, 1, 2, 4), (3, 33, 4)),
        ((1, 2, 4), (2, 1, 33, 4)),
        ((2, 3), (33, 3)),
    ],
)
def test_leading_dimensions_broadcast_as_in_numpy(rng, query, keys):
    q, k = random_codes(rng, *query), random_codes(rng, *keys)
    assert_same(hashcore.score(q, k, (1, 3)), reference.score(q, k, (1, 3)))
    assert_same(hashcore.score(q, k), reference.score(q, k))


@pytest.mark.parametrize("words", WORDS)
def test_strides_do_not_change_the_score(rng, words):
    codes = random_codes(rng, 9, 6, 2 * words)
    for view in (codes[::-2, :, ::2], codes[:, 1:, words:], codes.swapaxes(0, 1)[..., :words][:, ::3]):
        dense = np.ascontiguousarray(view)
        assert_same(hashcore.score(view, view), reference.score(dense, dense))


def test_words_off_an_eight_byte_boundary_score_alike(rng):
    flat = random_codes(rng, 1 + 33 * 4)
    keys, query = flat[1:].reshape(33, 4), random_codes(rng, 2, 4)
    assert_same(hashcore.score(query, keys), reference.score(query, keys))
    moved = unaligned(keys)
    assert_same(hashcore.score(moved, moved), reference.score(keys, keys))
    assert_same(hashcore.score(unaligned(query), moved, (1, 2)), reference.score(query, keys, (1, 2)))


def test_expanded_arrays_score_without_being_copied(rng):
    keys = random_codes(rng, 1, 33, 4)
    expanded = np.broadcast_to(keys, (7, 33, 4))
    query = np.broadcast_to(random_codes(rng, 1, 2, 4), (7, 2, 4))
    assert_same(hashcore.score(query, expanded, (1, 2)), reference.score(query, expanded, (1, 2)))
    assert aligned(query) is query
    assert readable(expanded) is expanded


BUFFER = np.random.default_rng(3).integers(-(2**31), 2**31, (2, 3, 50, 6), np.int64).astype(np.int32)
IN_PLACE = {
    "the used part of a buffer": BUFFER[:, :, :33],
    "every second code": BUFFER[:, :, ::2],
    "backwards": BUFFER[::-1, :, ::-1],
    "exchanged leading dimensions": BUFFER.swapaxes(0, 1),
    "leading dimension as codes": BUFFER.swapaxes(1, 2),
    "one code many times": np.broadcast_to(BUFFER[:, :, :1], (2, 3, 40, 6)),
    "some words": BUFFER[..., 2:4],
    "an odd number of words": BUFFER[..., :5],
    "words from an odd one on": BUFFER[..., 1:5],
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_codes_are_scored_where_they_lie(case):
    keys = IN_PLACE[case]
    query = np.ascontiguousarray(BUFFER[:1, :1, :7, : keys.shape[-1]])
    assert_same(hashcore.score(query, keys), reference.score(query, np.ascontiguousarray(keys)))
    assert readable(keys) is keys


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (0, 0)])
def test_no_queries_or_no_keys_give_no_scores(shape):
    q, n = shape
    assert hashcore.score(np.zeros((2, q, 4), np.int32), np.zeros((2, n, 4), np.int32)).shape == (2, q, n)
    assert hashcore.score(np.zeros((q, 3, 4), np.int32), np.zeros((n, 4), np.int32), (1, 2, 4)).shape == (q, n)


@pytest.mark.parametrize("words", WORDS)
def test_serial_equals_parallel(rng, words):
    lead, n = (2, 21), 2 * launch_plan.CHUNK + 33  # several blocks and chunks, the last ones ragged
    query, keys = random_codes(rng, *lead, 4, words), random_codes(rng, 2, 1, n, words)
    with on_threads(1):
        serial = hashcore.score(query, keys, (1, 2, 4, 8))
    with on_threads(3):
        assert_same(hashcore.score(query, keys, (1, 2, 4, 8)), serial)
    assert_same(serial[:, ::10], reference.score(query[:, ::10], keys, (1, 2, 4, 8)))


def test_whole_equals_the_sum_of_its_words(rng):
    query, keys = random_codes(rng, 3, 5), random_codes(rng, 65, 5)
    parts = [hashcore.score(query[:, w : w + 1], keys[:, w : w + 1]) for w in range(5)]
    assert_same(hashcore.score(query, keys), np.sum(parts, axis=0, dtype=np.int32))


def test_the_largest_score_fits(rng):
    codes, weight = random_codes(rng, 1, 1), 2**26 - 1
    assert hashcore.score(codes, codes, (weight,)).item() == 32 * weight
