"""Kernels on torch's threads: every task runs once, arguments arrive as they are, a failure is told."""

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hashcore.cpu import team, threads
from hashcore.cpu.intrinsics import observe, publish
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(team.runtime() is None, reason="torch uses another runtime than GNU OpenMP here")


def count_tasks(first, last, ran):
    for task in range(first, last):
        ran[task] += 1


def note_arguments(first, last, out, single, double, pair, nested, strided, flags, shorts):
    for task in range(first, last):
        out[task] = (
            single + double + pair[0] + pair[1] + nested[0] + nested[1][0] + strided[task, 1] + flags[0] + shorts[task]
        )
    return 1 << first


def fail_late(first, last, least, ran):
    for task in range(first, last):
        ran[task] += 1
    if last > least:
        raise ArithmeticError


@settings(deadline=None, max_examples=50)
@given(tasks=st.integers(1, 200), workers=st.integers(2, 40), most=st.integers(1, 5))
def test_every_task_runs_once(tasks, workers, most):
    ran, before = np.zeros(tasks, np.int64), torch.get_num_threads()
    try:
        torch.set_num_threads(most)
        threads.run(count_tasks, tasks, workers, (ran,))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(ran, 1)


@pytest.mark.parametrize("readonly", [False, True])
def test_arguments_of_every_kind_arrive_and_results_are_joined(rng, readonly):
    strided, shorts = rng.standard_normal((12, 6)).astype(np.float32)[:, ::2], np.arange(12, dtype=np.uint16)[::-1]
    strided.flags.writeable = not readonly
    out, pair, nested = np.zeros(12), (3, -2), (0.25, (7, 1 << 40))
    given = out, np.float32(1.5), 2.5, pair, nested, strided, np.array([True]), shorts
    found = team.run(threads.compiled(note_arguments), 12, 4, given)
    np.testing.assert_array_equal(out, 1.5 + 2.5 + 3 - 2 + 0.25 + 7 + strided[:, 1].astype(np.float64) + 1 + shorts)
    assert found == [2**12 - 1]


def test_kernels_are_compiled_once_for_arguments_of_a_type(rng):
    kernel, known = threads.compiled(count_tasks), []
    for kind in (np.int64, np.int64, np.int32):
        team.run(kernel, 5, 2, (np.zeros(5, kind),))
        known.append(sum(key[0] is kernel for key in team._bodies))
    assert known[0] == known[1] == known[2] - 1


def test_a_kernel_that_fails_is_told_of_after_the_others_have_run():
    ran = np.zeros(40, np.int64)
    with pytest.raises(RuntimeError, match="the kernel fail_late failed"):
        threads.run(fail_late, 40, 3, (17, ran))
    np.testing.assert_array_equal(ran, 1)
    threads.run(fail_late, 40, 3, (40, ran))


def test_several_threads_may_have_teams_at_once():
    def work(_):
        ran = np.zeros(300, np.int64)
        for _ in range(50):
            threads.run(count_tasks, 300, 4, (ran,))
        return set(ran)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [{50}] * 4


def _in_child(queue):
    ran = np.zeros(9, np.int64)
    threads.run(count_tasks, 9, 2, (ran,))
    queue.put((team.runtime() is None, ran.tolist()))


def test_a_forked_process_uses_threads_of_its_own():
    threads.run(count_tasks, 9, 2, (np.zeros(9, np.int64),))
    queue = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get() == (True, [1] * 9)
    child.join()


def test_without_torch_or_with_another_runtime_there_is_no_team(monkeypatch):
    grain = threads.count(1 << 24, 64)
    for change in (
        lambda patch: patch.delitem(sys.modules, "torch"),
        lambda patch: patch.setattr(team.ctypes, "CDLL", lambda path: object()),
    ):
        with monkeypatch.context() as patch:
            team._start.cache_clear()
            change(patch)
            assert team.runtime() is None
            assert team.run(threads.compiled(count_tasks), 2, 2, (np.zeros(2, np.int64),)) is None
            assert threads.count(1 << 24, 64) == 2 < grain == 16
        team._start.cache_clear()


def wait_for(first, last, ready, seen):
    for task in range(first, last):
        if task == 0:
            seen[1] = 5
            publish(ready, 0, 7)
        else:
            while observe(ready, 0) == 0:
                pass
            seen[0] = seen[1] + observe(ready, 0)


def test_what_is_published_is_observed():
    for _ in range(20):
        ready, seen = np.zeros(1, np.int64), np.zeros(2, np.int64)
        threads.run(wait_for, 2, 2, (ready, seen))
        assert seen[0] == 12


@pytest.mark.parametrize("x", [np.zeros((2, 2), np.int64), np.zeros(2, np.int32), np.zeros(4, np.int64)[::2]])
def test_only_lines_of_int64_are_published(x):
    with pytest.raises(Exception, match="expected a contiguous one-dimensional int64 array"):
        threads.run(wait_for, 1, 1, (x, np.zeros(2, np.int64)))
