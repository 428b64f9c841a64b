"""Search results of BitIndex, by code and by exact score."""

import hashcore
import numpy as np
import pytest
from hashcore import BitIndex, reference
from hashcore_index import LAW, brute_force, codes_of, same_state, seeds, sizes, vectors_of, words
from hashcore_samples import assert_same
from hypothesis import given
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
@given(seeds, st.integers(1, 4))
def test_weighted_planes_find_what_their_vector_finds(seed, planes):
    index, queries = BitIndex.from_codes(codes_of(seed, 60, 2)), vectors_of(seed, 3, 64)
    ready, weights = hashcore.planes(queries, planes)
    assert_same(index.search(ready, 9, weights=weights), index.search(queries, 9, planes=planes))


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


def test_a_long_rerank_in_blocks_equals_one_in_one_go(monkeypatch):
    from hashcore.index import encoder

    index, queries = BitIndex.from_vectors(vectors_of(0, 90, 32), keep="float16"), vectors_of(1, 7, 32)
    whole = index.search(queries, 5, rerank=4)
    monkeypatch.setattr(encoder, "GATHERED", 1)
    assert_same(index.search(queries, 5, rerank=4), whole)


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
