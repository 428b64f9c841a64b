"""Errors of BitIndex; an error leaves the index unchanged."""

import re

import numpy as np
import pytest
from hashcore import BitIndex
from hashcore.index import encoder

X = np.linspace(-1, 1, 5 * 40).reshape(5, 40).astype(np.float32)
CODES = np.arange(10, dtype=np.int32).reshape(5, 2)


def broken(value, dtype=np.float32):
    x = X.astype(dtype)
    x[3, 7] = value
    return x


def vectors():
    return BitIndex.from_vectors(X)


def codes():
    return BitIndex.from_codes(CODES)


BUILDING = {
    "no dimensions": (lambda: BitIndex(0), ValueError, "dim must be in 1..1048576, got 0; give the number of"),
    "half a dimension": (lambda: BitIndex(1.5), TypeError, "dim must be an integer, got 1.5; convert it"),
    "33 bits": (lambda: BitIndex(40, 33), ValueError, "bits must be a multiple of 32, or of 8 with encoder='sign', g"),
    "0 bits": (lambda: BitIndex(40, 0), ValueError, "bits must be in 1..1048576, got 0; choose another"),
    "sign of 41": (lambda: BitIndex(41, encoder="sign"), ValueError, "got 41; choose another, pad the vectors or use"),
    "fewer signs": (lambda: BitIndex(64, 32, encoder="sign"), ValueError, "one bit per dimension, got bits = 32 for"),
    "an encoder": (lambda: BitIndex(40, encoder="pca"), ValueError, "one of 'rotation', 'sign', got 'pca'; choose"),
    "a precision": (lambda: BitIndex(40, keep="int8"), ValueError, "one of None, 'float16', 'float32', got 'int8'"),
    "a seed": (lambda: BitIndex(40, seed=-1), ValueError, "seed must be in 0..9223372036854775807, got -1; choose"),
    "a short mean": (lambda: BitIndex(40, mean=X[0, :9]), ValueError, "mean must have shape [40], got [9]; average"),
    "a broken mean": (lambda: BitIndex(40, mean=broken(np.inf)[3]), ValueError, "mean must be finite in float32, got"),
    "a list": (lambda: BitIndex.from_vectors([[1.0]]), TypeError, "expected numpy arrays or torch tensors"),
    "one vector": (lambda: BitIndex.from_vectors(X[0]), ValueError, "of shape [n, D], got float32 [40]; reshape"),
    "codes as vectors": (lambda: BitIndex.from_vectors(CODES), ValueError, "got int32 [5, 2]; reshape them, or use"),
    "bytes as vectors": (lambda: BitIndex.from_vectors(X.astype("i1")), ValueError, "got int8 [5, 40]; reshape"),
    "vectors as codes": (lambda: BitIndex.from_codes(X), TypeError, "int32 words, uint8 or int8, got float32; use"),
    "no words": (lambda: BitIndex.from_codes(CODES[:, :0]), ValueError, "shape [n, W] or [n, B], got [5, 0]; reshape"),
    "a mask": (lambda: BitIndex.from_vectors(np.ma.array(X)), TypeError, "vectors must be an array without a mask, g"),
    "codes with a mask": (lambda: BitIndex.from_codes(np.ma.array(CODES)), TypeError, "codes must be an array without"),
    "a mean with a mask": (lambda: BitIndex(40, mean=np.ma.array(X[0])), TypeError, "mean must be an array without a"),
    "two means": (lambda: BitIndex.from_vectors(X, centre=True, mean=X[0]), ValueError, "centre=True takes the mean"),
    "a mean beyond float32": (
        lambda: BitIndex.from_vectors(broken(1e300, float), centre=True),
        ValueError,
        "mean must be finite in float32, got",
    ),
    "a vector far from the mean": (
        lambda: BitIndex.from_vectors(np.full((1, 32), 3e38), encoder="sign", mean=np.full(32, -3e38)),
        ValueError,
        "finite in float32, got NaN or infinity in row 0; remove, repair or scale it",
    ),
    "mean of none": (lambda: BitIndex.from_vectors(X[:0], centre=True), ValueError, "got none or mean= as well"),
}

