"""Every CUDA kernel against the reference, run on the CPU under the host simulator: tolerance 0."""

import numpy as np
import pytest
from hashcore import reference
from hashcore.hostsim import check_slack, guarded
from hashcore_samples import random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the launches are described on torch tensors")
tensors = pytest.importorskip("hashcore.cuda.tensors", reason="the launches are described on torch tensors")
simulated = pytest.importorskip("simulated", reason="g++ is needed")

LENGTHS = [1, 7, 8, 9, 31, 33, 127, 128, 129, 2048, 2049, 4097, 9001]  # around vectors, warps, chunks and tiles
DTYPES = ["float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64"]
few = settings(deadline=None, max_examples=12)


def inside(array: np.ndarray, align: int = 16):
    """The array as a tensor between guard pages."""
    return torch.from_numpy(guarded(np.ascontiguousarray(array), align))


def empty(*shape: int, dtype=np.int32):
    """A tensor for results between guard pages, full of what no result is."""
    return torch.from_numpy(guarded(np.full(shape, -77, dtype), np.dtype(dtype).itemsize))


def assert_same(tensor, expected) -> None:
    check_slack(tensor.numpy())
    np.testing.assert_array_equal(tensor.numpy(), expected)


@st.composite
def orders(draw):
    return simulated.Device(draw(st.sampled_from(simulated.ORDERS)), draw(st.integers(1, 4)))


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


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_pack_of_what_has_no_kernel_equals_the_reference(rng, dtype):
    x = rng.integers(0, 3, (5, 64)).astype(dtype) * np.iinfo(dtype).max
    out = empty(5, 2)
    tensors.pack(torch.from_numpy(x), out, simulated.Device())
    assert_same(out, reference.pack(x))


@few
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.sampled_from(DTYPES[:4]), orders(), st.integers(0, 99)
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


def test_planes_of_what_is_not_finite_equal_the_reference(rng):
    w = rng.normal(size=(6, 64)).astype(np.float32)
    w[0, :5], w[1, 3], w[2, 4], w[3, 5:7], w[4] = np.nan, np.inf, -np.inf, (np.nan, np.inf), np.nan
    w[5] *= np.float32(2.0**-140)
    for planes in (1, 3, 8):
        out = empty(6, planes, 2)
        tensors.planes(inside(w), out, simulated.Device())
        assert_same(out, reference.planes(w, planes)[0])


@few
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 6), orders(), st.integers(0, 99))
def test_group_planes_equal_the_reference(group, rows, words, device, seed):
    codes = random_codes(np.random.default_rng(seed), rows, group, words)
    expected, _ = reference.group_planes(codes)
    out = empty(*expected.shape)
    tensors.group_planes(inside(codes), out, device)
    assert_same(out, expected)


@few
@given(st.sampled_from([1, 4, 9]), st.integers(1, 40), st.sampled_from(LENGTHS[:9]), orders(), st.integers(0, 99))
def test_pairs_score_as_the_reference(words, queries, n, device, seed):
    rng = np.random.default_rng(seed)
    query, keys = random_codes(rng, 2, queries, words), random_codes(rng, 2, n, words)
    out = empty(2, queries, n)
    tensors.score(inside(query), inside(keys), None, out, device)
    assert_same(out, reference.score(query, keys))


# Words and weights: the default, one query, an odd number of words with weights of no pattern, a second histogram
# level, and codes longer than a thread holds at once.
SCORES = [(4, (1, 2, 4)), (4, (1,)), (3, (5, 1)), (8, (1, 2, 4, 8, 16)), (9, (1, 2))]


@few
@given(st.sampled_from(SCORES), st.integers(1, 3), st.sampled_from(LENGTHS), orders(), st.integers(0, 99))
def test_planes_score_as_the_reference(case, rows, n, device, seed):
    words, weights = case
    rng = np.random.default_rng(seed)
    query, keys = random_codes(rng, rows, len(weights), words), random_codes(rng, rows, n, words)
    out = empty(rows, n)
    tensors.score(inside(query), inside(keys), weights, out, device)
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


