"""Laws of the selection (eq. 6)."""

import hashcore
import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hashcore import reference
from hashcore_samples import assert_same, on_threads, unaligned
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = [1, 31, 32, 33, 63, 64, 65, 97]  # around the 32 and 64 of words and masks
# Integers, or floats that went through the same operations: tolerance 0 everywhere.


DTYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


def assert_selects_as_reference(scores, k) -> None:
    assert_same(hashcore.topk(scores, k), reference.topk(scores, k))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_selection_equals_the_reference(data):
    shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=70))
    shape = (*[min(side, 4) for side in shape[:-1]], shape[-1])
    low = data.draw(st.integers(-5, 0))
    scores = data.draw(arrays.arrays(np.int32, shape, elements=st.integers(low, low + data.draw(st.integers(0, 40)))))
    assert_selects_as_reference(scores, data.draw(st.integers(0, shape[-1])))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_one_k_per_row_equals_the_reference(data):
    rows, n = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 130))
    scores = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 9, (rows, n)).astype(np.int32)
    k = data.draw(arrays.arrays(np.int64, rows, elements=st.integers(0, n)))
    assert_selects_as_reference(scores, k)


@pytest.mark.parametrize("n", LENGTHS)
def test_ties_go_to_the_lowest_index(n):
    for k in range(n + 1):
        assert hashcore.topk(np.full(n, 7, np.int32), k)[1].tolist() == list(range(k))


def test_ties_at_the_threshold_yield_to_higher_scores_after_them():
    scores = np.array([5] * 70 + [9] + [5] * 70 + [9], np.int32)
    assert hashcore.topk(scores, 4)[1].tolist() == [0, 1, 70, 141]


@pytest.mark.parametrize("n", LENGTHS)
def test_any_k_up_to_n_selects_as_the_reference(rng, n):
    scores = rng.integers(0, 20, (2, n)).astype(np.int32)
    for k in range(n + 1):
        assert_selects_as_reference(scores, k)


def test_indices_ascend_and_carry_their_scores(rng):
    scores = rng.integers(0, 897, (3, 500)).astype(np.int32)
    values, indices = hashcore.topk(scores, 50)
    assert np.all(np.diff(indices) > 0)
    assert_same(np.take_along_axis(scores, indices, -1), values)


def test_nothing_left_out_beats_anything_selected(rng):
    scores = rng.integers(0, 897, 500).astype(np.int32)
    values, indices = hashcore.topk(scores, 50)
    assert np.delete(scores, indices).max() <= values.min()


