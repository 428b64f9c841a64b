"""Cached plans change the time of a call, never its result or its errors."""

import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor

import hashcore
import numpy as np
import pytest
from hashcore import cpu, reference
from hashcore.arguments import address
from hashcore.cpu import launch_plan
from hashcore_samples import assert_same, random_codes, unaligned
from hypothesis import given, settings
from hypothesis import strategies as st

# Integers: tolerance 0 everywhere.


def apart(codes: np.ndarray) -> np.ndarray:
    """Return the same codes with other words between their own."""
    return np.repeat(codes, 2, axis=-1)[..., ::2]


def packed(codes: np.ndarray) -> np.ndarray:
    """Return the same codes as fields of records of 2 bytes more, so that every second one lies between words."""
    records = np.zeros(codes.shape[:-1], np.dtype([("other", np.int16), ("codes", np.int32, codes.shape[-1])]))
    records["codes"] = codes
    return records["codes"]


PLACES = [packed, np.copy, apart, unaligned, np.asfortranarray, lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :]]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_calls_in_any_order_return_what_the_reference_returns(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    for _ in range(6):  # few choices, so that plans are used again
        n, order = data.draw(st.sampled_from([70, 3000])), data.draw(st.sampled_from(["best", "index"]))
        weights = data.draw(st.sampled_from([None, (1, 2)]))
        keys = data.draw(st.sampled_from(PLACES))(random_codes(rng, n, 4))
        query = data.draw(st.sampled_from(PLACES))(random_codes(rng, 2, 4))
        k, sink = data.draw(st.sampled_from([0, 7])), data.draw(st.sampled_from([0, 3]))
        k = data.draw(st.sampled_from([int, np.int64]))(k)
        expected = reference.search(query, keys, int(k), weights, order=order, sink=sink)
        assert_same(hashcore.search(query, keys, k, weights, order=order, sink=sink), expected)
        np.testing.assert_array_equal(hashcore.score(query, keys, weights), reference.score(query, keys, weights))


CALLS = {
    "k": lambda q, c: hashcore.search(q, c, 5.0, (1, 2)),
    "weights": lambda q, c: hashcore.search(q, c, 5, (1.0, 2.0)),
    "sink": lambda q, c: hashcore.search(q, c, 5, (1, 2), sink=0.0),
    "score": lambda q, c: hashcore.score(q, c, (1.0, 2.0)),
    "query": lambda q, c: hashcore.search(q.view(np.float32), c, 5, (1, 2)),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_equals_a_kept_call_and_is_wrong_is_refused_each_time(rng, call):
    query, keys = random_codes(rng, 2, 4), random_codes(rng, 50, 4)
    hashcore.search(query, keys, 5, (1, 2))
    hashcore.score(query, keys, (1, 2))
    for _ in range(2):
        with pytest.raises(TypeError):
            CALLS[call](query, keys)


def test_k_above_n_is_refused_each_time_and_after_more_keys(rng):
    query, keys = random_codes(rng, 1, 4), random_codes(rng, 50, 4)
    hashcore.search(query, keys, 50)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"k must be in 0\.\.49"):
            hashcore.search(query, keys[:49], 50)


def test_threads_share_a_plan(rng):
    query, keys = random_codes(rng, 8, 1, 4), random_codes(rng, 8, 5000, 4)
    expected = [reference.search(query[i], keys[i], 100) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = pool.map(lambda i: hashcore.search(query[i], keys[i], 100), range(8))
            for actual, wanted in zip(found, expected, strict=True):
                assert_same(actual, wanted)


@pytest.mark.slow
def test_threads_may_make_room_at_once(monkeypatch):
    monkeypatch.setattr(cpu, "PLANS", 2)
    get = cpu.kept(lambda number: launch_plan.Plan(np.array([number]), np.zeros((1, 6), np.int64), (), 0, 1))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda number: int(get(number).header[0]), range(20_000)))
    finally:
        sys.setswitchinterval(before)
    assert found == list(range(20_000))


@settings(deadline=None)  # a busy machine takes its time
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 6))
def test_the_latest_plans_are_kept_and_each_is_the_one_asked_for(numbers, most):
    made = []

    def make(number: int) -> launch_plan.Plan:
        made.append(number)
        return launch_plan.Plan(np.array([number]), np.zeros((1, 6), np.int64), (), 0, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "PLANS", most)
        get = cpu.kept(make)
        assert [int(get(number).header[0]) for number in numbers] == numbers
        latest = made[::-1][:most]
        assert all(get(number) is get(number) for number in latest)
        assert made[len(made) - len(latest) :] == latest[::-1]  # none of them was made again
        before = made[-1 - most] if len(made) > most else None
        if before is not None and before not in latest:
            get(before)
            assert made[-1] == before  # it had made room


def test_a_plan_of_many_rows_is_not_kept():
    made = []

    @cpu.kept
    def make(rows: int) -> launch_plan.Plan:
        made.append(rows)
        return launch_plan.Plan(np.zeros(1, np.int64), np.zeros((rows, 6), np.int64), (), 0, 1)

    for rows in (cpu.ROWS, cpu.ROWS + 1, cpu.ROWS, cpu.ROWS + 1):
        make(rows)
    assert made == [cpu.ROWS, cpu.ROWS + 1, cpu.ROWS + 1]


def test_the_address_of_an_array_is_where_numpy_says(tmp_path: pathlib.Path):
    x = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    fixed = x.copy()
    fixed.setflags(write=False)
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.int32, "r", shape=(60,))
    for y in (x, x[1:], x[::-1, 2], x.T, x[:0], x[1, 2, 3:4].reshape(()), fixed, unaligned(x), mapped, mapped[7:]):
        assert address(y) == y.__array_interface__["data"][0]


@pytest.mark.parametrize("weights", [(1,), (511,), (512,), (255, 256), (256, 256), (2**23,), (1, 2, 4, 8, 16, 32, 64)])
def test_scores_of_all_sizes_are_exact(rng, weights):
    keys = random_codes(rng, 199, 4)
    for query in (np.repeat(keys[:1], len(weights), 0), random_codes(rng, len(weights), 4)):
        np.testing.assert_array_equal(hashcore.score(query, keys, weights), reference.score(query, keys, weights))
        if sum(weights) < 512:
            for k in (1, 20, 199):
                assert_same(hashcore.search(query, keys, k, weights), reference.search(query, keys, k, weights))