def tensor_or(value):
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def run_search(case, device, scratch=None):
    width = int(np.max(case["k"]))
    values = empty(len(case["query"]), width)
    indices = empty(len(case["query"]), width, dtype=np.int64 if case["wide"] else np.int32)
    bounds = tensors.Bounds(tensor_or(case["lengths"]), tensor_or(case["starts"]), case["sink"], case["recent"])
    tensors.search(
        inside(case["query"]),
        inside(case["keys"]),
        tensor_or(case["k"]),
        case["weights"],
        bounds,
        values,
        indices,
        scratch,
        device,
    )
    return values, indices


def expected_search(case):
    scores = reference.score(case["query"], case["keys"], case["weights"])
    window = (case["lengths"], case["starts"], case["sink"], case["recent"])
    return simulated.window_topk(scores, case["k"], *window)


@settings(deadline=None, max_examples=60)
@given(searches(), orders())
def test_search_equals_the_reference(case, device):
    for ours, theirs in zip(run_search(case, device), expected_search(case), strict=True):
        assert_same(ours, theirs)


@few
@given(searches(), orders())
def test_a_search_leaves_its_workspace_ready_for_the_next(case, device):
    rows, n, words = *case["keys"].shape[:2], case["keys"].shape[2]
    scratch = torch.from_numpy(guarded(tensors.workspace(rows, n, words, case["weights"], torch.device("cpu")).numpy()))
    for _ in range(2):
        for ours, theirs in zip(run_search(case, device, scratch), expected_search(case), strict=True):
            assert_same(ours, theirs)


def test_a_decode_step_is_two_launches_and_a_long_score_three(rng):
    for words, weights, launches in ((4, (1, 2, 4), 2), (8, (1, 2, 4, 8, 16), 3)):
        device = simulated.Device()
        query, keys = random_codes(rng, 4, len(weights), words), random_codes(rng, 4, 5000, words)
        case = {"weights": weights, "query": query, "keys": keys, "k": 100, "wide": False}
        run_search(case | {"lengths": None, "starts": None, "sink": 0, "recent": 0}, device)
        assert len(device.kernels) == launches


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_the_split_does_not_change_the_result(rng, splits, monkeypatch):
    query, keys = random_codes(rng, 2, 3, 4), random_codes(rng, 2, 9001, 4) & 0x11
    case = {"weights": (1, 2, 4), "query": query, "keys": keys, "k": 500, "wide": False}
    case |= {"lengths": None, "starts": None, "sink": 3, "recent": 0}
    monkeypatch.setattr(tensors, "SIMULATED_PROCESSORS", splits)  # two blocks each, two rows
    device = simulated.Device(order=11)
    for ours, theirs in zip(run_search(case, device), expected_search(case), strict=True):
        assert_same(ours, theirs)


def test_rows_beyond_the_workspace_are_searched_in_turns(rng, monkeypatch):
    monkeypatch.setattr("hashcore.cuda.layout.MAX_WORKSPACE", 20_000)
    query, keys = random_codes(rng, 5, 3, 4), random_codes(rng, 5, 700, 4)
    case = {"weights": (1, 2, 4), "query": query, "keys": keys, "k": np.array([4, 0, 700, 9, 1], np.int32)}
    case |= {"lengths": np.array([700, 3, 700, 20, 0], np.int32), "starts": None, "sink": 0, "recent": 0, "wide": True}
    device = simulated.Device()
    for ours, theirs in zip(run_search(case, device), expected_search(case), strict=True):
        assert_same(ours, theirs)
    assert device.kernels.count("score_count") > 1


