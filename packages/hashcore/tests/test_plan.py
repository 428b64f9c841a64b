"""Launch plans: how a search is split, and plans that are kept, which change the time of a call and nothing else."""

import hashcore
import numpy as np
import pytest
from hashcore import cpu
from hashcore.arguments import Layout
from hashcore.cpu import launch_plan, threads
from hashcore.validation import comparison
from hashcore_samples import assert_same, on_threads, random_codes
from hypothesis import given, settings
from hypothesis import strategies as st


def planned(n, width, rows=1, words=4, step=None, most=1):
    query = Layout(np.dtype(np.int32), (rows, 3, words), (12 * words, 4 * words, 4))
    keys = Layout(np.dtype(np.int32), (n, words), (step or 4 * words, 4))
    return launch_plan.search(comparison(query, keys, (1, 2, 4)), width, True, most)


@pytest.mark.parametrize(
    ("n", "width", "workers", "parts"),
    [(320, 10, 4, 4), (319, 10, 4, 3), (320, 10, 1, 1), (5, 1, 4, 1), (4, 0, 4, 4), (320, 10, 2, 2)],
)
def test_one_row_is_parted_into_no_more_than_n_by_8_k(n, width, workers, parts):
    with on_threads(workers):
        made = planned(n, width)
    told = made.header[[launch_plan.PARTS, launch_plan.ROWS]].tolist()
    assert (made.parts, *told, made.tasks) == (parts, parts, 1, parts)


@pytest.mark.parametrize(("n", "kept"), [(5000, 20), (15, 15)])
def test_a_row_has_room_for_two_k_and_a_chunk(n, kept):
    assert planned(n, 10).header[launch_plan.ROOMY] == kept + launch_plan.CHUNK + launch_plan.MORE


def test_there_are_as_many_threads_as_the_work_pays_for_and_the_user_allows():
    n = 3 * threads.GRAIN // (2 * 3 * 4)
    assert planned(n, 1, rows=2, most=8).workers == 3
    assert planned(n, 1, rows=2, most=2).workers == 2
    assert planned(n, 1, rows=2).workers == 1


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


def test_the_plan_of_others_is_left_alone(rng):
    """A kept plan serves calls with pages and without: none writes to it."""
    pool, query = random_codes(rng, 4, 16, 4), random_codes(rng, 1, 4)
    side_by_side = hashcore.search(query, pool.reshape(-1, 4), 5)
    hashcore.search(query, pool, 5, blocks=np.array([3, 2, 1, 0]))
    assert_same(hashcore.search(query, pool.reshape(-1, 4), 5), side_by_side)
