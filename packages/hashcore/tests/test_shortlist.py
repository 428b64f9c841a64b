"""Searches by a shortlist (eq. 20) on CUDA against the reference, under the host simulator: tolerance 0."""

import numpy as np
import pytest
from hashcore import reference
from hashcore_samples import random_codes
from hypothesis import given, settings
from hypothesis import strategies as st

simulated = pytest.importorskip("simulated", reason="needs torch and g++")
from hashcore.cuda import kept, layout, operands, tensor_search, tensors  # noqa: E402

torch = simulated.torch

LAUNCHES = ["first_floor", "list_shortlist", "select_32"]
LENGTHS = [100, 2047, 2048, 2049, 3000, 4097, 9001]  # around the shortest row that has a list, and turns of a warp
# Words and weights: 1 to 8 planes of 128 bits; 32 bits; two and four lanes a key; weights of no pattern.
SCORES = [
    *((4, tuple(1 << p for p in range(planes))) for planes in (1, 3, 4, 5, 6, 8)),
    *((1, (1, 2, 4)), (3, (5, 1)), (4, (3, 1, 9, 2, 7)), (8, (1, 2, 4, 8, 16)), (9, (1, 2)), (16, (1, 2, 4))),
]


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
        "wide": draw(st.booleans()),
        "sink": draw(st.integers(0, 2)),
        "recent": 1,
        **draw(st.sampled_from([{}, ranges])),
    }


@settings(deadline=None, max_examples=25)
@given(searches(), simulated.orders())
def test_a_shortlist_equals_the_reference(case, device):
    simulated.assert_finds(device, **case)


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(searches(of_query=(2, 9), of_keys=(2, 1)), simulated.orders())
def test_rows_over_shared_keys_equal_the_reference(case, device):
    simulated.assert_finds(device, **case)


@pytest.mark.parametrize("first", ["none", "dense", "apart"])
@pytest.mark.parametrize("order", simulated.ORDERS)
def test_a_search_by_a_shortlist_is_three_launches(rng, order, first):
    case = {"query": random_codes(rng, 2, 6, 4), "keys": random_codes(rng, 2, 5000, 4), "k": 100, "times": 5}
    case |= {"weights": (1, 2, 4, 8, 16, 32), "first": first}
    device = simulated.Device(order)
    simulated.assert_finds(device, **case)
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
        simulated.assert_finds(device, **case | {"keys": keys[:, :n], "k": k, "times": times})
        assert device.kernels == kernels


@pytest.mark.sample(2)
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
        simulated.assert_finds(simulated.Device(order), **case)


@pytest.mark.sample(1)
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
        simulated.assert_finds(simulated.Device(order), **case)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_the_split_does_not_change_the_result(rng, splits, monkeypatch):
    monkeypatch.setattr(tensors, "SIMULATED_SMS", 2 * splits)  # two rows
    monkeypatch.setattr(tensor_search, "_searches", kept.Table())
    case = {"query": random_codes(rng, 2, 5, 4), "keys": random_codes(rng, 2, 20_000, 4) & 0x1111, "k": 700}
    case |= {"weights": (1, 2, 4, 8, 16), "times": 6, "first": "dense", "sink": 3}
    simulated.assert_finds(simulated.Device(order=11), **case)


@pytest.mark.parametrize("rows", [(5,), (2, 11)])
def test_rows_beyond_the_workspace_are_searched_in_turns(rng, monkeypatch, rows):
    monkeypatch.setattr("hashcore.cuda.layout.MAX_WORKSPACE", 4 * 3000 * 8)
    monkeypatch.setattr(tensor_search, "_searches", kept.Table())
    monkeypatch.setattr(kept, "_lanes", kept.Table())
    own = rows if len(rows) == 1 else (2, 1)
    case = {"query": random_codes(rng, *rows, 3, 4), "keys": random_codes(rng, *own, 3000, 4), "times": 3}
    case |= {"weights": (1, 2, 4), "k": rng.integers(0, 90, rows), "first": "dense"}
    device = simulated.Device()
    monkeypatch.setattr("hashcore.cuda.layout.MAX_SLOTS", 8 if len(rows) > 1 else 2)
    simulated.assert_finds(device, **case)
    assert device.kernels.count("first_floor") == (3 if len(rows) == 1 else 4)


@pytest.mark.parametrize("queries", [2, 11])
def test_each_query_of_a_search_without_weights_is_a_row(rng, queries):
    query, keys = random_codes(rng, 2, queries, 4), random_codes(rng, 2, 3000, 4)
    for first in ("none", "dense"):
        simulated.assert_finds(simulated.Device(), query, keys, 7, None, 3, first)


@pytest.mark.parametrize("queries", [1, 9])
def test_a_workspace_serves_searches_with_and_without_a_list(rng, queries, monkeypatch):
    """What a search leaves behind changes no later one, and the samples stay zero."""
    query, keys = random_codes(rng, 1, queries, 3, 4), random_codes(rng, 1, 1, 5000, 4)
    scratch = simulated.Scratch()
    monkeypatch.setattr(kept, "scratch", scratch)
    case = {"query": query, "keys": keys, "weights": (1, 2, 4), "k": 80}
    for times in (4, 0, 7, 4):
        simulated.assert_finds(simulated.Device(), **case | {"times": times})
        assert not scratch.tensor[: layout.SAMPLES].any()


def test_lists_of_other_lengths_do_not_share_launches(rng):
    """Also where first words are given or not, and lie elsewhere, from call to call."""
    case = {"query": random_codes(rng, 1, 3, 4), "keys": random_codes(rng, 1, 3000, 4) & 7, "weights": (1, 2, 4)}
    for times in (2, 0, 3, 2):
        for first in ("none", "dense", "apart", "dense"):
            simulated.assert_finds(simulated.Device(), **case | {"k": 50, "times": times, "first": first})


def test_strides_and_offsets_do_not_change_the_result(rng):
    wide, query = torch.from_numpy(random_codes(rng, 3, 3000, 9)), random_codes(rng, 3, 2, 4)
    for view in (wide[..., 1:5], wide[:, 7:, 4:8], wide.transpose(0, 1)[:2900].transpose(0, 1)[..., :4]):
        for first in (None, view[..., 0], view[..., 0].contiguous()):
            values, indices = simulated.empty(3, 20), simulated.empty(3, 20)
            how = {"run": simulated.Device(), "shortlist": 4, "first": first}
            tensor_search.search(torch.from_numpy(query), view, 20, (1, 2), operands.Bounds(), values, indices, **how)
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
        tensor_search.search(*codes, 60, (1, 2, 4), operands.Bounds(), values, indices, **how)
        assert ((indices >= 0) & (indices < 3000)).all()
        assert (indices.diff(dim=-1) > 0).all()
