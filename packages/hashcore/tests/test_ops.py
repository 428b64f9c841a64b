"""Every function on every backend against hashcore.reference, and the laws that they obey: tolerance 0."""

import ctypes
import faulthandler
import itertools
import mmap
import multiprocessing
import signal
import sys

import hashcore
import numpy as np
import pytest
from hashcore import reference
from hashcore_samples import LAYOUTS, assert_same, on_threads, pool_of, random_codes, shuffled_tables

DTYPES = ["f4", "f8", "f2", "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">f4", ">f2"]
LENGTHS = [1, 31, 33, 64, 65, 97]  # around the 32 and 64 of words and masks
# Words and weights: one code, regular planes, a group's, weights without a pattern, and codes of every kernel.
CODES = [(4, None), (4, (1,)), (4, (1, 2, 4)), (4, (1, 2, 2)), (1, (1, 2))]
CODES += [(2, (3, 5)), (3, None), (5, (1, 2)), (9, (7,)), (4, (1, 1, 100))]
ORDERS = ["best", "index"]


def check(backend, name, *given, **options) -> None:
    """Compare a function's result on a backend with the reference's; that searches pages gathered to rows."""
    ours, told = {option: x for option, x in options.items() if x is not None}, list(given)
    if "blocks" in ours:
        blocks = ours.pop("blocks")
        by_row = blocks if given[3] else blocks[..., 0, :]
        told[1] = reference.gathered(given[1], by_row)
    expected, found = getattr(reference, name)(*told, **ours), backend(name, *given, **options)
    if name in ("planes", "group_planes"):
        (found, weights), (expected, same) = found, expected
        assert weights == same
    assert_same(found, expected)


# ---- Every backend -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_and_unpack(rng, backend, dtype):
    x = rng.normal(0, 2, (3, 2, 96)) if np.dtype(dtype).kind in "fi" else rng.integers(0, 3, (3, 2, 96))
    x = x.astype(dtype)
    if x.dtype.kind == "f":
        x[..., ::5], x[..., 1::7], x[..., 2::11] = -0.0, np.nan, -np.inf
        x[..., 3::13] = np.nextafter(np.zeros((), x.dtype.newbyteorder("=")), np.ones((), x.dtype.newbyteorder("=")))
    check(backend, "pack", x)
    check(backend, "unpack", reference.pack(x))


@pytest.mark.parametrize(("planes", "dtype"), [*((n, np.float32) for n in range(1, 9)), (3, np.float16), (6, float)])
def test_quantise_and_planes(rng, backend, planes, dtype):
    w = (rng.normal(size=(5, 64)) * 10.0 ** rng.integers(-6, 5, (5, 1))).astype(np.float32)
    w[0], w[1, ::3], w[2] = 0.0, -0.0, w[2] * np.float32(2.0**-140)
    with np.errstate(over="ignore"):
        w = w.astype(dtype)
    check(backend, "quantise", w, planes)
    check(backend, "planes", w, planes)
    w[3, :5], w[3, 7], w[4] = np.nan, np.inf, (np.nan if planes % 2 else -np.inf)
    assert_same(backend("planes", w, planes, check=False)[0], reference.planes(w, planes)[0])
    assert_same(backend("quantise", w, planes, check=False), reference.quantise(w, planes))


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 40])
def test_group_planes(rng, backend, group):
    check(backend, "group_planes", random_codes(rng, 2, group, 3))


@pytest.mark.parametrize(("words", "weights"), CODES)
@pytest.mark.parametrize("n", LENGTHS[1:5:3])
def test_score(rng, backend, words, weights, n):
    rows = 3 if weights is None else len(weights)
    check(backend, "score", random_codes(rng, 2, rows, words), random_codes(rng, 2, n, words), weights)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "shapes", [((2, 1, 5, 2, 4), (2, 3, 1, 33, 4)), ((2, 4), (2, 3, 33, 4)), ((5, 1, 2, 4), (3, 33, 4))]
)
@pytest.mark.parametrize("weights", [None, (1, 3)])
def test_leading_dimensions_broadcast(rng, backend, shapes, weights):
    query, keys = (random_codes(rng, *shape) for shape in shapes)
    check(backend, "score", query, keys, weights)
    check(backend, "search", query, keys, 7, weights)


