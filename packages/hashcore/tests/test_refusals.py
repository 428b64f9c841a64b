"""Errors of the public functions: their words, the same for arrays and tensors; nothing is changed or written."""

import re
import subprocess
import sys

import hashcore
import numpy as np
import pytest
from hashcore import group_planes, pack, planes, quantise, score, search, topk, unpack
from hashcore_samples import random_codes, tensor

CODES = np.zeros((3, 4), np.int32)
SCORES = np.zeros((2, 5), np.int32)
POOL = np.zeros((3, 16, 4), np.int32)
ONE = np.zeros((1, 4), np.int32)

REFUSED = {
    "pack a list": (lambda: pack([1.0]), TypeError, "not mixed, got x: list; convert them to one kind"),
    "pack complex": (lambda: pack(np.zeros(32, complex)), TypeError, "must hold real numbers, got complex128"),
    "pack a scalar": (lambda: pack(np.array(1.0)), ValueError, "shape [..., D], got a scalar"),
    "pack 33": (lambda: pack(np.zeros(33)), ValueError, "positive multiple of 32 (bits per word), got 33; pad it"),
    "pack 0": (lambda: pack(np.zeros((2, 0))), ValueError, "got 0; pad it"),
    "unpack floats": (lambda: unpack(np.zeros(4)), TypeError, "must be int32 words, got float64; use hashcore.pack"),
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
    "score bytes": (lambda: score(CODES, CODES.view("u1")), TypeError, "words, got uint8; read packed bytes with .vi"),
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
    "k rows": (lambda: topk(SCORES, np.array([1, 2, 3])), ValueError, "k must be an integer or broadcast to one inte"),
    "k floats": (lambda: topk(SCORES, np.ones(2)), TypeError, "an array of integers, got float64;"),
    "length beyond": (lambda: topk(SCORES, 1, lengths=6), ValueError, "lengths must be in 0..5, the number of scores"),
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
    "starts rows": (lambda: topk(SCORES, 1, starts=np.zeros(3, int)), ValueError, "starts must be an integer or broa"),
    "lengths floats": (lambda: topk(SCORES, 1, lengths=np.ones(2)), TypeError, "lengths must be an integer or"),
    "sink negative": (lambda: topk(SCORES, 1, sink=-1), ValueError, "must be 0 or more positions, got -1; 0 excludes"),
    "recent 1.5": (lambda: topk(SCORES, 1, recent=1.5), TypeError, "recent must be an integer, got 1.5;"),
    "search k": (lambda: search(CODES, CODES, 4), ValueError, "must be in 0..3, the number of scores in a row, got 4;"),
    "search order": (lambda: search(CODES, CODES, 1, order="worst"), ValueError, "order must be one of 'best', 'inde"),
    "search range": (lambda: search(CODES, CODES, 1, (1, 2, 509)), ValueError, "the scores of a search must stay bel"),
    "search range with a k per row": (
        lambda: search(CODES, CODES, np.array(1), (1, 2, 509)),
        ValueError,
        "the scores of a search must stay below 65536, got sum(weights) * 32 * W = 65536; use smaller weights or fewer",
    ),
    "search words": (lambda: search(CODES, CODES[:, :3], 1), ValueError, "same number of words, got 4 and 3;"),
    "k a table": (lambda: topk(SCORES, 2, sink=np.zeros((9, 9))), TypeError, "sink must be an integer, got array([[0"),
    "an order for every row": (
        lambda: search(CODES, CODES, 1, order=np.array(["best", "index"])),
        ValueError,
        "one of 'best', 'index', got array(['best'..., dtype='<U5'); choose one",
    ),
    "k a list": (lambda: topk(SCORES, [1, 2]), TypeError, "k must be an integer, got [1, 2];"),
    "blocks a list": (lambda: search(ONE, POOL, 1, blocks=[0]), TypeError, "must be an array of page numbers, got li"),
    "blocks floats": (lambda: search(ONE, POOL, 1, blocks=np.zeros(2)), TypeError, "int32 or int64 page numbers, got"),
    "blocks a scalar": (lambda: search(ONE, POOL, 1, blocks=np.array(0)), ValueError, "shape [..., T], got a scalar"),
    "no such page": (lambda: search(ONE, POOL, 1, blocks=np.array([0, 3])), ValueError, "pages in 0..2, got 3; short"),
    "page -1": (lambda: search(ONE, POOL, 1, blocks=np.array([-1])), ValueError, "must be pages in 0..2, got -1; sho"),
    "two tables": (lambda: search(ONE, POOL, 1, blocks=np.zeros((2, 1), int)), ValueError, "shape [1, 'T'], got [2,"),
    "beyond the pages": (lambda: search(ONE, POOL, 1, blocks=np.array([0]), lengths=17), ValueError, "in 0..16"),
    "no page axis": (lambda: search(ONE, POOL[0], 1, blocks=np.array([0])), ValueError, "[..., M, S, W], got [16, 4]"),
    "words apart in pages": (
        lambda: search(ONE[:, :2], POOL[..., ::2], 1, blocks=np.array([0])),
        ValueError,
        "must be contiguous and aligned, got strides [256, 16, 8]; copy the pages",
    ),
    "an argument that left": (lambda: search(CODES, CODES, 1, shortlist=4), ValueError, "no longer takes shortlist"),
    "an argument that never was": (lambda: search(CODES, CODES, 1, short=4), TypeError, "keyword argument 'short'"),
    "out no pair": (lambda: topk(SCORES, 3, out=np.zeros((2, 2, 3))), TypeError, "out must be a pair, one array for"),
    "out too wide": (
        lambda: search(ONE, np.broadcast_to(ONE, (2**31 + 1, 4)), 0, out=(np.empty((1, 0), "i4"),) * 2),
        TypeError,
        "out[1] must be int64 for positions beyond int32, got int32 for 2147483649 positions; pass int64",
    ),
}


