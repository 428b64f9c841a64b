"""Errors of the functions and of BitIndex: the same words for arrays and tensors; nothing is changed or written."""

import re
import subprocess
import sys

import hashcore
import numpy as np
import pytest
from hashcore import BitIndex, group_planes, pack, planes, quantise, score, search, topk, unpack
from hashcore.index import encoder
from hashcore_samples import random_codes, tensor

CODES = np.zeros((3, 4), np.int32)
SCORES = np.zeros((2, 5), np.int32)
POOL = np.zeros((3, 16, 4), np.int32)
ONE = np.zeros((1, 4), np.int32)
FIVE = np.zeros((5, 3, 4), np.int32)

REFUSED = {
    "pack a list": (lambda: pack([1.0]), TypeError, "not mixed, got x: list; convert them to one kind"),
    "pack a scalar": (lambda: pack(np.array(1.0)), ValueError, "shape [..., D], got a scalar"),
    "pack 33": (lambda: pack(np.zeros(33)), ValueError, "positive multiple of 32 (bits per word), got 33; pad it"),
    "unpack floats": (lambda: unpack(np.zeros(4)), TypeError, "must be int32 words, got float64; use hashcore.pack"),
    "unpack a scalar": (lambda: unpack(np.int32(1) * np.array(1, "i4")), TypeError, "got codes: int32"),
    "8 of 768 bits": (lambda: BitIndex(768).search(np.ones(768), 0, planes=8), ValueError, "195840; use fewer planes"),
    "9 planes": (lambda: quantise(np.ones(4), 9), ValueError, "planes must be in 1..8, got 9;"),
    "2.5 planes": (lambda: quantise(np.ones(4), 2.5), TypeError, "planes must be an integer, got 2.5"),
    "quantise inf": (lambda: quantise(np.array([1, np.inf])), ValueError, "finite in float32, got inf in a row"),
    "quantise nothing": (lambda: quantise(np.ones((2, 0))), ValueError, "must not be empty, got 0;"),
    "group of 0": (lambda: group_planes(CODES[:0]), ValueError, "at least one code, got shape [0, 4]"),
    "group of a code": (lambda: group_planes(CODES[0]), ValueError, "shape [..., G, W], got [4]; add the"),
    "score int64": (lambda: score(CODES.astype(int), CODES), TypeError, "query must be int32 words, got int64"),
    "score one key": (lambda: score(CODES, CODES[0]), ValueError, "keys must have shape [..., N, W], got [4];"),
    "score words": (lambda: score(CODES, CODES[:, :3]), ValueError, "the same number of words, got 4 and 3;"),
    "score lead": (lambda: score(FIVE[:2], FIVE), ValueError, "must broadcast, got [2] and [5]; insert dimensions of"),
    "2 weights": (lambda: score(CODES, CODES, (1, 2)), ValueError, "got 2 weights for 3 planes;"),
    "weight 0": (lambda: score(CODES, CODES, (1, 0, 2)), ValueError, "must be positive, got (1, 0, 2); remove planes"),
    "weight 1.5": (lambda: score(CODES, CODES, (1, 1.5, 2)), TypeError, "weights must be an integer, got 1.5"),
    "large weights": (lambda: score(CODES, CODES, (1, 2, 2**24)), ValueError, "fit int32, got sum(weights)"),
    "topk floats": (lambda: topk(np.zeros(4), 1), TypeError, "scores must be integers, got float64;"),
    "topk a scalar": (lambda: topk(np.array(4), 1), ValueError, "shape [..., N], got a scalar"),
    "k beyond n": (lambda: topk(SCORES, 6), ValueError, "k must be in 0..5, the number of scores in a row, got 6;"),
    "k 1.5": (lambda: topk(SCORES, 1.5), TypeError, "k must be an integer, got 1.5; convert it"),
    "k row beyond": (lambda: topk(SCORES, np.array([1, 6])), ValueError, "k must be in 0..5, the number of"),
    "k rows": (lambda: topk(SCORES, np.array([1, 2, 3])), ValueError, "k must be an integer or broadcast to one inte"),
    "length beyond": (lambda: topk(SCORES, 1, lengths=6), ValueError, "lengths must be in 0..5, the number of scores"),
    "length below": (lambda: topk(SCORES, 1, lengths=np.array([5, -1])), ValueError, "lengths must be in 0..5, the"),
    "start negative": (lambda: topk(SCORES, 1, starts=-1), ValueError, "starts must be in 0..5, the number"),
    "start beyond": (lambda: topk(SCORES, 1, lengths=2, starts=np.array([1, 3])), ValueError, "3 and length 2 in"),
    "lengths floats": (lambda: topk(SCORES, 1, lengths=np.ones(2)), TypeError, "lengths must be an integer or"),
    "sink negative": (lambda: topk(SCORES, 1, sink=-1), ValueError, "must be 0 or more positions, got -1; 0 excludes"),
    "recent 1.5": (lambda: topk(SCORES, 1, recent=1.5), TypeError, "recent must be an integer, got 1.5;"),
    "search order": (lambda: search(CODES, CODES, 1, order="worst"), ValueError, "order must be one of 'best', 'inde"),
    "search range": (lambda: search(CODES, CODES, 1, (1, 2, 509)), ValueError, "the scores of a search must stay bel"),
    "k a list": (lambda: topk(SCORES, [1, 2]), TypeError, "k must be an integer, got [1, 2];"),
    "blocks a list": (lambda: search(ONE, POOL, 1, blocks=[0]), TypeError, "must be an array of page numbers, got li"),
    "blocks floats": (lambda: search(ONE, POOL, 1, blocks=np.zeros(2)), TypeError, "int32 or int64 page numbers, got"),
    "blocks a scalar": (lambda: search(ONE, POOL, 1, blocks=np.array(0)), ValueError, "shape [..., T], got a scalar"),
    "no such page": (lambda: search(ONE, POOL, 1, blocks=np.array([0, 3])), ValueError, "pages in 0..2, got 3; short"),
    "page -1": (lambda: search(ONE, POOL, 1, blocks=np.array([-1])), ValueError, "must be pages in 0..2, got -1; sho"),
    "two tables": (lambda: search(ONE, POOL, 1, blocks=np.zeros((2, 1), int)), ValueError, "shape [1, 'T'], got [2,"),
    "beyond the pages": (lambda: search(ONE, POOL, 1, blocks=np.array([0]), lengths=17), ValueError, "in 0..16"),
    "no page axis": (lambda: search(ONE, POOL[0], 1, blocks=np.array([0])), ValueError, "[..., M, S, W], got [16, 4]"),
    "gaps": (lambda: search(ONE[:, :2], POOL[..., ::2], 1, blocks=np.array([0])), ValueError, "contiguous and aligned"),
}


