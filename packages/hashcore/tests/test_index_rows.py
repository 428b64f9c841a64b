"""Adding and removing rows of a BitIndex, in any order, while others search."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hashcore import BitIndex, reference
from hashcore.index import encoder
from hashcore_index import LAW, brute_force, codes_of, same_state, seeds, sizes, vectors_of
from hashcore_samples import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st


@LAW
@given(st.lists(st.integers(0, 40), max_size=5), st.sampled_from(["sign", "rotation"]), seeds)
def test_adding_in_any_split_equals_adding_at_once(parts, how, seed):
    x = vectors_of(seed, sum(parts), 64)
    whole, split = (BitIndex(64, encoder=how, keep="float16") for _ in range(2))
    whole.add(x)
    for part in np.split(x, np.cumsum(parts)):
        split.add(part)
    same_state(whole, split)
    k = min(5, len(x))
    assert_same(split.search(x[:3], k, rerank=2), whole.search(x[:3], k, rerank=2))


def test_adding_across_blocks_equals_adding_one_at_a_time(monkeypatch):
    x = vectors_of(0, 50, 32)
    whole = BitIndex.from_vectors(x)
    monkeypatch.setattr(encoder, "BLOCK", 7)
    same_state(BitIndex.from_vectors(x), whole)


@LAW
@given(st.data(), seeds, st.integers(1, 3))
def test_after_removal_an_index_equals_one_built_without(data, seed, alphabet):
    n = data.draw(sizes)
    codes = codes_of(seed, n, 2, alphabet)
    ids = np.random.default_rng(seed).permutation(3 * n)[:n]
    if data.draw(st.booleans()):
        ids = np.sort(ids)
    gone = data.draw(st.sets(st.integers(0, n - 1)))
    index, keep = BitIndex.from_codes(codes, ids), np.delete(np.arange(n), sorted(gone))
    for part in np.array_split(ids[sorted(gone)], 3):
        index.remove(part)
    without = BitIndex.from_codes(codes[keep], ids[keep])
    same_state(index, without)
    assert len(index) == len(keep)
    k = data.draw(st.integers(0, len(keep)))
    queries = codes_of(seed + 1, 2, 2)
    assert_same(index.search(queries, k), without.search(queries, k))
    assert all((i in index) == (i in set(ids[keep].tolist())) for i in ids.tolist())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 12), min_size=1)), max_size=12))
def test_any_history_equals_a_list_of_its_rows(history):
    index, model = BitIndex(32, encoder="sign"), {}
    for step, (adds, numbers) in enumerate(history):
        chosen = sorted(numbers, key=lambda i: (i * 5) % 13)  # not ascending
        if adds:
            new = [i for i in chosen if i not in model]
            fresh = codes_of(step, len(new), 1, 3)
            index.add(fresh, np.array(new, np.int64))
            model |= dict(zip(new, fresh, strict=True))
        else:
            old = [i for i in chosen if i in model]
            index.remove(old)
            for i in old:
                del model[i]
        assert [i in index for i in range(13)] == [i in model for i in range(13)]
    assert list(index) == list(model)
    if model:
        query = codes_of(1, 1, 1)
        scores = reference.score(query, np.array(list(model.values())))
        assert_same(index.search(query, len(model)), brute_force(scores, np.array(list(model)), len(model)))


def test_ids_are_not_given_twice_by_default():
    index = BitIndex.from_codes(codes_of(0, 3, 1))
    index.remove([2])
    index.add(codes_of(1, 2, 1))
    index.add(codes_of(2, 1, 1), [40])
    index.add(codes_of(3, 1, 1))
    assert index.ids.tolist() == [0, 1, 3, 4, 40, 41]


def test_what_an_index_gives_away_is_a_copy():
    index = BitIndex.from_codes(codes_of(0, 5, 2))
    before = index.codes
    for array in (index.codes, index.ids, *index.search(before[0], 5)):
        array[...] = 77
    assert index.ids.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(index.codes, before)


def test_inputs_are_neither_changed_nor_held():
    x, ids = vectors_of(0, 9, 32), np.arange(9)
    copy = x.copy()
    index = BitIndex.from_vectors(x, ids, encoder="sign", keep="float32", mean=x[0])
    np.testing.assert_array_equal(x, copy)
    before = index.codes
    x[...], ids[...] = -1, 3
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
