"""Searches by a shortlist (eq. 20) on CUDA against the reference, under the host simulator: tolerance 0."""

import numpy as np
import pytest
from hashcore import reference
from hashcore.hostsim import guarded
from hashcore_samples import random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the launches are described on torch tensors")
kept = pytest.importorskip("hashcore.cuda.kept", reason="the launches are described on torch tensors")
layout = pytest.importorskip("hashcore.cuda.layout", reason="the launches are described on torch tensors")
operands = pytest.importorskip("hashcore.cuda.operands", reason="the launches are described on torch tensors")
tensors = pytest.importorskip("hashcore.cuda.tensors", reason="the launches are described on torch tensors")
simulated = pytest.importorskip("simulated", reason="g++ is needed")

LAUNCHES = ["first_floor", "list_shortlist", "select_32"]
LENGTHS = [100, 2047, 2048, 2049, 3000, 4097, 9001]  # around the shortest row that has a list, and turns of a warp
# Words and weights: 1 to 8 planes of 128 bits; 32 bits; two and four lanes a key; weights of no pattern.
SCORES = [
    *((4, tuple(1 << p for p in range(planes))) for planes in (1, 3, 4, 5, 6, 8)),
    *((1, (1, 2, 4)), (3, (5, 1)), (4, (3, 1, 9, 2, 7)), (8, (1, 2, 4, 8, 16)), (9, (1, 2)), (16, (1, 2, 4))),
]


def first_words(keys: np.ndarray, how: str):
    """First words side by side between guard pages, one in three words, or none."""
    if how == "none":
        return None
    if how == "dense":
        return simulated.inside(keys[..., 0], 4)
    return simulated.inside(np.repeat(keys[..., 0], 3, axis=-1), 4)[..., ::3]


def run(case, device, scratch=None):
    """Search rows of query [..., P, W] and keys [..., N, W]."""
    rows = np.broadcast_shapes(case["query"].shape[:-2], case["keys"].shape[:-2])
    width = max(1, int(np.max(case["k"])))
    values = simulated.empty(*rows, width)
    indices = simulated.empty(*rows, width, dtype=np.int64 if case.get("wide") else np.int32)
    options = case.get("ranges", {})
    bounds = operands.Bounds(
        *(simulated.tensor_or(options.get(name)) for name in ("lengths", "starts")),
        *(options.get(name, 0) for name in ("sink", "recent")),
    )
    codes = simulated.inside(case["query"]), simulated.inside(case["keys"])
    how = {"shortlist": case["times"], "first": first_words(case["keys"], case.get("first", "none"))}
    k = simulated.tensor_or(case["k"])
    tensors.search(*codes, k, case["weights"], bounds, values, indices, scratch, device, **how)
    return values, indices


def assert_as_reference(case, device, scratch=None) -> None:
    ranges = {name: value for name, value in case.get("ranges", {}).items() if value is not None}
    k = case["k"] if isinstance(case["k"], np.ndarray) else int(case["k"])
    codes = case["query"], case["keys"], k, case["weights"]
    expected = reference.search(*codes, order="index", shortlist=case["times"], **ranges)
    for ours, theirs in zip(run(case, device, scratch), expected, strict=True):
        found = theirs.shape[-1]  # a row of which none is wanted still has a slot
        simulated.assert_same(ours[..., :found], theirs)