def test_unused_slots_hold_score_zero_and_index_minus_one():
    values, indices = hashcore.topk(np.array([[4, 6, 5], [1, 2, 3]], np.int32), np.array([1, 2]))
    assert indices.tolist() == [[1, -1], [1, 2]]
    assert values.tolist() == [[6, 0], [2, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_dtype_at_both_ends_of_its_range(rng, dtype):
    limits = np.iinfo(dtype)
    span = min(2**16 - 1, int(limits.max) - int(limits.min))
    steps = rng.integers(0, span + 1, 97).astype(np.uint64)
    steps[:2] = 0, span
    for start in (int(limits.min), int(limits.max) - span):
        assert_selects_as_reference(np.array([start + int(step) for step in steps], dtype), 40)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
@pytest.mark.parametrize("bits", [12, 16, 17, 20, 24, 25, 31, 32, 40, 63, 64])
def test_scores_may_lie_as_far_apart_as_their_dtype_allows(rng, dtype, bits):
    limits = np.iinfo(dtype)
    span = min(2**bits, limits.max - limits.min)
    steps = [0, span, span - 1, span // 2, *(int(x) % (span + 1) for x in rng.integers(0, 2**63, 300))]
    steps += [*steps[:150], *(steps[7] + step for step in (-1, 1) if 0 <= steps[7] + step <= span)]
    scores = np.array([limits.min + step for step in steps], dtype)
    for k in (1, 3, 100, len(steps)):
        assert_selects_as_reference(scores, k)


def test_what_score_returns_can_be_selected_from():
    query, keys = np.full((2, 4), -1, np.int32), np.array([[-1] * 4, [0] * 4, [1, 2, 3, 4]], np.int32)
    scores = hashcore.score(query, keys, (2**23, 1))
    assert np.ptp(scores) >= 2**16
    assert_selects_as_reference(scores, 2)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (0, 0), (2, 0, 7)])
def test_empty_input_selects_nothing(shape):
    values, indices = hashcore.topk(np.zeros(shape, np.int32), 0)
    assert values.shape == indices.shape == (*shape[:-1], 0)
    per_row = hashcore.topk(np.zeros(shape, np.int32), np.zeros(shape[:-1], np.int64))
    assert per_row[1].shape == (*shape[:-1], 0)


def test_strides_do_not_change_the_selection(rng):
    scores = rng.integers(0, 30, (70, 66)).astype(np.int32)
    for view in (
        scores.T,
        scores[::-2, ::3],
        scores[:, :50],
        np.broadcast_to(scores[0], (3, 66)),
        scores.astype(">i4"),
    ):
        dense = np.ascontiguousarray(view, np.int32)
        assert_same(hashcore.topk(view, 20), reference.topk(dense, 20))
    moved = unaligned(scores)
    assert_selects_as_reference(moved, 20)
    k = np.arange(140)[::2]
    assert_selects_as_reference(scores, np.minimum(k, 66))


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_any_number_of_threads_selects_as_the_reference(rng, workers):
    scores = rng.integers(0, 300, (37, 333)).astype(np.int32)
    with on_threads(workers):
        assert_selects_as_reference(scores, rng.integers(0, 333, 37))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_ragged_rows_select_as_the_reference(data):
    rows, n = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 130))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    lengths = rng.integers(0, n + 1, rows)
    ranges = dict(lengths=lengths, starts=rng.integers(0, lengths + 1), sink=data.draw(st.integers(0, 3)))
    ranges["recent"] = data.draw(st.integers(0, 3))
    scores, k = rng.integers(0, 9, (rows, n)).astype(np.int32), data.draw(st.integers(0, n))
    assert_same(hashcore.topk(scores, k, **ranges), reference.topk(scores, k, **ranges))


def test_only_eligible_positions_count():
    scores = np.array([[99, 5, 4, 7, 99], [99, 5, 4, 7, 99]], np.int32)
    values, indices = hashcore.topk(scores, 2, lengths=np.array([4, 5]), starts=1, sink=0, recent=np.int64(0))
    assert indices.tolist() == [[1, 3], [3, 4]]
    assert values.tolist() == [[5, 7], [7, 99]]
    values, indices = hashcore.topk(scores, 2, sink=1, recent=3)
    assert indices.tolist() == [[1, -1]] * 2
    assert values.tolist() == [[5, 0]] * 2


def test_positions_that_are_not_eligible_may_hold_anything():
    scores = np.array([[2**31 - 1, 3, 1, 2, -(2**31)]], np.int32)
    assert hashcore.topk(scores, 1, lengths=4, starts=1)[1].tolist() == [[1]]


def test_k_lengths_and_starts_broadcast_to_the_rows(rng):
    scores = rng.integers(0, 9, (2, 3, 40)).astype(np.int32)
    k, lengths, starts = np.array([3, 5, 7]), np.array([[40], [9]]), np.uint8([[2]])
    ranges = dict(lengths=lengths, starts=starts)
    assert_same(hashcore.topk(scores, k, **ranges), reference.topk(scores, k, **ranges))


@pytest.mark.parametrize("span", [4094, 4095, 4096, 4097, 65534, 65535])
def test_one_and_two_level_histograms_select_alike(rng, span):
    scores = rng.integers(0, span + 1, (2, 3000))
    scores[:, 7], scores[:, 9] = 0, span
    scores[1] = np.where(rng.random(3000) < 0.5, scores[1] // 256 * 256, scores[1])  # ties at the edges of the bins
    for k in (1, 20, 1500, 3000):
        assert_selects_as_reference(scores, k)
        assert_selects_as_reference(scores - 30_000, k)
