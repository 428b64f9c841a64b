"""Copies, pickles and other processes: each has an index of its own, and none waits for a lock of another."""

import copy
import itertools
import multiprocessing
import pickle
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from hashcore import BitIndex
from hashcore_samples import codes_of, same_state, vectors_of
from numba.core.compiler_lock import global_compiler_lock

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
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
    "oldest pickle": lambda index: pickle.loads(pickle.dumps(index, 2)),
    "newest pickle": lambda index: pickle.loads(pickle.dumps(index, pickle.HIGHEST_PROTOCOL)),
    "spawn": lambda index: itself_elsewhere("spawn", index),
    "fork": lambda index: itself_elsewhere("fork", index),
}
CASES = [(kind, way) for kind in INDEXES for way in WAYS if way != "spawn" or kind == "mapped"]


def itself_elsewhere(method: str, index: BitIndex) -> BitIndex:
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        return pool.submit(copy.copy, index).result(120)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_copy_is_an_index_of_its_own(kind, way, tmp_path):
    """Changes of one in turn with those of the other, after which each has what it was given."""
    index = INDEXES[kind](tmp_path)
    99 in index  # noqa: B015  positions of ids are kept
    both = index, WAYS[way](index)
    same_state(*both)
    assert repr(both[0]) == repr(both[1])
    expected = [dict(zip(index.ids.tolist(), index.codes.tolist(), strict=True)) for _ in both]
    for turn in range(3):
        for side, each in enumerate(both):
            fresh, number = vectors_of(10 * turn + side, 1, 40), 900 + 7 * turn - side
            each.add(fresh, [number])
            expected[side][number] = each.encode(fresh)[0].tolist()
            if turn == 1 and kind != "empty":
                each.remove([side, 4])
                del expected[side][side], expected[side][4]
    for each, rows in zip(both, expected, strict=True):
        assert dict(zip(each.ids.tolist(), each.codes.tolist(), strict=True)) == rows
        assert all(number in each for number in rows)
        assert each.search(X[:2], len(each))[1].shape == (2, len(each))


def exit_code_of(work, *given):
    """Run it in a fork of this process; None after 20 seconds."""
    child = multiprocessing.get_context("fork").Process(target=work, args=given)
    child.start()
    child.join(20)
    code = child.exitcode
    child.kill()
    return code


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
        for turn in range(25):
            time.sleep(0.0007 * (turn % 7))
            assert exit_code_of(in_child, tmp_path / f"{turn}") == 0, f"child {turn} hung or failed"
    finally:
        stop.set()
        adding.join()


def test_a_fork_waits_for_a_thread_that_compiles():
    """A copy of the compiler's lock would stay locked for ever."""
    index, order, begun = BitIndex.from_codes(codes_of(0, 9, 2)), [], threading.Event()
    index.search(codes_of(1, 1, 2), 1)  # imports the kernels

    def compile_long():
        with global_compiler_lock:
            begun.set()
            time.sleep(0.1)
            order.append("compiled")

    thread = threading.Thread(target=compile_long)
    thread.start()
    begun.wait()
    assert exit_code_of(lambda: sys.exit(order != ["compiled"] or global_compiler_lock.is_locked())) == 0
    thread.join()