def ranges(rng, rows, n):
    start = rng.integers(0, n + 1, rows)
    ragged = {"starts": start, "lengths": start + rng.integers(0, n + 1 - start), "sink": 3}
    return [{}, {"lengths": n - n // 3, "starts": n // 5, "sink": 2, "recent": 1}, ragged, {"sink": 1000}]


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i4"])
def test_topk(rng, backend, dtype):
    kind = np.iinfo(dtype)
    scores = rng.integers(0, 60, (2, 3, 130)).astype(dtype)
    scores[0, 0, :9], scores[1, 2, -1] = kind.max, kind.min
    for how in ranges(rng, (2, 3), 130):
        for k in (0, 9, 130, rng.integers(0, 131, (2, 3)), np.array([[5], [130]], np.uint8)):
            check(backend, "topk", scores, k, **how)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("words", "weights"), CODES)
def test_search(rng, backend, words, weights):
    rows = (2, 3) if weights is None else (2,)
    query, keys = random_codes(rng, 2, 3 if weights is None else len(weights), words), random_codes(rng, 2, 300, words)
    keys = np.take_along_axis(keys, rng.integers(0, 50, (2, 300, 1)), 1)  # ties
    for number, how in enumerate(ranges(rng, rows, 300)):
        for other, k in enumerate((9, rng.integers(0, 301, rows))):
            check(backend, "search", query, keys, k, weights, order=ORDERS[(number + other) % 2], **how)


@pytest.mark.sample(12)
@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("weights", [None, (1, 2, 4)])
@pytest.mark.parametrize("longest", [70, 2500])
def test_search_in_pages(rng, backend, size, weights, longest):
    lengths = np.array([longest, longest // 3])
    tables, pages = shuffled_tables(rng, lengths, size, 2, 3)
    pool = pool_of(rng, pages, size, 2, 4, heads_outside=bool(longest % 3))
    rows = (2, 1) if weights else (2, 1, 1)
    ends = lengths.reshape(rows)
    how = {"lengths": ends, "starts": ends // 9, "sink": 2, "recent": 3}
    blocks = tables.reshape(*rows, -1)
    check(backend, "search", random_codes(rng, 2, 2, 3, 4), pool, ends // 5, weights, blocks=blocks, **how)


@pytest.mark.sample(12)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_change_the_result(rng, backend, layout):
    lay = LAYOUTS[layout]
    query, keys = random_codes(rng, 2, 3, 4), lay(random_codes(rng, 2, 70, 4))
    check(backend, "score", lay(query), keys, (1, 2, 4))
    check(backend, "score", query, keys)
    check(backend, "search", lay(query), keys, 9, (1, 2, 4), order="index")
    check(backend, "topk", lay(rng.integers(0, 9, (3, 70)).astype(np.int32)), 20)
    check(backend, "pack", lay(rng.normal(size=(4, 64)).astype(np.float32)))
    check(backend, "planes", lay(rng.normal(size=(4, 64)).astype(np.float32)))
    check(backend, "group_planes", lay(query))
    check(backend, "unpack", lay(query))


def test_empty_inputs(backend):
    assert backend("pack", np.zeros((0, 64), np.float32)).shape == (0, 2)
    assert backend("planes", np.zeros((0, 64), np.float32), check=False)[0].shape == (0, 3, 2)
    for q, n in ((3, 0), (0, 5), (0, 0)):
        query, keys = np.zeros((2, q, 4), np.int32), np.zeros((2, n, 4), np.int32)
        assert backend("score", query, keys).shape == (2, q, n)
        assert [x.shape for x in backend("search", query, keys, 0)] == [(2, q, 0)] * 2
        assert [x.shape for x in backend("topk", np.zeros((q, n), np.int32), np.zeros(q, int))] == [(q, 0)] * 2
    assert not getattr(backend, "kernels", [])


# ---- Laws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planes", range(1, 9))
def test_levels_are_odd_near_their_weights_and_score_as_inner_products(rng, planes):
    w, keys, m = rng.normal(size=(6, 64)).astype(np.float32), random_codes(rng, 33, 2), 2**planes - 1
    levels, scale = hashcore.quantise(w, planes)
    assert levels.dtype == (np.int8 if planes < 8 else np.int16)
    assert ((abs(levels) <= m) & (levels % 2 == 1)).all()
    near = (np.abs(w) > scale * m) | (np.abs(w - levels * scale) <= scale * 1.001)
    assert near.all()
    signs = 2 * reference.unpack(keys).astype(np.int64) - 1
    doubled = levels.astype(np.int64) @ signs.T + 64 * m
    codes, weights = hashcore.planes(w, planes)
    assert_same(hashcore.score(codes, keys, weights), (doubled // 2).astype(np.int32))


@pytest.mark.parametrize("group", range(1, 10))
def test_group_planes_score_as_the_sum_over_the_group(rng, group):
    queries, keys = random_codes(rng, 3, group, 4), random_codes(rng, 3, 65, 4)
    codes, weights = hashcore.group_planes(queries)
    assert_same(hashcore.score(codes, keys, weights), hashcore.score(queries, keys).sum(-2, dtype=np.int32))


@pytest.mark.parametrize("weights", [(511,), (512,), (255, 256), (256, 256), (2**23,), (1, 2, 4, 8, 16, 32, 64)])
def test_scores_of_all_sizes_are_exact(rng, weights):
    keys = random_codes(rng, 199, 4)
    for query in (np.repeat(keys[:1], len(weights), 0), random_codes(rng, len(weights), 4)):
        assert_same(hashcore.score(query, keys, weights), reference.score(query, keys, weights))
        if sum(weights) < 512:
            for k in (1, 20, 199):
                assert_same(hashcore.search(query, keys, k, weights), reference.search(query, keys, k, weights))
    assert hashcore.score(keys[:1, :1], keys[:1, :1], (2**26 - 1,)).item() == 32 * (2**26 - 1)


ZEROS = np.zeros((1, 4), np.int32)
MISLEADING = np.tile(np.arange(20), 1000)
for _run in range(8):
    MISLEADING[_run * (20_000 - 64) // 7 :][:64] = 128  # the places that are sampled: they promise too much
HARD = {
    "all alike": np.full(10_000, 7),
    "rising": np.arange(20_000) * 128 // 20_000,
    "falling": np.arange(20_000)[::-1] * 128 // 20_000,
    "a sample that promises too much": MISLEADING,
    "a sample that promises too little": 128 - MISLEADING,
    "few that are better": np.where(np.arange(9000) < 3, 100, 50),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("workers", [1, 4])
def test_what_a_sample_says_changes_nothing(case, order, workers):
    keys = hashcore.pack(np.arange(128) >= HARD[case][:, None])  # which score this against zeros
    pages = np.random.default_rng(0).permutation(len(keys) // 8)
    pool = np.empty_like(keys).reshape(-1, 8, 4)
    pool[pages] = keys.reshape(-1, 8, 4)
    with on_threads(workers):
        for k in (5, 700, 3000):
            expected = reference.search(ZEROS, keys, k, order=order)
            assert_same(hashcore.search(ZEROS, keys, k, order=order), expected)
            assert_same(hashcore.search(ZEROS, pool, k, order=order, blocks=pages), expected)


def test_no_later_key_is_taken_when_every_one_has_the_largest_score():
    """The floor is then one above it, and must fit 16 bits, too."""
    for words in (1, 2, 4):
        keys, weights = np.zeros((20_000, words), np.int32), (2047 // words,)
        expected = reference.search(keys[None, :1], keys, 700, weights)
        assert_same(hashcore.search(keys[None, :1], keys, 700, weights), expected)


def read_between_guard_pages(told):
    """Read keys at both ends of memory between two pages that nobody may read; then read beyond it."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    buffer = np.frombuffer(mmap.mmap(-1, 18 * page), np.int32)
    for at in (0, 17):
        edge = ctypes.c_void_p(buffer.ctypes.data + at * page)
        assert libc.mprotect(edge, ctypes.c_size_t(page), 0) == 0
    inside, rng = buffer[page // 4 : 17 * page // 4], np.random.default_rng(0)
    inside[:] = random_codes(rng, len(inside))
    for words, n, planes in itertools.product((1, 2, 3, 4, 5, 7, 8, 9, 12, 17), (1, 31, 32, 33, 65), (1, 3)):
        query, weights = random_codes(rng, planes, words), (1, 2, 4)[:planes]
        for flat in (inside[: n * words], inside[-n * words :]):
            keys = flat.reshape(n, words)
            for view in (keys, keys[::-1], keys[::2], keys[:, -1:], keys[:, :1]):
                q = query[:, : view.shape[-1]]
                assert_same(hashcore.score(q, view, weights), reference.score(q, view, weights))
                assert_same(hashcore.search(q, view, len(view), weights), reference.search(q, view, len(view), weights))
    faulthandler.disable()  # what follows is meant
    told.send("done")
    buffer[17 * page // 4]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.skipif(sys.platform == "win32", reason="guard pages are made with mprotect")
def test_nothing_outside_the_keys_is_read():
    """Whoever reads there is killed, as the last line is."""
    here, there = multiprocessing.Pipe(False)
    child = multiprocessing.get_context("fork").Process(target=read_between_guard_pages, args=(there,))
    child.start()
    there.close()
    assert here.recv() == "done"
    child.join()
    assert child.exitcode == -signal.SIGSEGV
