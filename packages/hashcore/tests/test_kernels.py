"""Every CUDA kernel against the reference, run on the CPU under the host simulator: tolerance 0."""

import math
from unittest import mock

import hashcore
import numpy as np
import pytest
from hashcore import reference
from hashcore_samples import pool_of, random_codes, shuffled_tables
from hostsim import check_slack, guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st

simulated = pytest.importorskip("simulated", reason="needs torch and g++")
from hashcore.cuda import kept, launch, layout, operands, tensor_search, tensors  # noqa: E402
from simulated import ORDERS, Device, assert_finds, assert_same, empty, inside, limits, orders, running  # noqa: E402

torch = simulated.torch
LENGTHS = [1, 7, 8, 9, 31, 33, 127, 128, 129, 2048, 2049, 4097, 9001]  # around vectors, warps, chunks and tiles
DTYPES = ["float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64"]
PLANES = (1, 2, 4)
few = settings(deadline=None, max_examples=12)


def forget(monkeypatch):
    """Let a test begin with nothing kept."""
    monkeypatch.setattr(tensor_search, "_searches", kept.Table())


@few
@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from(DTYPES), orders(), st.integers(0, 99))
def test_pack_equals_the_reference(rows, words, dtype, device, seed):
    x = np.random.default_rng(seed).normal(0, 2, (rows, 32 * words)).astype(np.float32)
    x[:, ::5], x[:, 1::7] = 0.0, -0.0
    if "float" in dtype:
        x[:, 2::11], x[:, 3::13], x[:, 4::17] = np.nan, np.inf, 2.0**-24
    else:
        x = np.clip(x, 0, None) if dtype == "uint8" else x
    typed = torch.from_numpy(x).to(getattr(torch, dtype))
    out = empty(rows, words)
    with running(device):
        tensors.pack(typed, out)
    assert_same(out, reference.pack((typed > 0).numpy()))


# Words and weights: 1 to 6 planes of 128 bits; six planes of 32 to 512 bits, with two and four lanes a key from 256 on;
# an odd number of words with weights of no pattern; codes longer than a thread holds at once. The bits of 128-bit codes
# are counted by tensor cores for 3 to 7 planes.
SCORES = [
    *((4, tuple(1 << p for p in range(planes))) for planes in range(1, 7)),
    *((1, (1, 2, 4)), (2, (1, 2)), (3, (5, 1)), (8, (1, 2, 4, 8, 16)), (9, (1, 2)), (12, (1, 2, 4))),
    *((16, (1, 2, 4)), (4, (5, 3, 7)), (4, tuple(1 << p for p in range(7))), (4, (1, 2, 4, 8, 16, 32, 64, 127))),
    *((words, tuple(1 << p for p in range(6))) for words in (1, 2, 3, 8, 12, 16)),
]


@few
@given(
    st.sampled_from([(4, (1, 1, 600)), *SCORES]), st.integers(1, 3), st.sampled_from(LENGTHS), orders(), st.booleans()
)
@example((4, (1, 1, 600)), 2, 256, Device(1), True)
def test_planes_score_as_the_reference(case, rows, n, device, products_of_bits):
    words, weights = case
    rng, out = np.random.default_rng(n), empty(rows, n)
    query, keys = random_codes(rng, rows, len(weights), words), random_codes(rng, rows, n, words)
    keys[:, :1] = query[:, -1:]  # a score above half of the largest
    with running(device), mock.patch.object(launch, "counts_bits", return_value=products_of_bits):
        tensors.score(inside(query), inside(keys), weights, out)
    assert_same(out, reference.score(query, keys, weights))


