"""Every CUDA kernel against the reference, run on the CPU under the host simulator: tolerance 0."""

import math
from unittest import mock

import hostsim
import numpy as np
import pytest
from hashcore import reference
from hashcore_samples import random_codes
from hostsim import check_slack
from hypothesis import given, settings
from hypothesis import strategies as st

simulated = pytest.importorskip("simulated", reason="needs torch and g++")
from hashcore.cuda import kept, kernels, layout, operands, source, tensor_search, tensors  # noqa: E402

torch = simulated.torch
NAMES = "inside", "empty", "assert_same", "assert_finds", "orders"
inside, empty, assert_same, assert_finds, orders = (getattr(simulated, name) for name in NAMES)

LENGTHS = [1, 7, 8, 9, 31, 33, 127, 128, 129, 2048, 2049, 4097, 9001]  # around vectors, warps, chunks and tiles
DTYPES = ["float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64"]
few = settings(deadline=None, max_examples=12)


def forget(monkeypatch):
    """Let a test begin with nothing kept."""
    monkeypatch.setattr(tensor_search, "_searches", kept.Table())
    monkeypatch.setattr(kept, "_lanes", kept.Table())


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
    tensors.pack(typed, out, device)
    assert_same(out, reference.pack((typed > 0).numpy()))


@few
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 8),
    st.sampled_from(DTYPES[:4]),
    orders(),
    st.integers(0, 99),
)
def test_planes_equal_the_reference(rows, words, planes, dtype, device, seed):
    rng = np.random.default_rng(seed)
    w = rng.normal(0, 1, (rows, 32 * words)).astype(np.float32) * np.float32(10.0) ** rng.integers(-6, 5, (rows, 1))
    w[0, ::3] = 0.0
    w[rows // 2] *= rng.choice([0.0, 1.0])
    typed = torch.from_numpy(w.astype(np.float32)).to(getattr(torch, dtype))
    out = empty(rows, planes, words)
    tensors.planes(typed, out, device)
    assert_same(out, reference.planes(typed.float().numpy(), planes)[0])


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
@given(st.sampled_from(SCORES), st.integers(1, 3), st.sampled_from(LENGTHS), orders(), st.integers(0, 99))
def test_planes_score_as_the_reference(case, rows, n, device, seed):
    words, weights = case
    rng = np.random.default_rng(seed)
    query, keys = random_codes(rng, rows, len(weights), words), random_codes(rng, rows, n, words)
    out = empty(rows, n)
    tensors.score(inside(query), inside(keys), weights, out, device)
    assert_same(out, reference.score(query, keys, weights))


PLACES = """
extern "C" __global__ void __launch_bounds__(32) places(i32* out) {
  const int lane = threadIdx.x;
  for (int i = 0; i < MINE; i += 4) out[i * 8 + lane] = lane / LANES * WORDS + word_of(i, lane % LANES);
}
"""


@pytest.mark.parametrize(("words", "lanes"), [(4, 1), (8, 2), (16, 4), (24, 2), (32, 4)])
def test_lanes_beside_each_other_read_16_bytes_beside_each_other(words, lanes):
    """A warp reads a long key in one stretch of memory, too; several keys in one if a lane reads once."""
    text, macros = source.read_source(source.HASHCORE_KERNELS, "score.cu") + PLACES, kernels.score_macros(words, (1, 2))
    loads = np.full((words // lanes // 4, 32), -1, np.int32)
    hostsim.Simulator(text, ["places"], dict(macros)).launch("places", (1,), (32,), [loads])
    stretches = loads.reshape(-1, 32 if len(loads) == 1 else lanes)
    assert (np.diff(stretches) == 4).all()
    assert sorted(loads.flat) == [*range(0, 32 // lanes * words, 4)]


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
        "weights": weights,
        "query": query,
        "keys": keys,
        "k": rng.integers(0, n + 1, rows).astype(np.int32) if k == "ragged" else k,
        "lengths": rng.integers(0, n + 1, rows).astype(np.int32) if ragged else draw(st.none() | st.integers(0, n)),
        "starts": rng.integers(0, n // 2 + 1, rows).astype(np.int32) if ragged else draw(st.none() | st.integers(0, n)),
        "sink": draw(st.integers(0, 9)),
        "recent": draw(st.integers(0, 9)),
        "wide": draw(st.booleans()),
    }


def assert_selects(values, indices, scores, k, **ranges) -> None:
    """Compare with a selection from scores by the reference; there may be more slots."""
    for ours, theirs, other in zip((values, indices), reference.topk(scores, k, **ranges), (0, -1), strict=True):
        check_slack(ours.numpy())
        np.testing.assert_array_equal(ours[..., : theirs.shape[-1]], theirs)
        assert (ours[..., theirs.shape[-1] :] == other).all()


@settings(deadline=None, max_examples=100)
@given(searches(), orders(), st.booleans())
def test_search_equals_the_reference(case, device, products_of_bits):
    with mock.patch.object(tensors, "SIMULATED_TENSOR", products_of_bits):
        assert_finds(device, **case)


@few
@given(searches(), orders(), st.sampled_from([0, -1, 2**30]))
def test_a_search_stays_inside_its_workspace_and_does_not_read_what_was_there(case, device, left):
    with mock.patch.object(kept, "scratch", simulated.Scratch(left)) as scratch:
        for _ in range(2):
            assert_finds(device, **case)
            check_slack(scratch.tensor.numpy())


@pytest.mark.parametrize("order", simulated.ORDERS)
@pytest.mark.parametrize("wanted", [40, 700])
def test_a_sample_that_misleads_costs_time_only(rng, order, wanted):
    """All good keys are between those of the sample, so that the floor is too high, or all in it, and it is too low."""
    n, sampled = 9001, 2048
    i = np.arange(sampled, dtype=np.uint64)
    jitter = (i * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)) >> np.uint64(16)
    places = ((((i << np.uint64(16)) | jitter) * np.uint64(n) // np.uint64(sampled)) >> np.uint64(16)).astype(int)
    assert len({*places}) == sampled  # as score.cu draws them
    query = np.full((1, 3, 4), -1, np.int32)
    for good in (np.isin(np.arange(n), places), ~np.isin(np.arange(n), places)):
        keys = random_codes(rng, 1, n, 4)
        keys[0, good] |= random_codes(rng, int(good.sum()), 4)
        assert_finds(simulated.Device(order), query, keys, wanted, (1, 2, 4))


def test_a_search_is_right_after_one_that_failed_between_its_launches(rng, monkeypatch):
    query, keys = random_codes(rng, 2, 3, 4), random_codes(rng, 2, 9001, 4)
    case = {"weights": (1, 2, 4), "query": query, "keys": keys, "k": 700, "wide": True}
    case |= {"lengths": None, "starts": None, "sink": 0, "recent": 0}
    scratch, device = simulated.Scratch(), simulated.Device()
    monkeypatch.setattr(kept, "scratch", scratch)

    def fails(launches, _):
        device(launches[:1])
        raise RuntimeError("no second launch")

    with pytest.raises(RuntimeError, match="no second launch"):
        simulated.search(fails, **case | {"query": ~query})
    assert scratch.tensor.any()
    assert_finds(device, **case)


def test_a_search_keeps_its_launches_and_its_memory(rng, monkeypatch):
    """The second search of a shape makes nothing: no launch is described again, no memory allocated or cleared."""
    query, keys = random_codes(rng, 2, 3, 4), random_codes(rng, 2, 777, 4)
    case = {"weights": (1, 2, 4), "query": query, "keys": keys, "k": 70}
    simulated.search(simulated.Device(), **case)
    monkeypatch.setattr(tensors.kernels, "make_launch", lambda *_, **__: pytest.fail("made again"))
    monkeypatch.setattr(kept.torch, "zeros", lambda *_, **__: pytest.fail("memory was cleared"))
    case["query"] = random_codes(rng, 2, 3, 4)
    assert_finds(simulated.Device(), **case)


def test_a_cache_that_grows_needs_no_new_launches(rng, monkeypatch):
    query, cache = torch.from_numpy(random_codes(rng, 2, 3, 4)), torch.from_numpy(random_codes(rng, 2, 900, 4))
    forget(monkeypatch)
    for n in (777, 778, 760, 900):
        out = empty(2, 70), empty(2, 70)
        tensor_search.search(query, cache[:, :n], 70, (1, 2, 4), operands.Bounds(), *out, simulated.Device())
        assert_selects(*out, reference.score(query.numpy(), cache[:, :n].numpy(), (1, 2, 4)), 70)
        monkeypatch.setattr(tensors.kernels, "make_launch", lambda *_, **__: pytest.fail("made again"))


@pytest.mark.parametrize("kinds", [("int32", "int32"), ("int64", "int64"), ("int64", "int32"), ("int32", "int64")])
def test_rows_that_share_bounds_need_no_copies(rng, kinds):
    """A batch's lengths are those of all its heads: int32 or int64 [B, 1] is read where it lies."""
    query, keys = random_codes(rng, 2, 3, 2, 4), random_codes(rng, 2, 3, 500, 4)
    rows = np.array([[400], [90]]), np.array([[40], [7]]), np.array([[9], [2]])
    lengths, counts, starts = (x.astype(kind) for x, kind in zip(rows, (*kinds, kinds[1]), strict=True))
    bound = inside(lengths)
    found = operands.per_row(operands.integers(bound), (2, 3))
    assert (found[0].data_ptr(), found[1]) == (bound.data_ptr(), 3)
    device, ranges = simulated.Device(), {"lengths": lengths, "starts": starts}
    assert_finds(device, query, keys, counts, (1, 2), **ranges)


@pytest.mark.parametrize("far", [2**31, 2**32, 2**32 + 5, 2**63 - 1, -(2**32) + 5, -(2**63)])
def test_bounds_beyond_int32_are_clamped_too(rng, far):
    query, keys = random_codes(rng, 4, 3, 4), random_codes(rng, 4, 300, 4)
    rows = {"k": [far, 9, 9, 9], "lengths": [300, far, 300, 300], "starts": [0, 0, 0, far]}
    k, lengths, starts = (torch.from_numpy(np.array(values)) for values in rows.values())
    values, indices = empty(4, 300), empty(4, 300)
    bounds = operands.Bounds(lengths, starts, 1, 1)
    codes = inside(query), inside(keys)
    tensor_search.search(*codes, k, (1, 2, 4), bounds, values, indices, simulated.Device())
    clamped = {name: np.array(value).clip(0, 300) for name, value in rows.items()}
    assert_selects(values, indices, reference.score(query, keys, (1, 2, 4)), **clamped, sink=1, recent=1)


@pytest.mark.slow
def test_more_than_the_kernels_can_count_is_refused():
    def launched(*_):
        pytest.fail("nothing may be launched")

    one, far = torch.zeros(1, 1, 4, dtype=torch.int32), 2**29 + 1
    keys, scores = one.expand(1, far, 4), torch.zeros(1, 1, dtype=torch.int32).expand(1, far)
    out = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    words = f"on CUDA a row may have at most {layout.MAX_POSITIONS} positions, got 536870913; split the keys"
    for call in (
        lambda: tensor_search.search(one, keys, 1, (1,), operands.Bounds(), *out, run=launched),
        lambda: tensors.score(one, keys, (1,), scores, launched),
        lambda: tensors.score(one, keys, None, scores[:, None], launched),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    many = [x.expand(2**31, *x.shape[1:]) for x in (one, one, out[0], out[1])]
    words = "on CUDA a call may have fewer than 2147483648 rows, got 2147483648; split the queries"
    with pytest.raises(ValueError, match=words):
        tensor_search.search(many[0], one, 1, (1,), operands.Bounds(), *many[2:], run=launched)
    wide, levels = torch.zeros(1, 32).expand(2**31, 32), torch.zeros(1, 1, dtype=torch.int16).expand(2**31, 32)
    for call in (
        lambda: tensors.group_planes(many[0][:, None, 0, :1], many[2][:, :, None], launched),
        lambda: tensors.planes(wide, many[2][:, :, None], launched),
        lambda: tensors.quantise(wide, levels, one[:, :1, 0].float().expand(2**31, 1), 3, launched),
    ):
        with pytest.raises(ValueError, match=words):
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
    assert_finds(device, query, keys, counts, weights, wide=True, lengths=lengths, sink=1, recent=2)
    assert "list_candidates_shared" in device.kernels


def test_groups_beyond_the_workspace_are_searched_in_turns(rng, monkeypatch):
    monkeypatch.setattr("hashcore.cuda.layout.MAX_WORKSPACE", 4 * 300 * 8)
    forget(monkeypatch)
    query, keys = random_codes(rng, 2, 11, 4), random_codes(rng, 2, 300, 4)
    device = simulated.Device()
    assert_finds(device, query, keys, 7, None)
    assert device.kernels.count("list_candidates_shared") == 4


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("n", [1, 2**20, layout.MAX_POSITIONS - 1, layout.MAX_POSITIONS])
def test_lists_of_the_longest_rows_have_offsets_of_16_bits(n, group):
    """Their length, a multiple of 32, must fit too (lists.cuh, Cut); and the blocks of a row their limit."""
    space = layout.SearchSpace.plan(group, group, n, 132)
    step = math.ceil(math.ceil(n / (space.splits * layout.WARPS)) / 32) * 32
    assert step <= layout.MAX_LIST < 2**16
    assert space.splits <= layout.MAX_SPLITS
    assert space.stride >= n


def test_more_candidates_than_a_block_holds_are_read_in_turns(rng, monkeypatch):
    monkeypatch.setattr(tensors, "SIMULATED_SMS", 6)
    forget(monkeypatch)
    query, keys = random_codes(rng, 2, 3, 4), random_codes(rng, 2, 20_000, 4)
    case = {"weights": (1, 2, 4), "query": query, "keys": keys, "k": 13_000}
    for order in simulated.ORDERS:
        assert_finds(simulated.Device(order), **case)


def test_keys_with_gaps_are_read_where_they_lie(rng):
    """A cache of [B, T, H, W] has its tokens apart: copying it would cost more than the search."""
    cache = torch.from_numpy(random_codes(rng, 2, 64, 3, 4))
    view = cache.transpose(1, 2)
    assert operands._rows(view, apart=True).data_ptr() == cache.data_ptr()
    assert operands._rows(view).data_ptr() != cache.data_ptr()
