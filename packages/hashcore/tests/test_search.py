"""Search equals score followed by topk, in any order, split or number of threads (eq. 6, 13 and 14)."""

import hashcore
import numpy as np
import pytest
from hashcore import reference
from hashcore.cpu import launch_plan
from hashcore_samples import assert_same, on_threads, random_codes, unaligned
from hypothesis import given, settings
from hypothesis import strategies as st

ORDERS = ["best", "index"]
WORDS = [1, 2, 3, 4, 5, 8, 12]
LONG = [2047, 2048, 4095, 4097, 20_000]  # around the chunk and the shortest row that is sampled
# Integers: tolerance 0 everywhere.


def assert_searches_as_reference(query, keys, k, weights=None, **options) -> None:
    actual = hashcore.search(query, keys, k, weights, **options)
    assert_same(actual, reference.search(query, keys, k, weights, **options))


def keys_scoring(scores: np.ndarray) -> np.ndarray:
    """Codes of 128 bits that score this against a query of zeros."""
    return hashcore.pack(np.arange(128) >= scores[:, None])


ZEROS = np.zeros((1, 4), np.int32)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_search_equals_the_reference(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    lead = data.draw(st.sampled_from([(), (2,), (2, 3)]))
    words, planes, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8)), data.draw(st.integers(0, 150))
    query, keys = random_codes(rng, *lead, planes, words), random_codes(rng, *lead[-1:], n, words)
    if data.draw(st.booleans()):  # few distinct scores, many ties
        query, keys = query & 3, keys & 3
    weights = data.draw(st.sampled_from([None, tuple(int(w) for w in rng.integers(1, 50, planes))]))
    rows = lead if weights else (*lead, planes)
    lengths = rng.integers(0, n + 1, rows)
    ranges = data.draw(st.sampled_from([{}, dict(lengths=lengths, starts=rng.integers(0, lengths + 1))]))
    counts = dict(sink=data.draw(st.integers(0, 2)), recent=data.draw(st.integers(0, 2)))
    k = data.draw(st.sampled_from([0, n // 3, n])) if data.draw(st.booleans()) else rng.integers(0, n + 1, rows)
    order = data.draw(st.sampled_from(ORDERS))
    assert_searches_as_reference(query, keys, k, weights, order=order, **ranges, **counts)


@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("order", ORDERS)
def test_long_rows_search_as_the_reference(rng, n, order):
    query, keys = random_codes(rng, 3, 4), random_codes(rng, n, 4)
    for k in (0, 1, n // 50, n // 3, n):
        assert_searches_as_reference(query, keys, k, order=order)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("planes", [1, 3, 8])
def test_any_number_of_words_and_planes_searches_as_the_reference(rng, words, planes):
    query, keys = random_codes(rng, 2, planes, words), random_codes(rng, 2, 3000, words)
    weights = tuple(2**p for p in range(planes)) if words <= 8 else (3,) * planes
    assert_searches_as_reference(query, keys, 60, weights)


def test_ragged_long_rows_search_as_the_reference(rng):
    keys = random_codes(rng, 2, 1, 9000, 4)
    lengths = np.array([[9000, 4097, 3], [8999, 6000, 0]])
    ranges = dict(lengths=lengths, starts=lengths // 3, sink=2, recent=5)
    assert_searches_as_reference(random_codes(rng, 2, 3, 3, 4), keys, 100, (1, 2, 4), **ranges)


@pytest.mark.parametrize("words", [3, 4])
@pytest.mark.parametrize("elsewhere", [0, 9000])
def test_rows_that_see_different_parts_of_the_same_keys_search_as_the_reference(rng, words, elsewhere):
    """A part is scored when any row of a block sees it that has these keys, and no row of others decides that."""
    query, keys = random_codes(rng, 2, 2, 1, words), random_codes(rng, 2, 1, 9000, words)
    ranges = np.array([[10, elsewhere], [1000, 9000]]), np.array([[0, elsewhere], [0, 5000]])
    k = np.array([[5, 0], [40, 90]])
    with on_threads(1):
        assert_searches_as_reference(query, keys, k, (1,), lengths=ranges[0], starts=ranges[1], order="index")


@pytest.mark.parametrize("order", ORDERS)
def test_a_misleading_sample_changes_nothing(order):
    scores = np.tile(np.arange(20), 1000)
    for run in range(8):
        scores[run * (20_000 - 64) // 7 :][:64] = 128  # the places that are sampled: they promise too much
    assert_searches_as_reference(ZEROS, keys_scoring(scores), 3000, order=order)
    assert_searches_as_reference(ZEROS, keys_scoring(128 - scores), 3000, order=order)  # and here too little


def test_a_row_that_was_misled_is_searched_again_alone(rng):
    """Its neighbours, which have the same keys, keep what they found: nothing is found twice."""
    query, keys = random_codes(rng, 4, 1, 4), random_codes(rng, 20_000, 4)
    for run in range(8):
        keys[run * (20_000 - 64) // 7 :][:64] = query[0]
    assert_searches_as_reference(query, keys, 1000, (1,))


@pytest.mark.parametrize("order", ORDERS)
def test_scores_of_zero_are_found_with_the_others(rng, order):
    assert_searches_as_reference(ZEROS, keys_scoring(rng.integers(0, 3, 50)), 50, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_scores_that_rise_or_fall_all_along_search_as_the_reference(order):
    scores = np.arange(20_000) * 128 // 20_000
    for k in (40, 4900):
        assert_searches_as_reference(ZEROS, keys_scoring(scores), k, order=order)
        assert_searches_as_reference(ZEROS, keys_scoring(scores[::-1]), k, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_equal_scores_give_the_first_keys(order):
    keys = np.broadcast_to(ZEROS, (10_000, 4))
    assert hashcore.search(ZEROS, keys, 700, order=order)[1].tolist() == [list(range(700))]


def test_best_first_is_the_selection_sorted_by_score_then_index(rng):
    query, keys = random_codes(rng, 4, 4), random_codes(rng, 5000, 4)
    scores, indices = hashcore.search(query, keys, 99, order="index")
    order = np.lexsort((indices, -scores))
    sorted_pair = np.take_along_axis(scores, order, -1), np.take_along_axis(indices, order, -1)
    assert_same(hashcore.search(query, keys, 99, order="best"), sorted_pair)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_best_of_the_parts_best_are_the_best_of_the_whole(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    n = data.draw(st.integers(1, 6000))
    edges = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    query, keys, k = random_codes(rng, 2, 4), random_codes(rng, n, 4), data.draw(st.integers(0, min(n, 200)))
    parts = [
        (a, hashcore.search(query, keys[a:b], min(k, b - a))) for a, b in zip([0, *edges], [*edges, n], strict=True)
    ]
    scores = np.concatenate([part[0] for _, part in parts], -1)
    indices = np.concatenate([a + part[1] for a, part in parts], -1)
    order = np.lexsort((indices, -scores))[:, :k]
    merged = np.take_along_axis(scores, order, -1), np.take_along_axis(indices, order, -1)
    assert_same(hashcore.search(query, keys, k), merged)


def test_the_order_of_a_batch_does_not_matter(rng):
    query, keys = random_codes(rng, 70, 3, 4), random_codes(rng, 1, 3000, 4)
    order = rng.permutation(70)
    whole = hashcore.search(query, keys, 60, (1, 2, 4))
    assert_same(hashcore.search(query[order], keys, 60, (1, 2, 4)), [x[order] for x in whole])


@pytest.mark.parametrize("workers", [2, 3, 7, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_any_number_of_threads_searches_as_one(rng, workers, order):
    for count, n, k in ((1, 9000, 100), (1, 20_000, 5), (5, 6000, 90), (70, 500, 9)):
        given = random_codes(rng, count, 3, 4), random_codes(rng, n, 4), k, (1, 2, 4)
        options = {"lengths": rng.integers(0, n + 1, count), "sink": 1, "order": order}
        with on_threads(1):
            serial = hashcore.search(*given, **options)
        with on_threads(workers):
            assert_same(hashcore.search(*given, **options), serial)


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_key_of_all_is_found_in_parts(order):
    keys = keys_scoring(np.where(np.arange(9000) < 3, 100, 50))
    with on_threads(4):
        assert hashcore.search(ZEROS, keys, 5, order=order)[1][0, 0] == 0
        assert_searches_as_reference(ZEROS, keys, 5, order=order)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_sample_that_misleads_is_left_in_every_part(rng, workers):
    """Where the sample sees all keys that score more than the others, its floor keeps too few in all parts together."""
    n, k, scores = 40_000, 1000, rng.integers(0, 60, 40_000)
    for part in range(workers):
        low, high = n * part // workers, n * (part + 1) // workers
        for run in (0, 7):
            at = low + run * (high - low - 64) // 7
            scores[at : at + 64] = 120
    with on_threads(workers):
        assert_searches_as_reference(ZEROS, keys_scoring(scores), k)


@pytest.mark.parametrize("room", [1, 3 * (2 * 60 + launch_plan.CHUNK)])
def test_blocks_of_any_size_search_alike(rng, monkeypatch, room):
    monkeypatch.setattr(launch_plan, "ROOM", room)
    with on_threads(1):
        assert_searches_as_reference(random_codes(rng, 40, 4), random_codes(rng, 3000, 4), 60)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_ragged_row_is_the_row_alone(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    n = data.draw(st.integers(1, 5000))
    start = data.draw(st.integers(0, n))
    length = data.draw(st.integers(start, n))
    query, keys, k = random_codes(rng, 1, 4), random_codes(rng, n, 4), data.draw(st.integers(0, length - start))
    scores, indices = hashcore.search(query, keys[start:length], k)
    assert_same(hashcore.search(query, keys, k, starts=start, lengths=length), (scores, indices + start))


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (3, 0), (0, 7), (3, 7), (60, 60), (10**20, 0), (0, 10**20)])
def test_sink_and_recent_are_taken_off_both_ends(rng, sink, recent):
    query, keys = random_codes(rng, 2, 4), random_codes(rng, 100, 4)
    low = min(5 + sink, 90)
    ranges = dict(starts=low, lengths=max(90 - recent, low))
    trimmed = hashcore.search(query, keys, 9, **ranges)
    assert_same(hashcore.search(query, keys, 9, starts=5, lengths=90, sink=sink, recent=recent), trimmed)


@pytest.mark.parametrize("order", ORDERS)
def test_slots_that_find_nothing_hold_score_zero_and_index_minus_one_at_the_end(rng, order):
    keys = random_codes(rng, 10, 4)
    scores, indices = hashcore.search(keys[:2], keys, np.array([2, 4]), lengths=np.array([10, 3]), order=order)
    assert (indices == -1).tolist() == [[False, False, True, True], [False, False, False, True]]
    assert (scores[indices == -1] == 0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_no_queries_or_no_keys_find_nothing(shape):
    q, n = shape
    scores, indices = hashcore.search(np.zeros((2, q, 4), np.int32), np.zeros((2, n, 4), np.int32), 0)
    assert scores.shape == indices.shape == (2, q, 0)
    scores, indices = hashcore.search(np.zeros((q, 3, 4), np.int32), np.zeros((n, 4), np.int32), 0, (1, 2, 4))
    assert scores.shape == indices.shape == (q, 0)


def test_leading_dimensions_broadcast_and_strides_do_not_matter(rng):
    buffer = random_codes(rng, 2, 3, 50, 4)
    query = random_codes(rng, 5, 2, 1, 2, 4)
    for keys in (buffer[:, :, :33], buffer[::-1, :, ::2], buffer[:, :1], np.broadcast_to(buffer[0], (2, 3, 50, 4))):
        assert_searches_as_reference(query, keys, 7, (1, 3))
        assert_searches_as_reference(query, keys, 7)
    assert_searches_as_reference(unaligned(query), unaligned(buffer), 7, (1, 3))
    assert_searches_as_reference(unaligned(query), unaligned(buffer), unaligned(np.array([7], np.int32)), (1, 3))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("words", [1, 2, 4])
def test_no_later_key_is_taken_when_every_one_has_the_largest_score(order, words):
    """The floor is then one above it, and must fit 16 bits, too."""
    keys = np.zeros((20_000, words), np.int32)
    assert_searches_as_reference(keys[None, :1], keys, 700, (2047 // words,), order=order)


def test_the_largest_sixteen_bit_score_is_found(rng):
    codes = random_codes(rng, 3, 8)
    for weights in ((255,), (1, 2, 4, 8, 16, 32, 64, 128)):
        query = np.repeat(codes[:1], len(weights), 0)
        assert hashcore.search(query, codes, 1, weights)[0].item() == 255 * 256