@st.composite
def searches(draw):
    """A search whose keys repeat, so that scores tie, and whose window may be empty or reach beyond the keys."""
    words, weights = draw(st.sampled_from(SCORES))
    rows, n = draw(st.integers(1, 4)), draw(st.sampled_from(LENGTHS))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    keys = random_codes(rng, rows, draw(st.sampled_from([2, n])), words)
    keys = np.take_along_axis(keys, rng.integers(0, keys.shape[1], (rows, n))[..., None], 1)
    query = random_codes(rng, rows, len(weights), words)
    k = draw(st.one_of(st.integers(1, n), st.just("ragged")))
    ragged = draw(st.booleans())
    return {
        **{"weights": weights, "query": query, "keys": keys},
        "k": rng.integers(0, n + 1, rows).astype(np.int32) if k == "ragged" else k,
        "lengths": rng.integers(0, n + 1, rows).astype(np.int32) if ragged else draw(st.none() | st.integers(0, n)),
        "starts": rng.integers(0, n // 2 + 1, rows).astype(np.int32) if ragged else draw(st.none() | st.integers(0, n)),
        **{"sink": draw(st.integers(0, 9)), "recent": draw(st.integers(0, 9))},
    }


@settings(deadline=None, max_examples=25)
@given(searches(), orders(), st.booleans(), st.sampled_from([None, 0, -1, 2**30]))
def test_search_equals_the_reference(case, device, products_of_bits, left):
    """Also twice in the same workspace, whatever is left there, and inside of it."""
    with mock.patch.object(launch, "counts_bits", return_value=products_of_bits):
        if left is None:
            assert_finds(device, **case)
            return
        with mock.patch.object(kept, "scratch", simulated.Scratch(left)) as scratch:
            for _ in range(2):
                assert_finds(device, **case)
                check_slack(scratch.tensor.numpy())


@pytest.mark.parametrize("wanted", [40, 700])
def test_a_sample_that_misleads_costs_time_only(rng, wanted):
    """All good keys are between those of the sample, so that the floor is too high, or all in it, and it is too low."""
    n, sampled = 9001, 2048
    i = np.arange(sampled, dtype=np.uint64)
    jitter = (i * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)) >> np.uint64(16)
    places = ((((i << np.uint64(16)) | jitter) * np.uint64(n) // np.uint64(sampled)) >> np.uint64(16)).astype(int)
    assert len({*places}) == sampled  # as score.cu draws them
    query = np.full((1, 3, 4), -1, np.int32)
    for good, order in ((np.isin(np.arange(n), places), 1), (~np.isin(np.arange(n), places), 7)):
        keys = random_codes(rng, 1, n, 4)
        keys[0, good] |= random_codes(rng, int(good.sum()), 4)
        assert_finds(Device(order), query, keys, wanted, PLANES)


@pytest.mark.parametrize("copied", [False, True])
def test_a_search_keeps_its_launches_also_of_a_cache_that_grows(rng, copied, monkeypatch):
    """The second search describes no launch again, and no memory is cleared."""
    query, cache = torch.from_numpy(random_codes(rng, 2, 3, 4)), torch.from_numpy(random_codes(rng, 2, 900, 4))
    cache = cache.mT.contiguous().mT if copied else cache  # whose words lie apart
    forget(monkeypatch)
    for n in (900, 777, 778, 777, 760, 900):
        out = empty(2, 70), empty(2, 70, dtype=np.int64)
        with running(Device()):
            tensor_search.search(query, cache[:, :n], PLANES, limits(70, n), *out)
        assert_same(out, reference.search(query.numpy(), cache[:, :n].numpy(), 70, PLANES, order="index"))
        monkeypatch.setattr(tensors.kernels, "make_launch", lambda *_, **__: pytest.fail("made again"))
        monkeypatch.setattr(kept.torch, "zeros", lambda *_, **__: pytest.fail("memory was cleared"))


@pytest.mark.parametrize("kinds", [("int32", "int64"), ("int64", "int32")])
def test_bounds_and_keys_are_read_where_they_lie(rng, kinds):
    """A batch's lengths are those of all its heads: int32 or int64 [B, 1]; a cache of [B, T, H, W] has gaps."""
    query, keys = random_codes(rng, 2, 3, 2, 4), random_codes(rng, 2, 3, 500, 4)
    rows = np.array([[400], [90]]), np.array([[40], [7]]), np.array([[9], [2]])
    lengths, counts, starts = (x.astype(kind) for x, kind in zip(rows, (*kinds, kinds[1]), strict=True))
    bound = inside(lengths)
    found = operands.per_row(operands.integers(bound), (2, 3))
    assert (found[0].data_ptr(), found[1]) == (bound.data_ptr(), 3)
    assert_finds(Device(), query, keys, counts, (1, 2), lengths=lengths, starts=starts)
    cache = torch.from_numpy(random_codes(rng, 2, 64, 3, 4))
    assert operands._rows(cache.transpose(1, 2), apart=True).data_ptr() == cache.data_ptr()
    assert operands._rows(cache.transpose(1, 2)).data_ptr() != cache.data_ptr()


@pytest.mark.parametrize("far", [2**31, 2**32 + 5, 2**63 - 1, -(2**32) + 5, -(2**63)])
def test_bounds_beyond_int32_are_clamped_too(rng, far):
    query, keys = random_codes(rng, 4, 3, 4), random_codes(rng, 4, 300, 4)
    rows = {"k": [far, 9, 9, 9], "lengths": [300, far, 300, 300], "starts": [0, 0, 0, far]}
    k, lengths, starts = (torch.from_numpy(np.array(values)) for values in rows.values())
    out, wanted = (empty(4, 300), empty(4, 300, dtype=np.int64)), limits(300, 300, k, lengths, starts, 1, 1)
    with running(Device()):
        tensor_search.search(inside(query), inside(keys), PLANES, wanted, *out)
    clamped = {name: np.array(value).clip(0, 300) for name, value in rows.items()}
    expected = reference.topk(reference.score(query, keys, PLANES), **clamped, sink=1, recent=1)
    for ours, theirs, other in zip(out, expected, (0, -1), strict=True):
        check_slack(ours.numpy())
        np.testing.assert_array_equal(ours[..., : theirs.shape[-1]], theirs)
        assert (ours[..., theirs.shape[-1] :] == other).all()


@pytest.mark.slow
def test_more_than_the_kernels_can_count_is_refused():
    def launched(*_):
        pytest.fail("nothing may be launched")

    one, far, first = torch.zeros(1, 1, 4, dtype=torch.int32), 2**29 + 1, limits(1, 1)
    keys, scores = one.expand(1, far, 4), torch.zeros(1, 1, dtype=torch.int32).expand(1, far)
    out = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    many = [x.expand(2**31, *x.shape[1:]) for x in (one, one, *out)]
    wide, planes = torch.zeros(1, 32).expand(2**31, 32), many[2][:, :, None]
    long = f"on CUDA a row may have at most {layout.MAX_POSITIONS} positions, got 536870913; split the keys"
    rows = "on CUDA a call may have fewer than 2147483648 rows, got 2147483648; split the queries"
    for words, call in (
        (long, lambda: tensor_search.search(one, keys, (1,), first, *out)),
        (long, lambda: tensors.score(one, keys, (1,), scores)),
        (long, lambda: tensors.score(one, keys, None, scores[:, None])),
        (rows, lambda: tensor_search.search(many[0], one, (1,), first, *many[2:])),
        (rows, lambda: tensors.planes(wide, 3, False, planes)),
    ):
        with running(launched), pytest.raises(ValueError, match=words):
            call()


@pytest.mark.slow
@few
@given(st.sampled_from(SCORES), st.integers(2, 19), st.sampled_from(LENGTHS[6:]), orders(), st.integers(0, 99))
def test_queries_over_shared_keys_equal_the_reference(case, queries, n, device, seed):
    """Rows of a causal prompt: each sees other keys, and wants another number of them."""
    (words, weights), rng = case, np.random.default_rng(seed)
    query, keys = random_codes(rng, 2, queries, len(weights), words), random_codes(rng, 2, 1, n, words)
    lengths = np.sort(rng.integers(0, n + 1, (2, queries)), axis=1).astype(np.int32)
    counts = (lengths // rng.integers(2, 9)).astype(np.int32)
    assert_finds(device, query, keys, counts, weights, lengths=lengths, sink=1, recent=2)


def test_rows_beyond_the_workspace_are_searched_in_turns(rng, monkeypatch):
    monkeypatch.setattr("hashcore.cuda.layout.MAX_WORKSPACE", 4 * 300 * 8)
    forget(monkeypatch)
    query, keys, device = random_codes(rng, 2, 11, 4), random_codes(rng, 2, 300, 4), Device()
    assert_finds(device, query, keys, 7, None)
    assert device.kernels == 3 * ["list_candidates", "select_64"]


@pytest.mark.parametrize("n", [1, 2**20, layout.MAX_POSITIONS - 1, layout.MAX_POSITIONS])
def test_lists_of_the_longest_rows_have_offsets_of_16_bits(n):
    """Their length, a multiple of 32, must fit too (lists.cuh, Cut); and the blocks of a row their limit."""
    space = layout.SearchSpace.plan(1, n, 132)
    step = math.ceil(math.ceil(n / (space.splits * layout.WARPS)) / 32) * 32
    assert step <= layout.MAX_LIST < 2**16
    assert space.splits <= layout.MAX_SPLITS
    assert space.stride >= n


def test_more_candidates_than_a_block_holds_are_read_in_turns(rng, monkeypatch):
    monkeypatch.setattr(launch, "sm_count", lambda _: 6)
    forget(monkeypatch)
    for order in ORDERS[1:]:
        assert_finds(Device(order), random_codes(rng, 2, 3, 4), random_codes(rng, 2, 20_000, 4), 13_000, PLANES)


# ---- Keys in pages: pages without an owner, and keys after a row's last, would score best ---------------------------

# Words and weights: the hashers' codes, one word, a number of words without vectors, four lanes a key, codes longer
# than a thread holds.
PAGED = [(4, PLANES), (4, PLANES), (1, (1, 2)), (3, (5, 1)), (16, PLANES), (9, (1, 2))]


class Pool:
    """Keys of B sequences and H heads in shuffled pages between guard pages, with other words around them."""

    def __init__(self, rng, lengths, size, heads, words, shared=0, heads_outside=True, kind=np.int32):
        self.lengths, self.size = np.asarray(lengths), size
        self.tables, pages = shuffled_tables(rng, self.lengths, size, 2, shared)
        self.codes = pool_of(rng, pages, size, heads, words, heads_outside=heads_outside, tail=1, hold=guarded)
        self.blocks = inside(self.tables.astype(kind), 8)

    def poison(self, query) -> None:
        """Give the best of codes to what no row sees: pages without an owner, keys behind the last."""
        owned = np.zeros(self.codes.shape[1:3], bool)
        for table, length in zip(self.tables, self.lengths, strict=True):
            at = np.arange(length)
            owned[table[at // self.size], at % self.size] = True
        self.codes[:, ~owned] = query.reshape(-1, *query.shape[-2:])[0, -1]

    def finds(self, device, query, k, weights, between=(), **ranges) -> None:
        """Search planes [B, H, P, W], or with a dimension `between` heads and tables queries [B, H, Q, W]."""
        at = (slice(None), None, *between)
        gathered = reference.gathered(self.codes, self.tables[:, None])
        assert_finds(device, query, self.codes, k, weights, self.blocks[at], gathered, **ranges)


@settings(deadline=None, max_examples=10)
@given(st.data(), orders())
def test_keys_in_pages_are_found_as_gathered_ones(data, device):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size, (words, weights) = data.draw(st.sampled_from([16, 32, 128, 1, 8, 64])), data.draw(st.sampled_from(PAGED))
    longest, kind = data.draw(st.sampled_from([70, 1100, 2500])), data.draw(st.sampled_from([np.int32, np.int64]))
    lengths = rng.integers(0, longest + 1, batch)
    lengths[0] = longest
    pool = Pool(rng, lengths, size, heads, words, data.draw(st.integers(0, 3)), data.draw(st.booleans()), kind)
    query = random_codes(rng, batch, heads, len(weights), words)
    pool.poison(query)
    ends = lengths[:, None].astype(kind)
    k = np.minimum(ends, data.draw(st.sampled_from([3, 30, 2500])))
    ranges = dict(lengths=ends, starts=rng.integers(0, ends + 1).astype(kind))
    pool.finds(
        device, query, k, weights, sink=data.draw(st.integers(0, 5)), recent=data.draw(st.integers(0, 3)), **ranges
    )


@pytest.mark.parametrize("heads", [1, 2])
def test_queries_over_the_same_pages(rng, heads):
    """Q queries without weights, over the pages of their sequence."""
    lengths = np.array([900, 333])
    pool = Pool(rng, lengths, 16, heads, 4)
    pool.finds(Device(), random_codes(rng, 2, heads, 5, 4), 9, None, (None,), lengths=lengths[:, None, None])


def test_page_numbers_out_of_range_read_nothing_outside_the_pool(rng):
    """A caller's error, which the host cannot see: the guard pages are not touched."""
    pool, query = Pool(rng, np.array([300]), 32, 1, 4), random_codes(rng, 1, 1, 3, 4)
    pages = pool.codes.shape[1]
    for wrong in (-1, pages, 2**31 - 1, -(2**31)):
        pool.blocks[0, 2], pool.tables[0, 2] = wrong, pages - 1
        pool.finds(Device(), query, 300, PLANES, lengths=np.array([[300]]))


def test_pages_that_do_not_fit_are_refused(rng):
    for shape, words in (((3, 24, 4), "power of two of keys, got 24"), ((0, 16, 4), "at least one page, got none")):
        pool, blocks = torch.zeros(shape).int().to("meta"), torch.zeros(1).int().to("meta")
        with pytest.raises((ValueError, TypeError), match=words):
            hashcore.search(torch.zeros(1, 4).int().to("meta"), pool, 1, blocks=blocks)
    pool, query = Pool(rng, np.array([300]), 32, 1, 4), random_codes(rng, 1, 1, 3, 4)
    shape = pool.codes.shape
    for page, key in ((32 * 4 + 1, 4), (32 * 5, 5)):  # words from one to the next
        memory = np.zeros((1, shape[1], page), np.int32)
        pool.codes = np.lib.stride_tricks.as_strided(memory, shape, (memory.nbytes, 4 * page, 4 * key, 4))
        with pytest.raises(ValueError, match=r"aligned to 16 bytes, and rows .* got strides .*copy the pages"):
            pool.finds(Device(), query, 20, PLANES, lengths=np.array([[300]]))