def masked(call, *given):
    return lambda: call(*given[:-1], np.ma.array(given[-1]))


REFUSED |= {
    f"a mask in {name}": (call, TypeError, f"{name} must be an array without a mask, got a masked array; choose its")
    for name, call in {
        "x": masked(pack, np.zeros(32)),
        "codes": masked(unpack, CODES),
        "w": masked(planes, np.ones(32)),
        "query": lambda: score(np.ma.array(CODES), CODES),
        "keys": masked(score, CODES, CODES),
        "scores": lambda: topk(np.ma.array(SCORES), 1),
        "k": masked(topk, SCORES, 1),
        "lengths": lambda: topk(SCORES, 1, lengths=np.ma.array([1, 1])),
        "starts": lambda: search(CODES, CODES, 1, starts=np.ma.array([1, 1, 1])),
        "sink": lambda: topk(SCORES, 1, sink=np.ma.array(1)),
        "blocks": lambda: search(ONE, POOL, 1, blocks=np.ma.array([1])),
        "out[0]": lambda: topk(SCORES, 1, out=(np.ma.array(SCORES[:, :1]), SCORES[:, :1])),
    }.items()
}


# Values of arrays, which the host does not see on a device; and what is said of arrays alone.
OF_ARRAYS = ("k row beyond", "k row negative", "length row negative", "start after the end", "no such page", "page -1")
OF_ARRAYS += ("unpack a scalar", "pack a list", "words apart in pages", "quantise 1e300", "blocks a list", "k a table")
OF_ARRAYS += ("an order for every row", "out too wide", *(case for case in REFUSED if case.startswith("a mask in")))


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_what_was_expected_and_what_came(case):
    call, error, words = REFUSED[case]
    with pytest.raises(error, match=re.escape(words)):
        call()


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


READ_ONLY = np.zeros((3, 3), np.int32)
READ_ONLY.flags.writeable = False
OVERLAPPING = np.lib.stride_tricks.as_strided(np.zeros(9, np.int32), (3, 3), (4, 4))
WRONG_OUTPUTS = {
    "dtype": (lambda: np.zeros((3, 3)), TypeError, r"must be int32, got float64; results are never converted"),
    "byte order": (lambda: np.zeros((3, 3), ">i4"), TypeError, r"must be int32, got >i4;"),
    "shape": (lambda: np.zeros((3, 4), np.int32), ValueError, r"must have shape \[3, 3\], got \[3, 4\]; slice or"),
    "dimensions": (lambda: np.zeros((1, 3, 3), np.int32), ValueError, r"must have shape \[3, 3\], got \[1, 3, 3\]"),
    "read-only": (lambda: READ_ONLY, ValueError, r"must be writeable, got a read-only array; pass another"),
    "overlap": (lambda: OVERLAPPING, ValueError, r"must not share memory, got strides \[4, 4\]; pass an array"),
    "a list": (lambda: [[0] * 3] * 3, TypeError, r"must be an array of the inputs' kind, got list; create one"),
}


