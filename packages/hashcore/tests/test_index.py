"""BitIndex: what it finds by code and by exact score, how it encodes, and rows that are added and removed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hashcore import BitIndex, reference
from hashcore.index import encoder
from hashcore_index import LAW, brute_force, codes_of, same_state, seeds, sizes, vectors_of, words
from hashcore_samples import assert_same, on_threads
from hypothesis import given, settings
from hypothesis import strategies as st


@LAW
@given(st.data(), sizes, words, seeds)
def test_code_search_equals_brute_force(data, n, width, seed):
    codes = codes_of(seed, n, width, data.draw(st.sampled_from([2, 9, 2**32])))
    queries = codes_of(seed + 1, data.draw(st.integers(0, 3)), width)
    k = data.draw(st.integers(0, n))
    found = BitIndex.from_codes(codes).search(queries, k)
    assert_same(found, brute_force(reference.score(queries, codes), np.arange(n), k))


@LAW
@given(st.data(), sizes, words, st.integers(1, 8), seeds)
def test_plane_search_equals_brute_force(data, n, width, planes, seed):
    codes, queries = codes_of(seed, n, width), vectors_of(seed, 2, 32 * width)
    k = data.draw(st.integers(0, n))
    found = BitIndex.from_codes(codes).search(queries, k, planes=planes)
    assert_same(found, brute_force(reference.score(*_planes_of(queries, planes, codes)), np.arange(n), k))


def _planes_of(queries, planes, codes):
    query, weights = reference.planes(queries, planes)
    return query, codes, weights


@LAW
@given(st.data(), st.sampled_from([None, "float32", "float16"]), st.sampled_from(["dot", "cosine"]), seeds)
def test_rerank_of_everything_is_exact_search(data, keep, metric, seed):
    n = data.draw(st.integers(1, 60))
    x = vectors_of(seed, n, 32)
    x[n // 2] = 0
    queries = vectors_of(seed + 1, 3, 32)
    index = BitIndex.from_vectors(x, keep=keep)
    k = data.draw(st.integers(1, n))
    scores, ids = index.search(queries, k, rerank=n, metric=metric, vectors=x if keep is None else None)
    kept = x.astype(keep or "float32").astype(np.float64)
    exact = queries.astype(np.float64) @ kept.T
    if metric == "cosine":
        norms = np.linalg.norm(kept, axis=1) * np.linalg.norm(queries.astype(np.float64), axis=1)[:, None]
        exact = np.where(norms > 0, exact / np.where(norms > 0, norms, 1), 0)
    np.testing.assert_array_equal(ids, np.argsort(-exact.astype(np.float32), axis=-1, kind="stable")[:, :k])
    np.testing.assert_allclose(scores, np.take_along_axis(exact, ids, -1), rtol=1e-6, atol=1e-7)
    assert scores.dtype == np.float32


def test_given_vectors_are_found_by_id():
    x = vectors_of(0, 40, 32)
    chosen = np.array([30, 4, 17, 2])
    index = BitIndex.from_vectors(x[chosen], chosen)
    index.remove(4)
    scores, ids = index.search(x[17], 3, rerank=1, vectors=x)
    assert sorted(ids.tolist()) == [2, 17, 30]
    np.testing.assert_allclose(scores, x[ids] @ x[17], rtol=1e-6)


@LAW
@given(st.data(), seeds, st.sampled_from([None, 3]))
def test_a_batch_equals_its_queries_alone(data, seed, rerank):
    lead = data.draw(st.sampled_from([(), (1,), (5,), (2, 3), (2, 1, 2), (0,), (2, 0)]))
    index = BitIndex.from_vectors(vectors_of(seed, 80, 40), keep="float32")
    queries = vectors_of(seed + 1, int(np.prod(lead)), 40).reshape(*lead, 40)
    scores, ids = index.search(queries, 6, rerank=rerank)
    assert scores.shape == ids.shape == (*lead, 6)
    for at in np.ndindex(lead):
        assert_same((scores[at], ids[at]), index.search(queries[at], 6, rerank=rerank))


@pytest.mark.parametrize("part", range(10))
def test_a_filtered_search_equals_a_search_of_the_rows_it_leaves(part):
    """1,000 filters: any share of the ids in any order, of an index with or without gaps, on one thread or three."""
    for seed in range(100 * part, 100 * part + 100):
        rng = np.random.default_rng(seed)
        n, width = int(rng.choice([1, 63, 64, 65, 700, 5000], p=[0.1, 0.1, 0.1, 0.1, 0.55, 0.05])), rng.integers(1, 6)
        ids = [np.arange(n) + 3, np.sort(rng.permutation(2 * n)[:n]), rng.permutation(2 * n)[:n]][seed % 3]
        codes, query = (
            codes_of(x, size, width, 2 ** int(rng.choice([1, 32]))) for x, size in ((seed, n), (seed + 9999, 2))
        )
        index = BitIndex.from_codes(codes, ids)
        chosen = rng.random(n) < rng.choice([0, 0.01, 0.1, 0.5, 1])
        scores, k = reference.score(query, codes), int(rng.choice([0, 1, 0.1 * n, n]))
        given = rng.permutation(np.repeat(ids[chosen], 1 + seed % 2))
        with on_threads(1 + seed % 2 * 2):
            for name, left in (("ids", chosen), ("without", ~chosen)):
                found = index.search(query, min(k, left.sum()), **{name: given.tolist() if seed % 7 == 0 else given})
                assert_same(found, brute_force(scores[:, left], ids[left], min(k, left.sum())))
                assert_same(index.search(query, min(k, left.sum()), **{name: chosen}), found)


def test_rerank_and_planes_among_ids_equal_an_index_of_these():
    x, ids = vectors_of(0, 900, 64), np.sort(np.random.default_rng(0).permutation(900)[:70])
    index, few = BitIndex.from_vectors(x, keep="float32"), BitIndex.from_vectors(x[ids], ids, keep="float32")
    for options in ({"planes": 2}, {"rerank": 100}, {"rerank": 2, "vectors": x, "metric": "cosine"}):
        found = index.search(x[:4], 9, ids=ids, **options)
        assert_same(index.search(x[:4], 9, without=np.setdiff1d(np.arange(900), ids), **options), found)
        assert_same(found, few.search(x[:4], 9, **options))


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


def test_repr_says_what_is_inside():
    x = vectors_of(0, 10, 40)
    assert repr(BitIndex.from_vectors(x, centre=True, keep="float16", seed=5)) == (
        "BitIndex(10 codes of 64 bits, rotation of 40 dimensions, seed 5, centred, float16 vectors kept, 0.0 MB)"
    )
    assert repr(BitIndex.from_codes(codes_of(0, 3, 4))) == "BitIndex(3 codes of 128 bits, signs, 0.0 MB)"
    assert BitIndex.from_codes(codes_of(0, 3, 4)).nbytes == 3 * (16 + 8)


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
    index.add(torch.from_numpy(codes[:0]), None) if index.keep is None else index.add(torch.from_numpy(x[:1]))
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
    projected = np.zeros((7, bits), np.float32)
    y = x - mean if centred else x
    for j, row in enumerate(encoder.rotation(dim, bits, seed)):  # one rounding an addition, first dimension first
        projected += y[:, j, None] * row
    np.testing.assert_array_equal(index._encoder.project("vectors", x), projected)
    np.testing.assert_array_equal(index.codes, reference.pack(projected))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_every_float_dtype_and_stride_gives_the_same_codes(dtype):
    x = vectors_of(0, 20, 40).astype(np.float16)
    expected = BitIndex.from_vectors(x.astype(np.float32)).codes
    wide = np.zeros((40, 80), dtype)
    wide[::2, ::2] = x
    for view in (x.astype(dtype), wide[::2, ::2], np.asfortranarray(x.astype(dtype))):
        np.testing.assert_array_equal(BitIndex.from_vectors(view).codes, expected)


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
