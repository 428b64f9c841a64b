"""Errors of the public functions, and what they must not modify."""

import re
import subprocess
import sys

import hashcore
import numpy as np
import pytest
from hashcore import group_planes, pack, planes, quantise, score, search, topk, unpack
from hashcore.cpu import threads
from hashcore_samples import on_threads, random_codes

CODES = np.zeros((3, 4), np.int32)
SCORES = np.zeros((2, 5), np.int32)

REFUSED = {
    "pack a list": (lambda: pack([1.0]), TypeError, "not mixed, got x: list; convert them to one kind"),
    "pack complex": (lambda: pack(np.zeros(32, complex)), TypeError, "must hold real numbers, got complex128"),
    "pack a scalar": (lambda: pack(np.array(1.0)), ValueError, "shape [..., D], got a scalar"),
    "pack 33": (lambda: pack(np.zeros(33)), ValueError, "positive multiple of 32 (bits per word), got 33; pad it"),
    "pack 0": (lambda: pack(np.zeros((2, 0))), ValueError, "got 0; pad it"),
    "unpack floats": (lambda: unpack(np.zeros(4)), TypeError, "must be int32 words, got float64; create them with"),
    "unpack a scalar": (lambda: unpack(np.int32(1) * np.array(1, "i4")), TypeError, "got codes: int32"),
    "unpack no words": (lambda: unpack(CODES[:, :0]), ValueError, "at least one word per code, got shape [3, 0]"),
    "9 planes": (lambda: quantise(np.ones(4), 9), ValueError, "planes must be in 1..8, got 9;"),
    "0 planes": (lambda: planes(np.ones(32), 0), ValueError, "planes must be in 1..8, got 0;"),
    "2.5 planes": (lambda: quantise(np.ones(4), 2.5), TypeError, "planes must be an integer, got 2.5"),
    "quantise inf": (lambda: quantise(np.array([1, np.inf])), ValueError, "finite in float32, got inf in a row"),
    "quantise nan": (lambda: quantise(np.array([1, np.nan])), ValueError, "finite in float32, got nan in a row"),
    "quantise 1e300": (lambda: quantise(np.array([1e300])), ValueError, "finite in float32, got inf in a row"),
    "quantise nothing": (lambda: quantise(np.ones((2, 0))), ValueError, "must not be empty, got 0;"),
    "planes of 31": (lambda: planes(np.ones(31)), ValueError, "positive multiple of 32 (bits per word), got 31"),
    "group of 0": (lambda: group_planes(CODES[:0]), ValueError, "at least one code, got shape [0, 4]"),
    "group of a code": (lambda: group_planes(CODES[0]), ValueError, "shape [..., G, W], got [4]; add the"),
    "score int64": (lambda: score(CODES.astype(int), CODES), TypeError, "query must be int32 words, got int64"),
    "score one key": (lambda: score(CODES, CODES[0]), ValueError, "keys must have shape [..., N, W], got [4];"),
    "score words": (lambda: score(CODES, CODES[:, :3]), ValueError, "the same number of words, got 4 and 3;"),
    "score lead": (
        lambda: score(np.zeros((2, 3, 4), "i4"), np.zeros((5, 3, 4), "i4")),
        ValueError,
        "must broadcast, got [2] and [5]; insert dimensions of size 1",
    ),
    "2 weights": (lambda: score(CODES, CODES, (1, 2)), ValueError, "got 2 weights for 3 planes;"),
    "weight 0": (lambda: score(CODES, CODES, (1, 0, 2)), ValueError, "must be positive, got (1, 0, 2); remove planes"),
    "weight -1": (lambda: score(CODES, CODES, (1, -1, 2)), ValueError, "must be positive, got (1, -1, 2);"),
    "weight 1.5": (lambda: score(CODES, CODES, (1, 1.5, 2)), TypeError, "weights must be an integer, got 1.5"),
    "large weights": (lambda: score(CODES, CODES, (1, 2, 2**24)), ValueError, "fit int32, got sum(weights)"),
    "topk floats": (lambda: topk(np.zeros(4), 1), TypeError, "scores must be integers, got float64;"),
    "topk a scalar": (lambda: topk(np.array(4), 1), ValueError, "shape [..., N], got a scalar"),
    "k beyond n": (lambda: topk(SCORES, 6), ValueError, "k must be in 0..5, the number of scores in a row, got 6;"),
    "k negative": (lambda: topk(SCORES, -1), ValueError, "k must be in 0..5, the number of scores in a row, got -1;"),
    "k 1.5": (lambda: topk(SCORES, 1.5), TypeError, "k must be an integer, got 1.5; convert it"),
    "k row beyond": (lambda: topk(SCORES, np.array([1, 6])), ValueError, "k must be in 0..5, the number of"),
    "k row negative": (lambda: topk(SCORES, np.array([-1, 2])), ValueError, "in a row, got -1; clamp it"),
    "k rows": (
        lambda: topk(SCORES, np.array([1, 2, 3])),
        ValueError,
        "k must be an integer or broadcast to one integer per row, shape [2], got [3];",
    ),
    "k floats": (lambda: topk(SCORES, np.ones(2)), TypeError, "an array of integers, got float64;"),
    "length beyond": (
        lambda: topk(SCORES, 1, lengths=6),
        ValueError,
        "lengths must be in 0..5, the number of scores in a row, got 6; clamp it",
    ),
    "length row negative": (
        lambda: topk(SCORES, 1, lengths=np.array([5, -1])),
        ValueError,
        "lengths must be in 0..5, the number of scores in a row, got -1;",
    ),
    "start negative": (lambda: topk(SCORES, 1, starts=-1), ValueError, "starts must be in 0..5, the number"),
    "start after the end": (
        lambda: search(CODES, CODES, 1, lengths=2, starts=np.array([1, 3, 2])),
        ValueError,
        "starts must not exceed lengths, got start 3 and length 2 in row 1; a row sees [start, length)",
    ),
    "start after the end of all": (
        lambda: topk(SCORES, 1, lengths=2, starts=3),
        ValueError,
        "starts must not exceed lengths, got start 3 and length 2 in row 0; a row sees [start, length)",
    ),
    "start after the end of a search": (
        lambda: search(CODES, CODES, 1, lengths=1, starts=2),
        ValueError,
        "starts must not exceed lengths, got start 2 and length 1 in row 0; a row sees [start, length)",
    ),
    "starts rows": (
        lambda: topk(SCORES, 1, starts=np.zeros(3, int)),
        ValueError,
        "starts must be an integer or broadcast to one integer per row, shape [2], got [3]; insert",
    ),
    "lengths floats": (lambda: topk(SCORES, 1, lengths=np.ones(2)), TypeError, "lengths must be an integer or"),
    "sink negative": (lambda: topk(SCORES, 1, sink=-1), ValueError, "must be 0 or more positions, got -1; 0 excludes"),
    "recent 1.5": (lambda: topk(SCORES, 1, recent=1.5), TypeError, "recent must be an integer, got 1.5;"),
    "search k": (lambda: search(CODES, CODES, 4), ValueError, "must be in 0..3, the number of scores in a row, got 4;"),
    "search order": (
        lambda: search(CODES, CODES, 1, order="worst"),
        ValueError,
        'order must be "best" (highest score first) or "index" (ascending), got \'worst\'; choose one',
    ),
    "search range": (
        lambda: search(CODES, CODES, 1, (1, 2, 509)),
        ValueError,
        "the scores of a search must stay below 65536, got sum(weights) * 32 * W = 65536; use smaller weights or fewer",
    ),
    "search range with a k per row": (
        lambda: search(CODES, CODES, np.array(1), (1, 2, 509)),
        ValueError,
        "the scores of a search must stay below 65536, got sum(weights) * 32 * W = 65536; use smaller weights or fewer",
    ),
    "search words": (lambda: search(CODES, CODES[:, :3], 1), ValueError, "same number of words, got 4 and 3;"),
    "k a table": (
        lambda: topk(SCORES, 2, sink=np.zeros((9, 9))),
        TypeError,
        "sink must be an integer, got array([[0., 0... 0., 0., 0.]]); convert it",
    ),
    "an order for every row": (
        lambda: search(CODES, CODES, 1, order=np.array(["best", "index"])),
        ValueError,
        "(ascending), got array(['best'..., dtype='<U5'); choose one",
    ),
    "k a list": (lambda: topk(SCORES, [1, 2]), TypeError, "k must be an integer, got [1, 2];"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_what_was_expected_and_what_came(case):
    call, error, words = REFUSED[case]
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_inputs_are_not_modified(rng):
    w, codes = rng.normal(size=(4, 64)).astype(np.float32), random_codes(rng, 4, 2)
    scores, k = rng.integers(0, 9, (4, 70)).astype(np.int32), np.array([1, 2, 3, 4])
    inputs = [w, codes, scores, k]
    before = [x.copy() for x in inputs]
    for x in inputs:
        x.flags.writeable = False  # a write would raise here, and the copies catch one that numba makes
    hashcore.pack(w), hashcore.unpack(codes), hashcore.quantise(w), hashcore.planes(w), hashcore.group_planes(codes)
    hashcore.score(codes, codes), hashcore.score(codes, codes, (1, 2, 3, 4)), hashcore.topk(scores, k)
    hashcore.search(codes, codes, k, lengths=k, starts=k - 1), hashcore.search(codes, codes, 2, (1, 2, 3, 4))
    for x, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, copy)


def test_results_are_writable_and_share_no_memory_with_the_input(rng):
    codes = random_codes(rng, 4, 2)
    for result in (
        hashcore.group_planes(codes[:1])[0],
        hashcore.unpack(codes),
        *hashcore.topk(codes % 9, 2),
        *hashcore.search(codes, codes, 2),
    ):
        assert result.flags.writeable
        assert not np.shares_memory(result, codes)


def test_numpy_use_imports_no_torch_and_import_alone_no_numba():
    code = """
import sys, numpy, hashcore
assert "numba" not in sys.modules
planes, weights = hashcore.planes(numpy.ones((2, 64)))
hashcore.topk(hashcore.score(planes, planes[0], weights), 1)
hashcore.search(planes, planes[0], 1, weights)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_may_call_at_the_same_time(rng):
    from concurrent.futures import ThreadPoolExecutor

    query, keys = random_codes(rng, 40, 3, 4), random_codes(rng, 5000, 4)
    alone = hashcore.score(query, keys, (1, 2, 4))
    with on_threads(2), ThreadPoolExecutor(3) as pool:
        for result in pool.map(lambda _: hashcore.score(query, keys, (1, 2, 4)), range(6)):
            np.testing.assert_array_equal(result, alone)


def test_without_a_writable_cache_a_kernel_still_compiles(monkeypatch):
    def njit(cache=False, **_):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function

    monkeypatch.setattr(threads.numba, "njit", njit)
    function = lambda: 0  # noqa: E731
    assert threads.compiled(function) is function
