"""BitIndex: what it finds by code and by exact score, how it encodes, and rows that are added and removed."""

import copy
import itertools
import multiprocessing
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hashcore import BitIndex, cpu, reference, unpack
from hashcore.index import encoder, rows
from hashcore_samples import assert_same, codes_of, on_threads, same_state, vectors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.compiler_lock import global_compiler_lock

# Integers, or floats that went through the same operations: tolerance 0 everywhere, except where a law names another.
LAW = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32)


def brute_force(scores, ids, k):
    """Return the k best of scores [..., N], ties to the earliest, by a stable sort."""
    order = np.argsort(-scores.astype(np.int64), axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(scores, order, -1), ids[order]


def test_rerank_and_planes_among_ids_equal_an_index_of_these():
    x, ids = vectors_of(0, 900, 64), np.sort(np.random.default_rng(0).permutation(900)[:70])
    index, few = BitIndex.from_vectors(x, keep="float32"), BitIndex.from_vectors(x[ids], ids, keep="float32")
    for options in ({"planes": 2}, {"rerank": 100}, {"rerank": 2, "vectors": x, "metric": "cosine"}):
        found = index.search(x[:4], 9, ids=ids, **options)
        assert_same(index.search(x[:4], 9, without=np.setdiff1d(np.arange(900), ids), **options), found)
        assert_same(found, few.search(x[:4], 9, **options))


@pytest.mark.sample(4)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("form", ["sorted", "shuffled", "twice", "strided", "read-only", "uint64"])
def test_many_ids_mark_their_rows_whatever_their_form(form, gaps):
    """They are marked by threads, in a table of all numbers between the first and the last id."""
    drawn = np.random.default_rng(2)
    present = 7 + np.arange(300_000) * 2 if gaps else 7 + np.arange(600_000)
    content = rows.Rows(np.empty((len(present), 1), np.int32), present, None, len(present))
    ids = np.flatnonzero(drawn.random(len(present)) < 0.9)
    ids = present[drawn.permutation(ids) if form == "shuffled" else ids]
    expected = np.isin(present, ids)
    if form in ("twice", "strided"):
        ids = np.repeat(ids, 2)[:: 1 if form == "twice" else 2]
    ids = ids.astype(np.uint64) if form == "uint64" else ids
    ids.flags.writeable = form != "read-only"
    for others in (False, True):
        bits, count = content.allowed(ids, others=others)
        assert np.array_equal(np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(present)], expected ^ others)
        assert count == (expected ^ others).sum()
    for wrong in (-1, 6, 8 if gaps else present[-1] + 1, 2**63 - 1):
        with pytest.raises(ValueError, match=f"got {wrong}, which is not"):
            content.allowed(np.append(ids.astype(np.int64), wrong), others=False)
    with pytest.raises(ValueError, match=f"got {2**63 + 7}, which is not"):
        content.allowed(np.append(ids.astype(np.uint64), np.uint64(2**63 + 7)), others=False)


@pytest.mark.parametrize("words", [3, 4])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 1])
def test_filters_hold_in_each_of_several_parts(words, share):
    """Parts begin within a word of the bitmap; of one row in a hundred, all are wanted; some parts have none."""
    codes, queries, ids = codes_of(0, 9001, words, 9), codes_of(1, 2, words, 9), np.arange(9001)[::-1]
    index, spread = BitIndex.from_codes(codes, ids), np.random.default_rng(0).random(9001) < share
    spread[[2999, 3000, 5999, 6000]] |= share > 0  # where parts end and begin
    for chosen in (spread, np.sort(spread)):
        scores, at = reference.search(queries, codes[chosen], k := min(110, int(chosen.sum())))
        for among in ({"ids": chosen}, {"ids": ids[chosen]}, {"without": ~chosen}, {"without": ids[~chosen]}):
            with on_threads(6), mock.patch.object(cpu, "_run", wraps=cpu._run) as run:
                assert_same(index.search(queries, k, **among), (scores, ids[chosen][at]))
            assert [call.args[0].parts for call in run.call_args_list] == [3] * bool(k)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 16, 48])