REFUSED |= {
    f"a mask in {name}": (call, TypeError, f"{name} must be an array without a mask, got a masked array; choose its")
    for name, call in {
        "x": lambda: pack(np.ma.array(np.zeros(32))),
        "query": lambda: score(np.ma.array(CODES), CODES),
        "keys": lambda: score(CODES, np.ma.array(CODES)),
        "k": lambda: topk(SCORES, np.ma.array(1)),
        "lengths": lambda: topk(SCORES, 1, lengths=np.ma.array([1, 1])),
        "blocks": lambda: search(ONE, POOL, 1, blocks=np.ma.array([1])),
    }.items()
}


# Values of arrays, which the host does not see on a device; and what is said of arrays alone.
OF_ARRAYS = ["k row beyond", "start beyond", "no such page", "unpack a scalar", "pack a list"]
OF_ARRAYS += ["gaps", "blocks a list", "length below", "page -1"]
OF_ARRAYS += [case for case in REFUSED if case.startswith("a mask in")]


@pytest.mark.parametrize("case", [case for case in REFUSED if case not in OF_ARRAYS])
def test_a_device_refuses_the_same_in_the_same_words(case, on_device, monkeypatch):
    def on_tensors(name):
        function = getattr(hashcore, name)
        return lambda *given, **how: function(*map(tensor, given), **{option: tensor(x) for option, x in how.items()})

    for name in ("group_planes", "pack", "planes", "quantise", "score", "search", "topk", "unpack"):
        monkeypatch.setitem(globals(), name, on_tensors(name))
    call, error, words = REFUSED[case]
    with pytest.raises(error, match=re.escape(words)):
        call()
    assert on_device.kernels == []


