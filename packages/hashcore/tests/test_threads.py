"""Kernels: compiled once, until what they are made of changes, and run on threads of ours or torch's; forks; plans."""

import importlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import hashcore
import numba
import numpy as np
import pytest
from hashcore.cpu import team, threads
from hashcore_samples import assert_same, random_codes


@pytest.fixture
def of_torch(request):
    """Three threads of torch's."""
    torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
    if team.runtime() is None:
        pytest.skip("torch uses no OpenMP here")
    request.getfixturevalue("real_threads")
    return torch


@pytest.fixture(params=["ours", "torch's"])
def way(request, monkeypatch):
    """The threads on which kernels run."""
    if request.param == "ours":
        monkeypatch.setattr(team, "size", lambda: 1)
    else:
        request.getfixturevalue("of_torch")
    return request.param


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


@pytest.mark.parametrize("workers", [2, 3, 40])
def test_every_task_runs_once(way, workers):
    for tasks in (1, 2, 3, 11, 12, 13, 200):
        ran = np.zeros(tasks, np.int64)
        threads.run(count_tasks, tasks, workers, (ran,))
        np.testing.assert_array_equal(ran, 1)


@pytest.mark.parametrize("readonly", [False, True])
def test_arguments_of_every_kind_arrive_and_results_are_joined(rng, readonly, of_torch):
    strided, shorts = rng.standard_normal((12, 6)).astype(np.float32)[:, ::2], np.arange(12, dtype=np.uint16)[::-1]
    strided.flags.writeable = not readonly
    out, pair, nested = np.zeros(12), (3, -2), (0.25, (7, 1 << 40))
    given = out, np.float32(1.5), 2.5, pair, nested, strided, np.array([True]), shorts
    found = team.run(threads.compiled(note_arguments), 12, 4, given)
    np.testing.assert_array_equal(out, 1.5 + 2.5 + 3 - 2 + 0.25 + 7 + strided[:, 1].astype(np.float64) + 1 + shorts)
    assert found == 2**12 - 1


def test_an_exception_of_a_kernel_is_raised_after_what_others_had_begun(way):
    ran = np.zeros(40, np.int64)
    with pytest.raises(ArithmeticError, match="task 17 is one too many"):
        threads.run(fail_late, 40, 3, (17, ran))
    assert ran[:16].all()
    assert ran.max() == 1
    threads.run(fail_late, 40, 3, (40, ran))


def _run(kernel, tasks, workers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "compiled", lambda function: function)
        return threads.run(kernel, tasks, workers, ())


def test_a_call_that_fails_has_no_thread_left_that_uses_its_memory():
    left = []

    def kernel(first: int, last: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.03)
        left.append(first)

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            _run(kernel, 40, 2)
        before = len(left)
        time.sleep(0.06)
        assert len(left) == before


def test_the_caller_takes_part_and_waits_for_no_thread_that_is_busy_elsewhere():
    """Pieces that start others would wait for each other for ever, once all threads have one."""
    assert _run(lambda first, last: sum(_run(lambda a, b: b - a, 5, 9)), 12, 9) == [5] * 12


def _in_child(queue):
    ran = np.zeros(9, np.int64)
    threads.run(count_tasks, 9, 2, (ran,))
    queue.put((team.runtime() is None, ran.tolist()))


def test_a_forked_process_uses_threads_of_its_own(of_torch):
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
def test_a_process_forked_after_torch_has_run_and_before_the_import_does_not_wait_for_ever(of_torch):
    subprocess.run([sys.executable, "-c", FORKED_BEFORE_THE_IMPORT], check=True, timeout=300)


WITHOUT = {
    "no torch": lambda patch, torch: patch.delitem(sys.modules, "torch"),
    "torch is blocked": lambda patch, torch: patch.setitem(sys.modules, "torch", None),
    "half of torch": lambda patch, torch: patch.setitem(sys.modules, "torch", types.ModuleType("torch")),
    "own pool": lambda patch, torch: patch.setattr(
        torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool"
    ),
    "no OpenMP": lambda patch, torch: patch.setattr(team.ctypes, "CDLL", lambda path: object()),
    "another OpenMP": lambda patch, torch: patch.setattr(torch, "get_num_threads", lambda: 77),
}


