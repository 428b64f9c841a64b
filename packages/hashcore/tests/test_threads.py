"""Compiling and running kernels: results do not depend on the threads."""

import threading
import time

import pytest
from hashcore.cpu import threads
from hypothesis import given
from hypothesis import strategies as st


@given(tasks=st.integers(1, 50), workers=st.integers(1, 12))
def test_every_task_runs_once(tasks, workers):
    ran = []

    def kernel(first: int, last: int) -> int:
        ran.extend(range(first, last))
        return last - first

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "compiled", lambda function: function)
        assert sum(threads.run(kernel, tasks, workers, ())) == tasks
    assert sorted(ran) == list(range(tasks))


def _run(kernel, tasks, workers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "compiled", lambda function: function)
        return threads.run(kernel, tasks, workers, ())


def test_a_piece_that_fails_fails_the_whole():
    def kernel(first: int, last: int) -> None:
        if first <= 17 < last:
            raise ArithmeticError("task 17")

    for _ in range(20):
        with pytest.raises(ArithmeticError, match="task 17"):
            _run(kernel, 40, 3)


def test_a_call_that_fails_has_no_thread_left_that_uses_its_memory():
    left = []

    def kernel(first: int, last: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.1)
        left.append(first)

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            _run(kernel, 40, 2)
        before = len(left)
        time.sleep(0.2)
        assert len(left) == before


def test_the_caller_takes_part_and_waits_for_no_thread_that_is_busy_elsewhere():
    """Pieces that start others would wait for each other for ever, once all threads have one."""
    assert _run(lambda first, last: sum(_run(lambda a, b: b - a, 5, 9)), 12, 9) == [5] * 12


@given(work=st.integers(0, 2**50), setting=st.integers(1, 300))
def test_a_thread_is_used_for_each_grain_of_work_that_the_setting_allows(work, setting):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads.numba.config, "NUMBA_NUM_THREADS", setting)
        patch.setattr(threads.team, "size", lambda: 1)
        most, count = threads.most(), threads.count(work)
        assert threads.count(work, setting) == count
    assert most == setting
    assert 1 <= count <= most
    assert count == most or count * threads.GRAIN <= max(work, threads.GRAIN) < (count + 1) * threads.GRAIN