def test_inputs_are_not_modified(rng):
    w, codes = rng.normal(size=(4, 64)).astype(np.float32), random_codes(rng, 4, 2)
    scores, k = rng.integers(0, 9, (4, 70)).astype(np.int32), np.array([1, 2, 3, 4])
    inputs, before = (w, codes, scores, k), [x.copy() for x in (w, codes, scores, k)]
    for x in inputs:
        x.flags.writeable = False  # a write would raise here, and the copies catch one that numba makes
    pack(w), unpack(codes), quantise(w), planes(w), group_planes(codes), topk(scores, k)
    score(codes, codes), score(codes, codes, (1, 2, 3, 4)), search(codes, codes, 2, (1, 2, 3, 4))
    search(codes, codes, k, lengths=k, starts=k - 1)
    for x, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_numpy_use_imports_no_torch_and_no_cuda_and_import_alone_no_numba(tmp_path):
    code = f"""
import sys
sys.modules["cuda"] = None
import numpy, hashcore
index = hashcore.BitIndex(64, encoder="sign", keep="float16")
index.add(numpy.eye(64))
index.save({str(tmp_path / "index")!r})
assert "numba" not in sys.modules
hashcore.BitIndex.load({str(tmp_path / "index")!r}).search(numpy.eye(64), 3, rerank=2)
planes, weights = hashcore.planes(numpy.ones((2, 64)))
hashcore.topk(hashcore.score(planes, planes[0], weights), 1)
hashcore.search(planes, planes[0], 1, weights)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


X = np.linspace(-1, 1, 5 * 40).reshape(5, 40).astype(np.float32)
LARGE = np.full_like(X, 3e38)
ROWS = np.arange(10, dtype=np.int32).reshape(5, 2)


def broken(value, dtype=np.float32):
    x = X.astype(dtype)
    x[3, 7] = value
    return x


BUILDING = {
    "no dimensions": (lambda: BitIndex(0), ValueError, "dim must be in 1..1048576, got 0; give the number of"),
    "33 bits": (lambda: BitIndex(40, 33), ValueError, "bits must be a multiple of 32, or of 8 with encoder='sign', g"),
    "fewer signs": (lambda: BitIndex(64, 32, encoder="sign"), ValueError, "one bit per dimension, got bits = 32 for"),
    "an encoder": (lambda: BitIndex(40, encoder="pca"), ValueError, "one of 'rotation', 'sign', got 'pca'; choose"),
    "a precision": (lambda: BitIndex(40, keep="int8"), ValueError, "one of None, 'float16', 'float32', got 'int8'"),
    "a seed": (lambda: BitIndex(40, seed=-1), ValueError, "seed must be in 0..9223372036854775807, got -1; choose"),
    "a short mean": (lambda: BitIndex(40, mean=X[0, :9]), ValueError, "mean must have shape [40], got [9]; average"),
    "a broken mean": (lambda: BitIndex(40, mean=broken(np.inf)[3]), ValueError, "mean must be finite in float32, got"),
    "a list": (lambda: BitIndex.from_vectors([[1.0]]), TypeError, "expected numpy arrays or torch tensors"),
    "bytes as vectors": (lambda: BitIndex.from_vectors(X.astype("i1")), ValueError, "got int8 [5, 40]; reshape"),
    "vectors as codes": (lambda: BitIndex.from_codes(X), TypeError, "int32 words, uint8 or int8, got float32; use"),
    "no words": (lambda: BitIndex.from_codes(ROWS[:, :0]), ValueError, "shape [n, W] or [n, B], got [5, 0]; reshape"),
    "big mean": (lambda: BitIndex.from_vectors(broken(1e300, float), centre=True), ValueError, "mean must be finite"),
    "far off": (lambda: BitIndex.from_vectors(LARGE, encoder="sign", mean=-LARGE[0]), ValueError, "infinity in row 0;"),
    "mean of none": (lambda: BitIndex.from_vectors(X[:0], centre=True), ValueError, "got none or mean= as well"),
}

ADDING = {
    "other vectors": (lambda i: i.add(X[:, :9]), ValueError, "vectors must have shape [n, 40] for this index, got [5,"),
    "one vector": (lambda i: i.add(X[0]), ValueError, "shape [n, 40] for this index, got [40]; reshape"),
    "other codes": (lambda i: i.add(ROWS[:, :1]), ValueError, "codes must have shape [n, 2] for this index, got [5,"),
    "NaN": (lambda i: i.add(broken(np.nan)), ValueError, "finite in float32, got NaN or infinity in row 3; remove"),
    "float ids": (lambda i: i.add(X, np.arange(5.0)), TypeError, "must be integers, got float64; convert"),
    "bytes": (lambda i: i.add(ROWS.view("u1")[:, 1:]), ValueError, "codes must have shape [n, 8] for this index, got"),
    "negative ids": (lambda i: i.add(X, [5, 6, 7, 8, -1]), ValueError, "got -1..8; -1 marks an empty slot"),
    "ids twice": (lambda i: i.add(X, [9, 8, 7, 8, 6]), ValueError, "ids must be unique, got 8 twice; pass one id per"),
    "a known id": (lambda i: i.add(X[:2], [9, 3]), ValueError, "ids must be new, got 3, which is in the index; remove"),
    "an unknown id": (lambda i: i.remove([2, 77]), ValueError, "must be in the index, got 77, which is not; test with"),
    "a mask": (lambda i: i.remove([True]), TypeError, "ids must be integers, got bool; convert them"),
    "a name": (lambda i: i.remove("a"), TypeError, "ids must be integers, got <U1; convert them"),
}

SEARCHING = {
    "k beyond": (lambda i: i.search(X, 6), ValueError, "k must be in 0..5, got 6; there are no more codes in"),
    "k beyond the ids": (lambda i: i.search(X, 3, ids=[1, 4]), ValueError, "in 0..2, got 3; there are no more codes"),
    "k beyond the others": (lambda i: i.search(X, 3, without=[1, 4, 2]), ValueError, "more codes without these ids;"),
    "unknown ids": (lambda i: i.search(X, 1, ids=[1, 9]), ValueError, "ids must be in the index, got 9, which is not;"),
    "both": (lambda i: i.search(X, 1, ids=[1], without=[2]), ValueError, "expected ids= or without=, got both; pass"),
    "real ids": (lambda i: i.search(X, 1, ids=[1.0]), TypeError, "ids must be integers, got float64; convert them"),
    "a short mask": (lambda i: i.search(X, 1, ids=[True] * 4), ValueError, "a bool for each of the 5 rows, got 4;"),
    "other queries": (lambda i: i.search(X[:, :9], 1), ValueError, "queries must have shape [..., 40] for this index"),
    "one word": (lambda i: i.search(ROWS[:, :1], 1), ValueError, "queries must have shape [..., 2] for this index"),
    "nan": (lambda i: i.search(broken(np.nan), 1), ValueError, "must be finite in float32, got NaN or infinity in row"),
    "rerank by NaN": (lambda i: i.search(X, 1, rerank=9, vectors=broken(np.nan)), ValueError, "or infinity in row 3;"),
    "large scores": (lambda i: i.search(X, 1, rerank=9, vectors=LARGE), ValueError, "must fit float32, got larger"),
    "9 planes": (lambda i: i.search(X, 1, planes=9), ValueError, "planes must be in 1..8, got 9;"),
    "planes of codes": (lambda i: i.search(ROWS, 1, planes=1), ValueError, "is for queries that are vectors, got"),
    "weights of vectors": (lambda i: i.search(X, 1, weights=(1,)), ValueError, "are for planes of int32"),
    "3 weights": (lambda i: i.search(ROWS, 1, weights=(1, 2, 4)), ValueError, "one weight per plane, got 3 weights"),
    "rerank codes": (lambda i: i.search(ROWS, 1, rerank=2), TypeError, "queries that are vectors, got codes; pass"),
    "rerank nothing": (lambda i: i.search(X, 1, rerank=2), ValueError, "needs the original vectors, got none; pass"),
    "vectors alone": (lambda i: i.search(X, 1, vectors=X), ValueError, "need rerank=, got none; try"),
    "few vectors": (lambda i: i.search(X, 1, rerank=9, vectors=X[:4]), ValueError, "a row for every id, got 4 rows a"),
    "codes for vectors": (lambda i: i.search(X, 1, rerank=9, vectors=ROWS), TypeError, "vectors= must be floats, go"),
    "codes to encode": (lambda i: i.encode(ROWS), TypeError, "vectors of floats, got int32; these are codes already"),
}
MASKED = [
    ("vectors", lambda i: i.from_vectors(np.ma.array(X))),
    ("ids", lambda i: i.add(X, np.ma.arange(5))),
    ("ids", lambda i: i.search(X, 1, without=np.ma.arange(2))),
    ("queries", lambda i: i.search(np.ma.array(X), 1)),
    ("k", lambda i: i.search(X, np.ma.array(1))),
]
SEARCHING |= {
    f"a mask in {name} {n}": (call, TypeError, f"{name} must be an array without a mask, got a masked array")
    for n, (name, call) in enumerate(MASKED)
}


@pytest.mark.parametrize("case", [*REFUSED, *BUILDING])
def test_a_refusal_says_what_was_expected_and_what_came(case):
    call, error, words = (REFUSED | BUILDING)[case]
    with pytest.raises(error, match=re.escape(words)):
        call()


@pytest.mark.parametrize("case", [*ADDING, *SEARCHING])
def test_a_refusal_says_what_was_expected_and_changes_nothing(case):
    call, error, words = (ADDING | SEARCHING)[case]
    index = BitIndex.from_vectors(X)
    before = index.codes
    with pytest.raises(error, match=re.escape(words)):
        call(index)
    assert list(index) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(index.codes, before)
    index.add(X)
    assert list(index) == list(range(10))


def test_what_only_some_indexes_take_is_refused_by_the_others(monkeypatch):
    index = BitIndex(40, keep="float16")
    with pytest.raises(ValueError, match="must fit float16, got larger numbers; scale them or use keep='float32'"):
        index.add(X * 1e6)
    with pytest.raises(ValueError, match="keep='float16' takes vectors, got codes; add the vectors instead"):
        index.add(ROWS)
    monkeypatch.setattr(encoder, "BLOCK", 2)
    with pytest.raises(ValueError, match="got NaN or infinity in row 3"):  # counted from the first of all
        index.add(broken(np.nan))
    assert len(index) == 0
    index.add(X)
    assert list(index) == [0, 1, 2, 3, 4]


def test_when_ids_run_out_they_must_be_given():
    index = BitIndex.from_codes(ROWS)
    index.add(ROWS[:1], [2**63 - 2])
    with pytest.raises(ValueError, match="no ids are left after 9223372036854775806 for 5 rows; pass ids="):
        index.add(ROWS)
    index.add(ROWS[:1], [77])
    assert index.ids.tolist() == [0, 1, 2, 3, 4, 2**63 - 2, 77]
    assert all(known in index for known in (4, np.int32(4), 77))
    assert not any(other in index for other in (5, -1, 2**70, "4", None, 4.0))
