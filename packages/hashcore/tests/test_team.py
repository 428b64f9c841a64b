"""Kernels on torch's threads: every task runs once, arguments arrive unchanged, errors are raised."""

import multiprocessing
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hashcore.cpu import team, threads
from hashcore.cpu.intrinsics import observe, publish
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("real_threads"),
    pytest.mark.skipif(team.runtime() is None, reason="torch uses no OpenMP here"),
]


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
        raise ArithmeticError("task 17 is one too many")


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
    assert found == 2**12 - 1


def test_an_exception_of_a_kernel_is_raised_after_the_others_have_run():
    ran = np.zeros(40, np.int64)
    with pytest.raises(ArithmeticError, match="task 17 is one too many"):
        threads.run(fail_late, 40, 3, (17, ran))
    np.testing.assert_array_equal(ran, 1)
    threads.run(fail_late, 40, 3, (40, ran))


def test_more_threads_than_torch_has_are_threads_of_ours(monkeypatch):
    used = []
    monkeypatch.setattr(threads, "_helpers", lambda process: used.append(process) or ThreadPoolExecutor(3))
    for workers, own in ((3, 0), (4, 3)):
        threads.run(count_tasks, 9, workers, (np.zeros(9, np.int64),))
        assert len(used) == own


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


FORKED_BEFORE_THE_IMPORT = """
import os, torch
torch.set_num_threads(3)
torch.ones(1 << 22).exp_()  # starts torch's threads
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
import numpy as np
import hashcore
from hashcore.cpu import threads
threads.count = lambda *_: 2
keys = np.arange(4000, dtype=np.int32).reshape(1000, 4)
hashcore.score(keys[:8], keys)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells whether a process was forked")
def test_a_process_forked_after_torch_has_run_and_before_the_import_does_not_wait_for_ever():
    subprocess.run([sys.executable, "-c", FORKED_BEFORE_THE_IMPORT], check=True, timeout=300)


class OtherThreads:
    """A build of torch with a thread pool of its own."""

    @staticmethod
    def parallel_info():
        return "ATen parallel backend: native thread pool"


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.delitem(sys.modules, "torch"),
        lambda patch: patch.setitem(sys.modules, "torch", None),
        lambda patch: patch.setitem(sys.modules, "torch", types.ModuleType("torch")),  # being imported
        lambda patch: patch.setattr(torch, "__config__", OtherThreads),
        lambda patch: patch.setattr(team.ctypes, "CDLL", lambda path: object()),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),  # another runtime's number
    ],
    ids=["no torch", "torch is blocked", "half of torch", "own pool", "no OpenMP", "another OpenMP"],
)
def test_where_torch_has_no_such_threads_there_is_no_team(change, monkeypatch):
    assert team.size() == 3
    team._start.cache_clear()
    with monkeypatch.context() as patch:
        change(patch)
        assert team.runtime() is None
        assert team.size() == 1
        assert threads.count(1 << 24, 64) == 2
        ran = np.zeros(9, np.int64)
        threads.run(count_tasks, 9, 2, (ran,))
    np.testing.assert_array_equal(ran, 1)
    team._start.cache_clear()


def follow(first, last, ready, told, seen):
    """Task 0 tells numbers one after the other; task 1 looks how far it got, and what it then finds."""
    for task in range(first, last):
        for i in range(1, len(told)):
            if task == 0:
                told[i] = 10 * i
                publish(ready, 0, i)
            else:
                at = observe(ready, 0)
                seen[i] = told[at] - 10 * at


def test_who_observes_a_number_sees_what_was_written_before_it():
    for _ in range(20):
        ready, told, seen = np.zeros(1, np.int64), np.zeros(3000, np.int64), np.ones(3000, np.int64)
        threads.run(follow, 2, 2, (ready, told, seen))
        assert ready[0] == 2999
        assert not seen[1:].any()


@pytest.mark.parametrize("x", [np.zeros((2, 2), np.int64), np.zeros(2, np.int32), np.zeros(4, np.int64)[::2]])
def test_only_lines_of_int64_are_published(x):
    with pytest.raises(Exception, match="expected a contiguous one-dimensional int64 array"):
        threads.run(follow, 1, 1, (x, np.zeros(2, np.int64), np.zeros(2, np.int64)))
