"""Copies, pickles and other processes: each has an index of its own, and none waits for a lock of another."""

import copy
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

import hashcore
import numpy as np
import pytest
from hashcore import BitIndex
from hashcore.cuda import program
from hashcore_index import codes_of, same_state, vectors_of
from numba.core.compiler_lock import global_compiler_lock

X = vectors_of(0, 30, 40)


def loaded(folder) -> BitIndex:
    BitIndex.from_vectors(X).save(folder / "index")
    return BitIndex.load(folder / "index")


INDEXES = {
    "empty": lambda _: BitIndex(40),
    "codes in bytes": lambda _: BitIndex.from_codes(np.packbits(X > 0, axis=-1)),
    "spare rows, ids in no order, vectors": lambda _: BitIndex.from_vectors(X, np.arange(30)[::-1], keep="float16"),
    "mapped": loaded,
}
WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {p}": lambda x, p=p: pickle.loads(pickle.dumps(x, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    "spawn": lambda index: itself_elsewhere("spawn", index),
    "fork": lambda index: itself_elsewhere("fork", index),
}


def itself_elsewhere(method: str, index: BitIndex) -> BitIndex:
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        return pool.submit(copy.copy, index).result(120)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", INDEXES)
def test_a_copy_is_an_index_of_its_own(kind, way, tmp_path):
    """Changes of one in turn with those of the other, after which each has what it was given."""
    index = INDEXES[kind](tmp_path)
    99 in index  # noqa: B015  positions of ids are kept
    both = index, WAYS[way](index)
    same_state(*both)
    assert repr(both[0]) == repr(both[1])
    expected = [dict(zip(index.ids.tolist(), index.codes.tolist(), strict=True)) for _ in both]
    for turn in range(4):
        for side, each in enumerate(both):
            fresh, number = vectors_of(10 * turn + side, 1, 40), 900 + 7 * turn - side
            each.add(fresh, [number])
            expected[side][number] = each.encode(fresh)[0].tolist()
            if turn == 2 and kind != "empty":
                each.remove([side, 4])
                del expected[side][side], expected[side][4]
    for each, rows in zip(both, expected, strict=True):
        assert dict(zip(each.ids.tolist(), each.codes.tolist(), strict=True)) == rows
        assert all(number in each for number in rows)
        assert each.search(X[:2], len(each))[1].shape == (2, len(each))


def test_every_other_public_class_has_nothing_that_changes():
    """Those of the modules that packages and pages import from, besides errors."""
    public = [x for module in (hashcore, program) for x in vars(module).values() if isinstance(x, type)]
    ours = [x for x in public if x.__module__.startswith("hashcore") and not issubclass(x, Exception)]
    assert ours == [BitIndex, program.Program]
    one = program.Program("pack.cu", {"NAME": 1})
    assert [way(one) for name, way in WAYS.items() if name not in ("spawn", "fork")].count(one) == len(WAYS) - 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_while_a_thread_adds_does_not_wait_for_it(tmp_path):
    """The child sees the rows before or after an addition, and can change, ask, search and save them."""
    index, stop = BitIndex.from_vectors(X, np.arange(30)[::-1]), threading.Event()

    def add():
        for number in itertools.count(1000):
            if stop.is_set():
                return
            index.add(X[:5], np.arange(5 * number, 5 * number + 5)[::-1])
            if number % 40 == 0:
                index.remove(index.ids[30:])

    def in_child(path) -> None:
        before = index.ids.tolist()
        assert len(before) % 5 == 0
        assert all(number in index for number in before)
        assert max(before) + 1 not in index
        index.add(X[:5], [7 * max(before) + i for i in range(5)])
        index.remove(before[:2])
        index.search(X[:2], 3, without=before[2:4])
        copy.copy(index).save(path)
        same_state(index, BitIndex.load(path))

    adding = threading.Thread(target=add)
    adding.start()
    try:
        for turn in range(40):
            time.sleep(0.0007 * (turn % 7))
            child = os.fork()
            if child == 0:
                leave(in_child, tmp_path / f"{turn}")
            assert ended(child) == 0, f"child {turn} hung or failed"
    finally:
        stop.set()
        adding.join()


def leave(work, *given) -> None:
    """End this process, with status 0 if the work was done."""
    status = 1
    try:
        work(*given)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Return the exit status of a child, which is killed after 20 seconds."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_waits_for_a_thread_that_compiles():
    """A copy of the compiler's lock would stay locked for ever."""
    index, order, begun = BitIndex.from_codes(codes_of(0, 9, 2)), [], threading.Event()
    index.search(codes_of(1, 1, 2), 1)  # imports the kernels

    def compile_long():
        with global_compiler_lock:
            begun.set()
            time.sleep(0.2)
            order.append("compiled")

    thread = threading.Thread(target=compile_long)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(int(global_compiler_lock.is_locked()))
    order.append("forked")
    thread.join()
    assert ended(child) == 0
    assert order == ["compiled", "forked"]