def test_bounds_in_memory_are_clamped(rng):
    query, keys = random_codes(rng, 4, 3, 4), random_codes(rng, 4, 300, 4)
    lengths, starts = np.array([-5, 10_000, 300, 2**31 - 1]), np.array([0, -(2**31), 10_000, 7])
    case = {"weights": (1, 2, 4), "query": query, "keys": keys, "k": np.array([9, 9, 9, 9]), "wide": False}
    ours = run_search(case | {"lengths": lengths, "starts": starts, "sink": 1, "recent": 1}, simulated.Device())
    clamped = {"lengths": lengths.clip(0, 300), "starts": starts.clip(0, 300), "sink": 1, "recent": 1}
    for got, expected in zip(ours, expected_search(case | clamped), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("far", [2**31, 2**32, 2**32 + 5, 2**63 - 1, -(2**32) + 5, -(2**63)])
def test_bounds_beyond_int32_are_clamped_too(rng, far):
    query, keys = random_codes(rng, 4, 3, 4), random_codes(rng, 4, 300, 4)
    case = {"weights": (1, 2, 4), "query": query, "keys": keys, "sink": 1, "recent": 1, "wide": False}
    rows = {
        "k": np.array([far, 9, 9, 9]),
        "lengths": np.array([300, far, 300, 300]),
        "starts": np.array([0, 0, 0, far]),
    }
    width = 300
    values, indices = empty(4, width), empty(4, width)
    bounds = tensors.Bounds(tensor_or(rows["lengths"]), tensor_or(rows["starts"]), 1, 1)
    tensors.search(
        *(inside(query), inside(keys), tensor_or(rows["k"]), (1, 2, 4), bounds, values, indices),
        run=simulated.Device(),
    )
    clamped = {name: value.clip(0, 300) for name, value in rows.items()}
    scores = reference.score(query, keys, case["weights"])
    expected = simulated.window_topk(scores, clamped["k"], clamped["lengths"], clamped["starts"], 1, 1, width)
    assert_same(values, expected[0])
    assert_same(indices, expected[1])


def test_more_than_the_kernels_can_count_is_refused():
    def launched(*_):
        pytest.fail("nothing may be launched")

    one, far = torch.zeros(1, 1, 4, dtype=torch.int32), 2**30 + 1
    keys, scores = one.expand(1, far, 4), torch.zeros(1, 1, dtype=torch.int32).expand(1, far)
    out = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    words = "on CUDA a row may have at most 1073741824 positions, got 1073741825; split the keys"
    for call in (
        lambda: tensors.search(one, keys, 1, (1,), tensors.Bounds(), *out, run=launched),
        lambda: tensors.score(one, keys, (1,), scores, launched),
        lambda: tensors.score(one, keys, None, scores[:, None], launched),
        lambda: tensors.topk(scores, 1, tensors.Bounds(), *out, run=launched),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    many = [x.expand(2**31, *x.shape[1:]) for x in (one, one, out[0], out[1])]
    words = "on CUDA a call may have fewer than 2147483648 rows, got 2147483648; split the queries"
    with pytest.raises(ValueError, match=words):
        tensors.search(many[0], one, 1, (1,), tensors.Bounds(), *many[2:], run=launched)
    with pytest.raises(ValueError, match=words):
        tensors.group_planes(many[0][:, None, 0, :1], many[2][:, :, None], launched)


@few
@given(
    st.integers(1, 3),
    st.sampled_from(LENGTHS),
    st.sampled_from([1, 60, 5000, 2**31 - 1]),
    st.sampled_from(["int32", "int16", "uint8"]),
    orders(),
    st.integers(0, 99),
)
def test_topk_equals_the_reference(rows, n, spread, dtype, device, seed):
    rng = np.random.default_rng(seed)
    kind = np.iinfo(dtype)
    scores = rng.integers(max(-spread, kind.min), min(spread, kind.max) + 1, (rows, n)).astype(dtype)
    k = rng.integers(0, n + 1, rows).astype(np.int32)
    lengths, starts = rng.integers(0, n + 1, rows).astype(np.int32), rng.integers(0, n // 3 + 1, rows).astype(np.int32)
    width = max(1, int(k.max()))
    values, indices = empty(rows, width), empty(rows, width, dtype=np.int64)
    bounds = tensors.Bounds(torch.from_numpy(lengths), torch.from_numpy(starts), 2, 1)
    tensors.topk(inside(scores), torch.from_numpy(k), bounds, values, indices, device)
    expected = simulated.window_topk(scores.astype(np.int32), k, lengths, starts, 2, 1, width)
    assert_same(values, expected[0])
    assert_same(indices, expected[1])


BROADCASTS = [
    ((2, 3, 5, 2, 4), (2, 3, 1, 33, 4)),
    ((2, 4), (2, 3, 33, 4)),
    ((5, 1, 2, 4), (3, 33, 4)),
    ((2, 1, 3, 1, 2, 2, 4), (1, 2, 1, 2, 1, 33, 4)),  # five dimensions that do not merge
]


@pytest.mark.parametrize(("query", "keys"), BROADCASTS)
def test_leading_dimensions_broadcast(rng, query, keys):
    q, k = random_codes(rng, *query), random_codes(rng, *keys)
    lead = np.broadcast_shapes(query[:-2], keys[:-2])
    expected = reference.score(q, k, (1, 2))
    out = empty(*lead, 33)
    tensors.score(inside(q), inside(k), (1, 2), out, simulated.Device())
    assert_same(out, expected)
    pairs = empty(*lead, query[-2], 33)
    tensors.score(inside(q), inside(k), None, pairs, simulated.Device())
    assert_same(pairs, reference.score(q, k))
    values, indices = empty(*lead, 5), empty(*lead, 5)
    tensors.search(inside(q), inside(k), 5, (1, 2), tensors.Bounds(), values, indices, None, simulated.Device())
    best, at = simulated.window_topk(expected.reshape(-1, 33), 5)
    assert_same(values, best.reshape(*lead, 5))
    assert_same(indices, at.reshape(*lead, 5))


def test_each_query_of_a_search_without_weights_is_a_row(rng):
    query, keys = random_codes(rng, 2, 6, 4), random_codes(rng, 2, 300, 4)
    values, indices = empty(2, 6, 7), empty(2, 6, 7)
    tensors.search(inside(query), inside(keys), 7, None, tensors.Bounds(), values, indices, None, simulated.Device())
    best, at = simulated.window_topk(reference.score(query, keys).reshape(12, 300), 7)
    assert_same(values, best.reshape(2, 6, 7))
    assert_same(indices, at.reshape(2, 6, 7))


def test_strides_and_offsets_do_not_change_the_result(rng):
    codes, query = torch.from_numpy(random_codes(rng, 3, 40, 9)), random_codes(rng, 3, 2, 4)
    cached = torch.from_numpy(random_codes(rng, 3, 64, 4))
    for view in (codes[..., 1:5], codes[:, 3:, :4], codes[:, ::2, 4:8], cached[:, :40], cached[:, 7:], cached[::2]):
        out = empty(*view.shape[:2])
        tensors.score(torch.from_numpy(query[: len(view)]), view, (1, 2), out, simulated.Device())
        assert_same(out, reference.score(query[: len(view)], view.contiguous().numpy(), (1, 2)))


def test_a_cache_that_is_filled_in_part_is_not_copied(rng):
    cache = torch.from_numpy(random_codes(rng, 2, 3, 64, 4))
    view = cache[:, :, :40]
    assert tensors._rows(view).data_ptr() == cache.data_ptr()


def test_scores_beyond_16_bits_are_refused():
    with pytest.raises(ValueError, match=r"must fit 16 bits, got sum\(weights\) \* 32 \* W = 65536; use fewer planes"):
        tensors.workspace(1, 10, 8, (128, 128), torch.device("cpu"))


def test_a_workspace_of_another_search_is_refused(rng):
    scratch = tensors.workspace(1, 300, 4, (1, 2, 4), torch.device("cpu"))
    case = {"weights": (1, 2, 4), "query": random_codes(rng, 2, 3, 4), "keys": random_codes(rng, 2, 300, 4), "k": 3}
    case |= {"lengths": None, "starts": None, "sink": 0, "recent": 0, "wide": False}
    with pytest.raises(ValueError, match="the workspace must hold"):
        run_search(case, simulated.Device(), scratch)