def test_packed_bytes_score_as_their_bits(count):
    """As numpy and sentence-transformers write them: uint8, or int8 that is lower by 128; padding matches nothing."""
    x, w = vectors_of(0, 90, 8 * count), vectors_of(1, 3, 8 * count)
    octets, asked = np.packbits(x > 0, axis=-1), np.packbits(w > 0, axis=-1)
    signed = [(given.astype(int) - 128).astype(np.int8) for given in (octets, asked)]
    index = BitIndex.from_codes(octets[:50])
    index.add(signed[0][50:])
    assert (index.bits, index.dim, index.codes.shape) == (8 * count, 8 * count, (90, -(-count // 4)))
    scores = ((w > 0)[:, None] == (x > 0)).sum(-1).astype(np.int32)
    expected = brute_force(scores, np.arange(90), 20)
    words = index.encode(w)
    for query in (asked, signed[1], words, w):
        assert_same(index.search(query, 20, **({"planes": 1} if query is w else {})), expected)
    full = np.full_like(words, -1) << (8 * count % 32) if count % 4 else np.zeros_like(words)
    full[:, :-1] = 0
    assert_same(index.search(words | full, 20), expected)
    levels, weights = reference.quantise(w)[0].astype(int), (1, 2, 4)
    planes = np.stack([np.packbits((levels + 7) // 2 & weight, axis=-1) for weight in weights], -2)
    scores = sum(p * (((levels + 7) // 2 & p > 0)[:, None] == (x > 0)).sum(-1) for p in weights).astype(np.int32)
    for found in (index.search(w, 20), index.search(planes, 20, weights=weights)):
        assert_same(found, brute_force(scores, np.arange(90), 20))


def test_an_empty_index_finds_nothing():
    for index in (BitIndex(40), BitIndex.from_codes(codes_of(0, 0, 2)), BitIndex(64, keep="float16")):
        query = vectors_of(0, 2, index.dim)
        assert index.search(query, 0)[1].shape == (2, 0)
        assert (len(index), list(index), 0 in index) == (0, [], False)
    assert index.search(query, 0, rerank=4)[1].shape == (2, 0)


def test_tensors_give_what_arrays_give_as_tensors():
    torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
    x, codes = vectors_of(0, 30, 40), codes_of(0, 30, 2)
    index = BitIndex.from_vectors(torch.from_numpy(x), torch.arange(30), keep="float32")
    same_state(index, BitIndex.from_vectors(x))
    for rerank in (None, 4):
        found = index.search(torch.from_numpy(x[:3]), 5, rerank=rerank)
        assert all(isinstance(f, torch.Tensor) for f in found)
        assert_same([f.numpy() for f in found], index.search(x[:3], 5, rerank=rerank))
    given = index.search(torch.from_numpy(x[:3]), 5, rerank=2, vectors=torch.from_numpy(x))
    assert_same([f.numpy() for f in given], index.search(x[:3], 5, rerank=2))
    assert isinstance(index.encode(torch.from_numpy(x)), torch.Tensor)
    index.remove(torch.tensor([3, 4]))
    index.add(torch.from_numpy(x[:1]))
    assert index.ids.tolist() == [0, 1, 2, *range(5, 31)]
    half = torch.from_numpy(x).bfloat16()
    same_state(BitIndex.from_vectors(half), BitIndex.from_vectors(half.float().numpy()))
    same_state(BitIndex.from_codes(torch.from_numpy(codes)), BitIndex.from_codes(codes))


@LAW
@given(st.data(), st.integers(1, 70), st.sampled_from([32, 64, 96]), st.booleans(), seeds)
def test_codes_are_the_signs_of_the_centred_rotation(data, dim, bits, centred, seed):
    x = vectors_of(seed, 7, dim)
    mean = x.mean(0) if centred else None
    index = BitIndex(dim, bits, seed=seed, mean=mean)
    index.add(x)
    y = x - mean if centred else x
    projected = y.astype(np.float64) @ encoder.rotation(dim, bits, seed).astype(np.float64)
    np.testing.assert_allclose(index._encoder.project("vectors", x), projected, rtol=1e-6, atol=1e-12)
    far = abs(projected) > 1e-12  # signs of others are decided by how a sum is rounded
    np.testing.assert_array_equal(unpack(index.codes)[far], projected[far] > 0)


@pytest.mark.parametrize(("dim", "bits"), [(1, 32), (5, 32), (32, 32), (40, 32), (40, 96), (33, 64)])
def test_rotation_is_special_orthogonal_block_by_block(dim, bits):
    matrix = encoder.rotation(dim, bits, 3)
    assert matrix.shape == (dim, bits)
    for start in range(0, bits, dim):
        block = matrix[:, start : start + dim].astype(np.float64)
        np.testing.assert_allclose(block.T @ block, np.eye(block.shape[1]), atol=1e-6)
        if block.shape[1] == dim:
            assert np.linalg.det(block) == pytest.approx(1, abs=1e-4)
    assert not np.array_equal(matrix, encoder.rotation(dim, bits, 4)) or dim == 1


def test_centring_subtracts_the_mean_of_the_first_vectors_everywhere():
    x = vectors_of(0, 90, 32) + 5
    centred = BitIndex.from_vectors(x, encoder="sign", centre=True)
    moved = BitIndex.from_vectors(x - centred._encoder.mean, encoder="sign")
    np.testing.assert_allclose(centred._encoder.mean, x.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(centred.codes, moved.codes)
    assert_same(centred.search(x[:3], 5), moved.search(x[:3] - centred._encoder.mean, 5))


def test_adding_in_any_split_equals_adding_at_once():
    """Also vectors that are kept, and their codes."""
    for how, parts in (("sign", [0, 3, 40]), ("rotation", [1, 1, 39, 64])):
        x = vectors_of(len(parts), 70, 64)
        whole, split = (BitIndex(64, encoder=how, keep="float16") for _ in range(2))
        whole.add(x)
        for part in np.split(x, parts):
            split.add(part)
        same_state(whole, split)
        assert_same(split.search(x[:3], 5, rerank=2), whole.search(x[:3], 5, rerank=2))
        for row in range(3):  # a query alone finds what it finds in a batch
            assert_same(whole.search(x[row], 5, rerank=2), [found[row] for found in whole.search(x[:3], 5, rerank=2)])


def test_ids_are_not_given_twice_by_default():
    index = BitIndex.from_codes(codes_of(0, 3, 1))
    index.remove([2])
    for seed, count, ids in ((1, 2, None), (2, 1, [40]), (3, 1, None)):
        index.add(codes_of(seed, count, 1), ids)
    assert index.ids.tolist() == [0, 1, 3, 4, 40, 41]


def test_a_search_between_two_additions_knows_the_ids_of_the_first():
    index = BitIndex.from_codes(codes_of(0, 20, 1), ids=np.arange(20)[::-1])
    before, _ = index._rows, index.add(codes_of(1, 10, 1), ids=np.arange(100, 110))
    between, found = index._rows, [before.find(np.array([3])).tolist()]
    index.add(codes_of(2, 25, 1), ids=np.arange(200, 225))
    found += [rows.find(np.array([105, 205])).tolist() for rows in (between, index._rows)]
    assert found == [[16], [25, -1], [25, 35]]


def test_what_is_given_to_an_index_and_by_it_is_a_copy():
    x, ids = vectors_of(0, 9, 32), np.arange(9)
    copy = x.copy()
    index = BitIndex.from_vectors(x, ids, encoder="sign", keep="float32", mean=x[0])
    np.testing.assert_array_equal(x, copy)
    before = index.codes
    for array in (x, ids, index.codes, index.ids, *index.search(before[0], 5)):
        array[...] = 3
    assert index.ids.tolist() == list(range(9))
    np.testing.assert_array_equal(index.codes, before)
    np.testing.assert_allclose(index.search(copy[4], 1, rerank=9)[0], [copy[4] @ copy[4]], rtol=1e-6)


def test_a_search_sees_every_change_whole():
    """While one thread adds and removes pairs of equal codes, no search sees one of a pair alone."""
    base, pair = codes_of(0, 200, 2), codes_of(1, 1, 2)
    index = BitIndex.from_codes(base)

    started, stop = threading.Event(), threading.Event()

    def change():
        first = 1000
        while not stop.is_set():
            index.add(np.repeat(pair, 2, 0), [first, first + 1])
            started.set()
            index.remove([first, first + 1])
            first += 2

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        started.wait(60)
        try:
            for _ in range(300):
                scores, ids = index.search(pair[0], 3)
                alike = ids[scores == 64].tolist()
                assert alike in ([], [alike[0], alike[0] + 1] if alike else [])
        finally:
            stop.set()
        changing.result()
    assert list(index) == list(range(200))


# ---- Other processes: none waits for a lock of another ---------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
X = vectors_of(0, 30, 40)


def copied(index, way):
    if way in ("copy", "deepcopy"):
        return getattr(copy, way)(index)
    with ProcessPoolExecutor(1, multiprocessing.get_context(way)) as pool:
        return pool.submit(copy.copy, index).result(120)


@pytest.mark.parametrize("way", ["copy", "deepcopy", "fork", "spawn"])
def test_a_copy_is_an_index_of_its_own(way, tmp_path):
    """Both are given the same ids in another order, for which there is room behind their rows: each keeps its own."""
    made = BitIndex.from_vectors(X, np.arange(30)[::-1])
    made.save(tmp_path / "index")
    for index in (made, BitIndex.load(tmp_path / "index")):
        assert 7 in index  # where each id stands is kept
        both = (index, np.array([0, 1])), (copied(index, way), np.array([1, 0]))
        same_state(*(each for each, _ in both))
        for each, at in both:
            each.add(X[at], 90 + at)
        for each, at in both:
            assert list(each) == [*range(30)[::-1], *(90 + at)]
            assert_same(each.codes[30:], each.encode(X[at]))
            assert all(number in each for number in (90, 91))


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
        for turn in range(9):
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
