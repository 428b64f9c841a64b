"""Launch plans: how a search is split among threads, and the header."""

import hashcore
import numpy as np
import pytest
from hashcore import reference
from hashcore.arguments import Layout
from hashcore.cpu import launch_plan, threads
from hashcore.validation import comparison
from hashcore_samples import assert_same, on_threads, random_codes


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


@pytest.mark.parametrize(("n", "step", "told"), [(1, 400, 16), (2, 400, 400), (3, 16, 16)])
def test_the_step_between_keys_is_theirs_or_of_one_key_its_size(n, step, told):
    assert planned(n, 1, step=step).header[launch_plan.STEP] == told


def test_the_highest_score_is_that_of_a_key_that_matches_everywhere():
    assert planned(9, 1).header[launch_plan.TOP] == 7 * 128


def test_codes_of_any_strides_are_searched(rng):
    codes = random_codes(rng, 70, 8)
    query, keys = codes[:2, ::2], codes[:, ::2]
    assert_same(hashcore.search(query, keys, 5, (1, 2)), reference.search(query, keys, 5, (1, 2)))