@pytest.mark.parametrize("change", WITHOUT)
def test_where_torch_has_no_such_threads_there_is_no_team(change, monkeypatch, of_torch):
    assert team.size() == 3
    team._start.cache_clear()
    with monkeypatch.context() as patch:
        WITHOUT[change](patch, of_torch)
        assert team.runtime() is None
        assert team.size() == 1
        assert threads.count(1 << 24, 64) == 2
        ran = np.zeros(9, np.int64)
        threads.run(count_tasks, 9, 2, (ran,))
    np.testing.assert_array_equal(ran, 1)
    team._start.cache_clear()


# ---- Plans that are kept change the time of a call and nothing else -------------------------------------------------

CALLS = [
    lambda q, c: hashcore.search(q, c, 5.0, (1, 2)),
    lambda q, c: hashcore.search(q, c, 5, (1.0, 2.0)),
    lambda q, c: hashcore.search(q, c, 5, (1, 2), sink=0.0),
    lambda q, c: hashcore.score(q, c, (1.0, 2.0)),
    lambda q, c: hashcore.search(q.view(np.float32), c, 5, (1, 2)),
]


def test_what_equals_a_kept_call_and_is_wrong_is_refused_each_time(rng):
    query, keys = random_codes(rng, 2, 4), random_codes(rng, 50, 4)
    hashcore.search(query, keys, 5, (1, 2))
    hashcore.score(query, keys, (1, 2))
    hashcore.search(query, keys, 50)
    for _ in range(2):
        for call in CALLS:
            with pytest.raises(TypeError):
                call(query, keys)
        with pytest.raises(ValueError, match=r"k must be in 0\.\.49"):
            hashcore.search(query, keys[:49], 50)


def test_the_plan_of_others_is_left_alone(rng):
    """A kept plan serves calls with pages and without: none writes to it."""
    pool, query = random_codes(rng, 4, 16, 4), random_codes(rng, 1, 4)
    side_by_side = hashcore.search(query, pool.reshape(-1, 4), 5)
    hashcore.search(query, pool, 5, blocks=np.array([3, 2, 1, 0]))
    assert_same(hashcore.search(query, pool.reshape(-1, 4), 5), side_by_side)


FILES = {
    "__init__": "",
    "numbers": "OFFSET = 4\n",
    "kernels": "from made_of_this import numbers\n\ndef kernel(first, last):\n    return numbers.OFFSET + last\n",
}
OTHER_PROCESS = """
from hashcore.cpu import threads
from made_of_this.kernels import kernel
made = threads.compiled(kernel)
print(made(7, 10), len(made.stats.cache_hits))
"""


def test_what_a_change_makes_stale_is_compiled_again_and_nothing_else(tmp_path, monkeypatch):
    """Here and in another process: changes of what is beside a kernel, or beside hashcore's."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "made_of_this").mkdir()
    digest = threads._digest

    def made(offset=4):
        for file, text in FILES.items():
            path = tmp_path / "made_of_this" / f"{file}.py"
            path.write_text(text.replace("4", str(offset)), encoding="utf-8")
            os.utime(path, (1, 1))  # numba compares the kernel's own file
        for module in [module for module in sys.modules if module.startswith("made_of_this")]:
            monkeypatch.delitem(sys.modules, module)
        importlib.invalidate_caches()
        digest.cache_clear()
        kernel = threads.compiled(importlib.import_module("made_of_this.kernels").kernel)
        return kernel(7, 10), len(kernel.stats.cache_hits)

    assert [made(), made(), made(5)] == [(14, 0), (14, 1), (15, 0)]
    settings = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", OTHER_PROCESS]
    assert subprocess.check_output(command, env={**os.environ, **settings}, text=True) == "15 1\n"
    ours = Path(threads.__file__).parent
    monkeypatch.setattr(threads, "_digest", lambda folder: "new" if folder == ours else digest(folder))
    assert made(5) == (15, 0)