ADDING = {
    "other vectors": (lambda i: i.add(X[:, :9]), ValueError, "vectors must have shape [n, 40] for this index, got [5,"),
    "one vector": (lambda i: i.add(X[0]), ValueError, "shape [n, 40] for this index, got [40]; reshape"),
    "other codes": (lambda i: i.add(CODES[:, :1]), ValueError, "codes must have shape [n, 2] for this index, got [5,"),
    "int64": (lambda i: i.add(CODES.astype(int)), TypeError, "of int32 words, uint8 or int8, got int64; convert"),
    "NaN": (lambda i: i.add(broken(np.nan)), ValueError, "finite in float32, got NaN or infinity in row 3; remove"),
    "1e300": (lambda i: i.add(broken(1e300, float)), ValueError, "finite in float32, got NaN or infinity in row 3;"),
    "an overflow": (lambda i: i.add(np.full((5, 40), 3e38, np.float32)), ValueError, "vectors must be finite in floa"),
    "few ids": (lambda i: i.add(X, [7, 8]), ValueError, "one id for each of the 5 rows, got shape [2]; match them"),
    "float ids": (lambda i: i.add(X, np.arange(5.0)), TypeError, "must be integers, got float64; convert"),
    "a table of ids": (lambda i: i.add(X, np.eye(5, dtype=int)), ValueError, "one dimension, got shape [5, 5]; flatt"),
    "ids with a mask": (lambda i: i.add(X, np.ma.arange(5)), TypeError, "ids must be an array without a mask, got a"),
    "bytes": (lambda i: i.add(CODES.view("u1")[:, 1:]), ValueError, "codes must have shape [n, 8] for this index, got"),
    "negative ids": (lambda i: i.add(X, [5, 6, 7, 8, -1]), ValueError, "got -1..8; -1 marks an empty slot"),
    "huge ids": (lambda i: i.add(X[:1], np.array([2**63], np.uint64)), ValueError, "got 9223372036854775808..92233"),
    "ids twice": (lambda i: i.add(X, [9, 8, 7, 8, 6]), ValueError, "ids must be unique, got 8 twice; pass one id per"),
    "a known id": (lambda i: i.add(X[:2], [9, 3]), ValueError, "ids must be new, got 3, which is in the index; remove"),
    "an unknown id": (lambda i: i.remove([2, 77]), ValueError, "must be in the index, got 77, which is not; test with"),
    "a huge id": (lambda i: i.remove(np.array([2**64 - 1], np.uint64)), ValueError, "got 18446744073709551615, which"),
    "a mask": (lambda i: i.remove([True]), TypeError, "ids must be integers, got bool; convert them"),
    "a name": (lambda i: i.remove("a"), TypeError, "ids must be integers, got <U1; convert them"),
}