@pytest.mark.parametrize("case", WRONG_OUTPUTS)
def test_an_array_that_cannot_take_the_result_is_refused(case):
    make, error, words = WRONG_OUTPUTS[case]
    with pytest.raises(error, match="out " + words):
        hashcore.score(CODES, CODES, out=make())
    with pytest.raises(error, match=r"out " + words):
        hashcore.pack(np.zeros((3, 96)), out=make())
    scores = np.zeros((3, 5), np.int32)
    for index, other in ((0, np.zeros((3, 3), np.int64)), (1, np.zeros((3, 3), np.int32))):
        pair = (make(), other) if index == 0 else (other, make())
        words_here = words if index == 0 else words.replace("must be int32,", "must be int64 or int32,")
        with pytest.raises(error, match=rf"out\[{index}\] " + words_here):
            hashcore.topk(scores, 3, out=pair)
        with pytest.raises(error, match=rf"out\[{index}\] " + words_here):
            hashcore.search(CODES, np.zeros((5, 4), np.int32), 3, out=pair)


def test_an_array_that_shares_memory_with_an_argument_is_refused(rng):
    memory = random_codes(rng, 12, 4)
    words = "must not share memory with another argument, got one that does; pass another"
    with pytest.raises(ValueError, match="out " + words):
        hashcore.score(memory[:4], CODES[:1], out=memory[2:3].T)
    with pytest.raises(ValueError, match="out " + words):
        hashcore.score(CODES[:1], memory[:4], out=memory[3:4])
    with pytest.raises(ValueError, match="out " + words):
        hashcore.pack(memory.reshape(1, -1)[:, :32], out=memory[:1, :1])
    values, indices = np.zeros((12, 2), np.int32), np.zeros((12, 2), np.int32)
    with pytest.raises(ValueError, match=r"out\[0\] " + words):
        hashcore.topk(memory, 2, out=(memory[:, :2], indices))
    with pytest.raises(ValueError, match=r"out\[1\] " + words):
        hashcore.topk(memory % 9, 2, out=(values, values))
    with pytest.raises(ValueError, match=r"out\[1\] " + words):
        hashcore.topk(memory % 9, np.full(12, 2, np.int32)[None][0], lengths=indices[:, 0], out=(values, indices))
    with pytest.raises(ValueError, match=r"out\[0\] " + words):
        hashcore.search(memory, CODES, 2, out=(memory[:, :2], indices))


def test_separate_parts_of_one_array_are_accepted(rng):
    arena = np.zeros((3, 80), np.int32)
    arena[:, :4] = random_codes(rng, 3, 4)
    expected = hashcore.score(arena[:, :4].copy(), arena[:, :4].copy())
    np.testing.assert_array_equal(hashcore.score(arena[:, :4], arena[:, :4], out=arena[:, 4:7]), expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda out: hashcore.topk(np.zeros((2, 3), np.int32), np.array([1, 4]), out=out),
        lambda out: hashcore.search(CODES[:2], CODES, 1, lengths=np.array([1, 4]), out=out),
        lambda out: hashcore.search(CODES[:2], CODES, 1, (600, 600), out=(out[0][0], out[1][0])),
        lambda out: hashcore.search(CODES[:2], CODES, 1, order="worst", out=out),
    ],
)
def test_a_refused_call_writes_nothing(call):
    out = np.full((2, 1), -7, np.int32), np.full((2, 1), -7, np.int64)
    with pytest.raises(ValueError, match="must"):
        call(out)
    assert (out[0] == -7).all()
    assert (out[1] == -7).all()


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


def test_numpy_use_imports_no_torch_and_import_alone_no_numba(tmp_path):
    code = f"""
import sys, numpy, hashcore
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
