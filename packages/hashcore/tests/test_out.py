"""Results written to the caller's arrays: the same results, and nothing is written after an error."""

import hashcore
import numpy as np
import pytest
from hashcore_samples import assert_same, random_codes

LAYOUTS = {
    "contiguous": lambda shape, dtype: np.full(shape, -7, dtype),
    "a part of each row": lambda shape, dtype: np.full((*shape[:-1], shape[-1] + 5), -7, dtype)[..., 2:-3],
    "every second item": lambda shape, dtype: np.full((*shape[:-1], 2 * shape[-1]), -7, dtype)[..., ::2],
    "rows backwards": lambda shape, dtype: np.full(shape, -7, dtype)[::-1],
    "columns first": lambda shape, dtype: np.full(shape[::-1], -7, dtype).T,
}


@pytest.fixture(params=LAYOUTS)
def make(request):
    return LAYOUTS[request.param]


def test_pack_writes_what_it_returns(rng, make):
    for x in (rng.normal(size=(3, 2, 96)), rng.normal(size=(3, 2, 96)).astype(np.float16)):
        out = make((3, 2, 3), np.int32)
        assert hashcore.pack(x, out=out) is out
        assert_same(out, hashcore.pack(x))


@pytest.mark.parametrize("weights", [None, (1, 2)])
def test_score_writes_what_it_returns(rng, make, weights):
    query, keys = random_codes(rng, 3, 2, 4), random_codes(rng, 3, 70, 4)
    expected = hashcore.score(query, keys, weights)
    out = make(expected.shape, np.int32)
    assert hashcore.score(query, keys, weights, out=out) is out
    assert_same(out, expected)


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_topk_writes_what_it_returns(rng, make, dtype):
    scores = rng.integers(0, 9, (3, 2, 70)).astype(np.int16)
    expected = hashcore.topk(scores, 20, lengths=15)
    out = make((3, 2, 20), np.int16), make((3, 2, 20), dtype)
    assert hashcore.topk(scores, 20, lengths=15, out=out) is out
    assert_same(out, (expected[0], expected[1].astype(dtype)))


@pytest.mark.parametrize("order", ["best", "index"])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_search_writes_what_it_returns(rng, make, dtype, order):
    query, keys = random_codes(rng, 3, 2, 4), random_codes(rng, 3, 70, 4)
    expected = hashcore.search(query, keys, 20, lengths=15, order=order)
    out = make((3, 2, 20), np.int32), make((3, 2, 20), dtype)
    assert hashcore.search(query, keys, 20, lengths=15, order=order, out=out) is out
    assert_same(out, (expected[0], expected[1].astype(dtype)))


def test_memory_around_the_result_is_left_alone(rng):
    buffer, codes = np.full((3, 80), -7, np.int32), random_codes(rng, 3, 4)
    hashcore.score(codes, codes, out=buffer[:, 10:13])
    assert (np.delete(buffer, range(10, 13), 1) == -7).all()


@pytest.mark.parametrize("shape", [(3, 2, 0), (0, 2, 5), (3, 0, 5), (0, 0, 0)])
def test_an_empty_result_is_written_too(shape):
    *lead, n = shape
    codes, keys = np.zeros((*lead, 4), np.int32), np.zeros((lead[0], n, 4), np.int32)
    out = np.empty(shape, np.int32)
    assert hashcore.score(codes, keys, out=out) is out
    pair = np.empty((*lead, 0), np.int32), np.empty((*lead, 0), np.int64)
    assert hashcore.search(codes, keys, 0, out=pair) is pair
    assert hashcore.topk(out, 0, out=pair) is pair
    words = np.empty((*lead, 1), np.int32)[:0]
    assert hashcore.pack(np.zeros((0, *lead[1:], 32)), out=words) is words


def test_int32_indices_that_positions_do_not_fit_are_refused():
    codes, far = np.zeros((1, 1), np.int32), 2**31 + 1
    keys = np.broadcast_to(codes, (far, 1))
    pair = np.empty((1, 2), np.int32), np.empty((1, 2), np.int32)
    words = r"out\[1\] must be int64 for positions beyond int32, got int32 for 2147483649 positions; pass int64"
    with pytest.raises(TypeError, match=words):
        hashcore.search(codes, keys, 2, out=pair)
    with pytest.raises(TypeError, match=words):
        hashcore.topk(np.broadcast_to(codes, (1, far)), 2, out=pair)
    torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")
    there = [torch.empty(x.shape, dtype=torch.int32, device="meta") for x in (codes, *pair)]
    with pytest.raises(TypeError, match=words):
        hashcore.search(there[0], there[0].expand(far, 1), 2, out=tuple(there[1:]))


CODES = np.zeros((3, 4), np.int32)
READ_ONLY = np.zeros((3, 3), np.int32)
READ_ONLY.flags.writeable = False
OVERLAPPING = np.lib.stride_tricks.as_strided(np.zeros(9, np.int32), (3, 3), (4, 4))
REFUSED = {
    "dtype": (lambda: np.zeros((3, 3)), TypeError, r"must be int32, got float64; results are never converted"),
    "byte order": (lambda: np.zeros((3, 3), ">i4"), TypeError, r"must be int32, got >i4;"),
    "shape": (lambda: np.zeros((3, 4), np.int32), ValueError, r"must have shape \[3, 3\], got \[3, 4\]; slice or"),
    "dimensions": (lambda: np.zeros((1, 3, 3), np.int32), ValueError, r"must have shape \[3, 3\], got \[1, 3, 3\]"),
    "read-only": (lambda: READ_ONLY, ValueError, r"must be writeable, got a read-only array; pass another"),
    "overlap": (lambda: OVERLAPPING, ValueError, r"must not share memory, got strides \[4, 4\]; pass an array"),
    "a list": (lambda: [[0] * 3] * 3, TypeError, r"must be an array of the inputs' kind, got list; create one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_array_that_cannot_take_the_result_is_refused(case):
    make, error, words = REFUSED[case]
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
    assert_same(hashcore.score(arena[:, :4], arena[:, :4], out=arena[:, 4:7]), expected)


@pytest.mark.parametrize("out", [np.zeros((2, 3, 3)), (np.zeros(3),), 5])
def test_a_selection_goes_to_a_pair(out):
    with pytest.raises(TypeError, match="out must be a pair, one array for scores and one for indices, got"):
        hashcore.topk(np.zeros((3, 5), np.int32), 3, out=out)


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