SEARCHING = {
    "a shortlist": (lambda i: i.search(X, 1, shortlist=4), ValueError, "search no longer takes shortlist: no decode"),
    "k beyond": (lambda i: i.search(X, 6), ValueError, "k must be in 0..5, got 6; there are no more codes in"),
    "k with a mask": (lambda i: i.search(X, np.ma.array(1)), TypeError, "k must be an array without a mask, got a"),
    "k beyond the ids": (lambda i: i.search(X, 3, ids=[1, 4]), ValueError, "in 0..2, got 3; there are no more codes"),
    "k beyond the others": (lambda i: i.search(X, 3, without=[1, 4, 2]), ValueError, "more codes without these ids;"),
    "unknown ids": (lambda i: i.search(X, 1, ids=[1, 9]), ValueError, "ids must be in the index, got 9, which is not;"),
    "unknown others": (lambda i: i.search(X, 1, without=[-1]), ValueError, "ids must be in the index, got -1, which"),
    "both": (lambda i: i.search(X, 1, ids=[1], without=[2]), ValueError, "expected ids= or without=, got both; pass"),
    "float ids": (lambda i: i.search(X, 1, ids=[1.0]), TypeError, "ids must be integers, got float64; convert them"),
    "a short mask": (lambda i: i.search(X, 1, ids=[True] * 4), ValueError, "a bool for each of the 5 rows, got 4;"),
    "masked ids": (lambda i: i.search(X, 1, without=np.ma.arange(2)), TypeError, "ids must be an array without a mask"),
    "masked queries": (lambda i: i.search(np.ma.array(X), 1), TypeError, "queries must be an array without a mask"),
    "k negative": (lambda i: i.search(X, -1), ValueError, "k must be in 0..5, got -1;"),
    "k 1.5": (lambda i: i.search(X, 1.5), TypeError, "k must be an integer, got 1.5; convert it"),
    "other queries": (lambda i: i.search(X[:, :9], 1), ValueError, "queries must have shape [..., 40] for this index"),
    "other codes": (lambda i: i.search(CODES[:, :1], 1), ValueError, "queries must have shape [..., 2] for this index"),
    "NaN": (lambda i: i.search(broken(np.nan), 1), ValueError, "must be finite in float32, got NaN or infinity in row"),
    "rerank by NaN": (
        lambda i: i.search(X, 1, rerank=9, vectors=broken(np.nan)),
        ValueError,
        "vectors= must be finite in float32, got NaN or infinity in row 3; remove, repair or scale it",
    ),
    "an exact score beyond float32": (
        lambda i: i.search(X, 1, rerank=9, vectors=np.full((5, 40), 3e38, np.float32)),
        ValueError,
        "exact scores must fit float32, got larger ones; scale the vectors or use metric='cosine'",
    ),
    "9 planes": (lambda i: i.search(X, 1, planes=9), ValueError, "planes must be in 1..8, got 9;"),
    "planes of codes": (lambda i: i.search(CODES, 1, planes=1), ValueError, "is for queries that are vectors, got"),
    "weights of vectors": (lambda i: i.search(X, 1, weights=(1,)), ValueError, "are for planes of int32"),
    "weights of one plane": (lambda i: i.search(CODES[0], 1, weights=(1,)), ValueError, "shape [..., P, W], got [2];"),
    "3 weights": (lambda i: i.search(CODES, 1, weights=(1, 2, 4)), ValueError, "one weight per plane, got 3 weights"),
    "rerank codes": (lambda i: i.search(CODES, 1, rerank=2), TypeError, "queries that are vectors, got codes; pass"),
    "rerank 0": (lambda i: i.search(X, 1, rerank=0), ValueError, "rerank must be in 1..2147483648, got 0; rerank * k"),
    "rerank nothing": (lambda i: i.search(X, 1, rerank=2), ValueError, "needs the original vectors, got none; pass"),
    "rerank by": (lambda i: i.search(X, 1, rerank=2, metric="l2"), ValueError, "one of 'dot', 'cosine', got 'l2'"),
    "vectors alone": (lambda i: i.search(X, 1, vectors=X), ValueError, "need rerank=, got none; try"),
    "few vectors": (lambda i: i.search(X, 1, rerank=9, vectors=X[:4]), ValueError, "a row for every id, got 4 rows a"),
    "codes for vectors": (lambda i: i.search(X, 1, rerank=9, vectors=CODES), TypeError, "vectors= must be floats, go"),
    "codes to encode": (lambda i: i.encode(CODES), TypeError, "vectors of floats, got int32; these are codes already"),
}


@pytest.mark.parametrize("case", BUILDING)
def test_building_refuses(case):
    call, error, words = BUILDING[case]
    with pytest.raises(error, match=re.escape(words)):
        call()


@pytest.mark.parametrize("case", [*ADDING, *SEARCHING])
def test_a_refusal_says_what_was_expected_and_changes_nothing(case):
    call, error, words = (ADDING | SEARCHING)[case]
    index = vectors()
    before = index.codes
    with pytest.raises(error, match=re.escape(words)):
        call(index)
    assert list(index) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(index.codes, before)
    index.add(X)
    assert list(index) == list(range(10))


def test_the_row_of_a_refusal_is_counted_from_the_first_of_all(monkeypatch):
    monkeypatch.setattr(encoder, "BLOCK", 2)
    with pytest.raises(ValueError, match="got NaN or infinity in row 3"):
        vectors().add(broken(np.nan))


def test_codes_for_an_index_that_keeps_vectors_are_refused():
    index = BitIndex(64, keep="float32")
    with pytest.raises(ValueError, match="keep='float32' takes vectors, got codes; add the vectors instead"):
        index.add(CODES)
    assert len(index) == 0


def test_a_vector_beyond_float16_is_refused():
    index = BitIndex(40, keep="float16")
    with pytest.raises(ValueError, match="must fit float16, got larger numbers; scale them or use keep='float32'"):
        index.add(X * 1e6)
    index.add(X)
    assert list(index) == [0, 1, 2, 3, 4]


def test_when_ids_run_out_they_must_be_given():
    index = codes()
    index.add(CODES[:1], [2**63 - 2])
    with pytest.raises(ValueError, match="no ids are left after 9223372036854775806 for 5 rows; pass ids="):
        index.add(CODES)
    index.add(CODES[:1], [77])
    assert index.ids.tolist() == [0, 1, 2, 3, 4, 2**63 - 2, 77]


def test_what_is_no_id_is_not_in_an_index():
    index = codes()
    assert 4 in index
    assert np.int32(4) in index
    for other in (5, -1, 2**70, "4", None, 4.0):
        assert other not in index