@st.composite
def searches(draw, of_query=(3,), of_keys=(3,)):
    """A search of random codes, or of first words that say little, or of few distinct ones."""
    (words, weights), n = draw(st.sampled_from(SCORES)), draw(st.sampled_from(LENGTHS))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    query = random_codes(rng, *of_query, len(weights), words)
    keys = random_codes(rng, *of_keys, n, words)
    few = draw(st.sampled_from(["all", "bits", "keys"]))
    if few == "bits":
        query, keys = query & 3, keys & 3
    if few == "keys":
        keys = keys[..., rng.integers(0, 40, n), :]
    rows = np.broadcast_shapes(of_query, of_keys)
    kind = draw(st.sampled_from([np.int32, np.int64]))
    lengths = rng.integers(n // 2, n + 1, rows).astype(kind)
    ranges = {"lengths": lengths, "starts": rng.integers(0, lengths // 4 + 1).astype(kind)}
    ragged = rng.integers(0, max(2, n // 30), rows).astype(kind)
    return {
        "query": query,
        "keys": keys,
        "weights": weights,
        "k": draw(st.sampled_from([1, n // 50, n // 9, ragged])),
        "times": draw(st.sampled_from([1, 2, 6, 1024])),
        "first": draw(st.sampled_from(["none", "dense", "apart"])),
        "ranges": draw(st.sampled_from([{}, ranges])) | {"sink": draw(st.integers(0, 2)), "recent": 1},
        "wide": draw(st.booleans()),
    }


@st.composite
def orders(draw):
    return simulated.Device(draw(st.sampled_from(simulated.ORDERS)), draw(st.integers(1, 4)))


@settings(deadline=None, max_examples=25)
@given(searches(), orders())
def test_a_shortlist_equals_the_reference(case, device):
    assert_as_reference(case, device)


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(searches(of_query=(2, 9), of_keys=(2, 1)), orders())
def test_rows_over_shared_keys_equal_the_reference(case, device):
    assert_as_reference(case, device)


@pytest.mark.parametrize("first", ["none", "dense", "apart"])
@pytest.mark.parametrize("order", simulated.ORDERS)
def test_a_search_by_a_shortlist_is_three_launches(rng, order, first):
    case = {"query": random_codes(rng, 2, 6, 4), "keys": random_codes(rng, 2, 5000, 4), "k": 100, "times": 5}
    case |= {"weights": (1, 2, 4, 8, 16, 32), "first": first}
    device = simulated.Device(order)
    assert_as_reference(case, device)
    assert device.kernels == LAUNCHES


def test_what_the_host_sees_to_have_no_list_is_searched_as_ever(rng):
    query, keys = random_codes(rng, 2, 3, 4), random_codes(rng, 2, 2048, 4)
    case = {"query": query, "keys": keys, "weights": (1, 2, 4), "first": "dense"}
    for n, k, times, kernels in (
        (2047, 10, 6, ["list_candidates", "select_32"]),
        (2048, 512, 4, ["list_candidates", "select_32"]),
        (2048, 511, 4, LAUNCHES),
        (2048, np.array([600, 2]), 4, LAUNCHES),  # not seen
    ):
        device = simulated.Device()
        assert_as_reference(case | {"keys": keys[:, :n], "k": k, "times": times}, device)
        assert device.kernels == kernels


@pytest.mark.parametrize("order", simulated.ORDERS)
@pytest.mark.parametrize("queries", [1, 9])
def test_a_list_that_misleads_is_left(rng, order, queries):
    """Where the sample says that others are best, fewer than k keys are on the list: then all keys are searched."""
    query = np.zeros((1, queries, 1, 4), np.int32)
    keys = random_codes(rng, 1, 1, 4096, 4)
    keys[..., ::4, 0] = 0  # all that the sample sees match the query's first word
    keys[..., 4:, 0] = np.where(np.arange(4, 4096) % 4 > 0, -1, keys[..., 4:, 0])
    for k, times in ((1100, 1), (1030, 3), (700, 2), (5, 1)):
        case = {"query": query, "keys": keys, "weights": (1,), "k": k, "times": times}
        assert_as_reference(case, simulated.Device(order))


@pytest.mark.parametrize("order", simulated.ORDERS)
@pytest.mark.parametrize("queries", [1, 9])
def test_a_floor_that_is_too_high_is_left(rng, order, queries):
    """The keys of the sample are better in full than most of the k best: what was left out is scored again.

    Only what is on the list may come back: every second key scores higher in full, and is not on it.
    """
    query = np.zeros((1, queries, 1, 4), np.int32)
    keys = random_codes(rng, 1, 1, 8192, 4)
    off = np.arange(8192) % 2 > 0
    keys[..., off, 0], keys[..., off, 1:] = -1, 0
    keys[..., ~off, 0] &= 0x1111
    keys[..., ::8, 1:] = 0  # the sample
    for k in (500, 1500, 4000):
        case = {"query": query, "keys": keys, "weights": (1,), "k": k, "times": 2, "first": "dense"}
        assert_as_reference(case, simulated.Device(order))


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_the_split_does_not_change_the_result(rng, splits, monkeypatch):
    monkeypatch.setattr(tensors, "SIMULATED_SMS", 2 * splits)  # two rows
    monkeypatch.setattr(tensors, "_searches", kept.Table())
    case = {"query": random_codes(rng, 2, 5, 4), "keys": random_codes(rng, 2, 20_000, 4) & 0x1111, "k": 700}
    case |= {"weights": (1, 2, 4, 8, 16), "times": 6, "first": "dense", "ranges": {"sink": 3}}
    assert_as_reference(case, simulated.Device(order=11))


@pytest.mark.parametrize("rows", [(5,), (2, 11)])
def test_rows_beyond_the_workspace_are_searched_in_turns(rng, monkeypatch, rows):
    monkeypatch.setattr("hashcore.cuda.layout.MAX_WORKSPACE", 4 * 3000 * 8)
    monkeypatch.setattr(tensors, "_searches", kept.Table())
    monkeypatch.setattr(kept, "_lanes", kept.Table())
    own = rows if len(rows) == 1 else (2, 1)
    case = {"query": random_codes(rng, *rows, 3, 4), "keys": random_codes(rng, *own, 3000, 4), "times": 3}
    case |= {"weights": (1, 2, 4), "k": rng.integers(0, 90, rows), "first": "dense"}
    device = simulated.Device()
    monkeypatch.setattr("hashcore.cuda.layout.MAX_SLOTS", 8 if len(rows) > 1 else 2)
    assert_as_reference(case, device)
    assert device.kernels.count("first_floor") == (3 if len(rows) == 1 else 4)


@pytest.mark.parametrize("queries", [2, 11])
def test_each_query_of_a_search_without_weights_is_a_row(rng, queries):
    query, keys = random_codes(rng, 2, queries, 4), random_codes(rng, 2, 3000, 4)
    for first in ("none", "dense"):
        values, indices = simulated.empty(2, queries, 7), simulated.empty(2, queries, 7)
        codes = simulated.inside(query), simulated.inside(keys)
        how = {"run": simulated.Device(), "shortlist": 3, "first": first_words(keys, first)}
        tensors.search(*codes, 7, None, operands.Bounds(), values, indices, **how)
        expected = reference.search(query, keys, 7, order="index", shortlist=3)
        for ours, theirs in zip((values, indices), expected, strict=True):
            simulated.assert_same(ours, theirs)


@pytest.mark.parametrize("queries", [1, 9])
def test_a_workspace_serves_searches_with_and_without_a_list(rng, queries):
    """What a search leaves behind changes no later one, and the samples stay zero."""
    query, keys = random_codes(rng, 1, queries, 3, 4), random_codes(rng, 1, 1, 5000, 4)
    made = tensors.workspace(queries, 5000, 4, (1, 2, 4), torch.device("cpu"))
    scratch = torch.from_numpy(guarded(made.numpy()))
    case = {"query": query, "keys": keys, "weights": (1, 2, 4), "k": 80}
    for times in (4, 0, 7, 4):
        assert_as_reference(case | {"times": times}, simulated.Device(), scratch)
        assert not scratch[: layout.SAMPLES].any()


def test_lists_of_other_lengths_do_not_share_launches(rng):
    """Also where first words are given or not, and lie elsewhere, from call to call."""
    case = {"query": random_codes(rng, 1, 3, 4), "keys": random_codes(rng, 1, 3000, 4) & 7, "weights": (1, 2, 4)}
    for times in (2, 0, 3, 2):
        for first in ("none", "dense", "apart", "dense"):
            assert_as_reference(case | {"k": 50, "times": times, "first": first}, simulated.Device())


def test_strides_and_offsets_do_not_change_the_result(rng):
    wide, query = torch.from_numpy(random_codes(rng, 3, 3000, 9)), random_codes(rng, 3, 2, 4)
    for view in (wide[..., 1:5], wide[:, 7:, 4:8], wide.transpose(0, 1)[:2900].transpose(0, 1)[..., :4]):
        for first in (None, view[..., 0], view[..., 0].contiguous()):
            values, indices = simulated.empty(3, 20), simulated.empty(3, 20)
            how = {"run": simulated.Device(), "shortlist": 4, "first": first}
            tensors.search(torch.from_numpy(query), view, 20, (1, 2), operands.Bounds(), values, indices, **how)
            expected = reference.search(query, view.contiguous().numpy(), 20, (1, 2), order="index", shortlist=4)
            for ours, theirs in zip((values, indices), expected, strict=True):
                simulated.assert_same(ours, theirs)


def test_first_words_of_other_keys_harm_no_memory(rng):
    """Nothing checks what they hold: the result is then no search, but slots hold keys of the row, or nothing."""
    case = {"query": random_codes(rng, 1, 3, 4), "keys": random_codes(rng, 1, 3000, 4), "weights": (1, 2, 4)}
    values, indices = simulated.empty(1, 60), simulated.empty(1, 60)
    codes = simulated.inside(case["query"]), simulated.inside(case["keys"])
    for wrong in (case["keys"][..., 1], case["keys"][..., 0] ^ -1, np.zeros((1, 3000), np.int32)):
        how = {"run": simulated.Device(), "shortlist": 2, "first": simulated.inside(wrong, 4)}
        tensors.search(*codes, 60, (1, 2, 4), operands.Bounds(), values, indices, **how)
        assert ((indices >= 0) & (indices < 3000)).all()
        assert (indices.diff(dim=-1) > 0).all()
