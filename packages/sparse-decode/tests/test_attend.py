"""The gathered attention against its reference, and what it must not read."""

import numba
import numpy as np
import pytest
import torch
from hashcore.cpu import threads
from sparse_decode import attend, attend_reference
from sparse_decode.cpu import softmax
from sparse_decode.cpu.attend_kernels import TILE
from sparse_decode.cpu.lanes import LANES
from sparse_decode_doubles import as_sets, masked_attention

# Parts of kernels cannot be called from Python.
exponentials = numba.njit(lambda *x: softmax.exponentials(*x))
greatest = numba.njit(lambda *x: softmax.greatest(*x))

# batch, query heads, KV heads, rows, N, D, Dv, most selected
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1, 1),
    (2, 6, 2, 3, 37, 16, 16, 9),
    (1, 7, 1, 2, 64, 33, 20, 64),
    (3, 8, 8, 1, 5, 64, 64, 5),
    (2, 5, 1, 3, 70, 96, 40, 33),
    (1, 16, 1, 1, 50, 80, 104, 17),
    (1, 3, 1, 1, 40, 136, 512, 33),
]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def case(shape, dtype=torch.float32, per_query_head=False, seed=0):
    batch, hq, hkv, rows, n, dim, dim_v, most = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, hq, rows, dim, generator=generator).to(dtype)
    k = torch.randn(batch, hkv, n, dim, generator=generator).to(dtype)
    v = torch.randn(batch, hkv, n, dim_v, generator=generator).to(dtype)
    sets = hq if per_query_head else hkv
    best = torch.rand(batch, sets, rows, n, generator=generator).topk(most, -1).indices
    counts = torch.randint(0, most + 1, (batch, sets, rows, 1), generator=generator)
    kept = best.masked_fill(torch.arange(most) >= counts, n).sort(-1).values
    return q, k, v, kept.masked_fill(kept == n, -1)


def logits_options(capped, sunk, hq):
    """Soft-capping tight enough to bend the logits, and sinks from negligible to greater than any of them."""
    return {"softcap": 0.5 if capped else None, "sinks": torch.linspace(-4, 4, hq) if sunk else None}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("capped", "sunk"), [(False, False), (True, False), (False, True), (True, True)])
def test_equals_the_reference_and_dense_attention_restricted_to_the_selection(
    capped, sunk, shape, per_query_head, dtype
):
    q, k, v, indices = case(shape, dtype, per_query_head)
    options = logits_options(capped, sunk, shape[1])
    out = attend(q, k, v, indices, 0.3, **options)
    assert out.dtype == dtype
    close = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(out, attend_reference(q, k, v, indices, 0.3, **options), **close)
    torch.testing.assert_close(out, masked_attention(q, k, v, as_sets(indices, k.shape[2]), 0.3, **options), **close)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_head_that_is_not_finite_leaves_those_beside_it_alone(bad):
    q, k, v, indices = case((1, 6, 1, 2, 40, 16, 16, 20))
    indices = torch.arange(20).expand(1, 1, 2, 20)
    expected = attend_reference(q[:, 1:], k, v, indices, 0.3)
    q[:, 0, :, 3] = bad
    found = attend(q, k, v, indices, 0.3)
    assert found[:, :, 0].isnan().all()
    torch.testing.assert_close(found[:, :, 1:], expected, atol=1e-5, rtol=1e-4)


def test_an_infinite_value_is_infinite_in_the_sum_whatever_its_place():
    q, k, v, _ = case((1, 2, 1, 1, 40, 16, 16, 1))
    for count in (5, 16, 20, 33):
        for place in range(count):
            indices = torch.arange(count).expand(1, 1, 1, count)
            bad = v.clone()
            bad[0, 0, place, 3] = torch.inf
            found = attend(q, k, bad, indices, 0.3)
            assert (found[..., 3] == torch.inf).all()
            assert found[..., :3].isfinite().all()


@pytest.mark.parametrize("count", [1, 3, TILE - 1, TILE, TILE + 1, 3 * TILE])
@pytest.mark.parametrize("heads", range(1, 10))
def test_heads_and_tokens_that_fill_no_tile_are_as_in_the_reference(heads, count):
    q, k, v, _ = case((1, heads, 1, 2, 64, 40, 24, 1), seed=count)
    indices = torch.rand(1, 1, 2, 64).topk(count, -1).indices
    torch.testing.assert_close(
        attend(q, k, v, indices, 0.3), attend_reference(q, k, v, indices, 0.3), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("capped", "sunk"), [(True, False), (False, True)])
def test_soft_capping_and_sinks_change_the_result(capped, sunk):
    q, k, v, indices = case(SHAPES[1])
    changed = attend(q, k, v, indices, 0.3, **logits_options(capped, sunk, 6)) - attend(q, k, v, indices, 0.3)
    assert changed.abs().max() > 0.1


def test_sinks_far_above_and_below_the_logits_are_limits():
    q, k, v, indices = case(SHAPES[1])
    below, above = (attend(q, k, v, indices, 0.3, sinks=torch.full((6,), size)) for size in (-1e30, 1e30))
    assert torch.equal(below, attend(q, k, v, indices, 0.3))
    assert (above == 0).all()


def test_unselected_keys_and_values_are_never_read():
    q, k, v, indices = case(SHAPES[1])
    unused = ~as_sets(indices, k.shape[2]).any(2)[..., None]
    assert unused.any()
    poisoned = attend(q, k.masked_fill(unused, torch.nan), v.masked_fill(unused, torch.nan), indices, 0.3)
    assert torch.equal(poisoned, attend(q, k, v, indices, 0.3))


def test_a_selected_nan_is_not_hidden():
    q, k, v, _ = case(SHAPES[1])
    k[0, 0, 3] = torch.nan
    out = attend(q, k, v, torch.full((2, 2, 3, 1), 3), 0.3)
    assert out[0, :, :3].isnan().all()
    assert not out[1].isnan().any()


def test_unused_slots_may_be_anywhere_and_rows_without_tokens_are_zero():
    q, k, v, _ = case(SHAPES[1])
    tight = torch.tensor([4, 9]).expand(2, 2, 3, 2)
    loose = torch.tensor([-1, 4, -1, 9, -1]).expand(2, 2, 3, 5)
    assert torch.equal(attend(q, k, v, tight, 0.3), attend(q, k, v, loose, 0.3))
    assert (attend(q, k, v, torch.full((2, 2, 3, 4), -1), 0.3) == 0).all()
    assert attend(q, k, v, loose[..., :0], 0.3).shape == (2, 3, 6, 16)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_strided_keys_and_values_are_read_in_place(dtype):
    q, k, v, indices = case(SHAPES[1], dtype)
    expected = attend(q, k, v, indices, 0.3)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    assert torch.equal(attend(q, *by_token, indices, 0.3), expected)
    cropped = [torch.cat([x, x], dim=2)[:, :, : x.shape[2]] for x in (k, v)]
    assert torch.equal(attend(q, *cropped, indices, 0.3), expected)
    one_head = [x[:, :1].expand(-1, 2, -1, -1) for x in (k, v)]
    torch.testing.assert_close(
        attend(q, *one_head, indices, 0.3),
        attend_reference(q, *one_head, indices, 0.3),
        atol=TOLERANCES[dtype],
        rtol=TOLERANCES[dtype],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_sixteen_bit_number_is_read_exactly(dtype):
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(1, 1, -1, 1)
    finite = values.isfinite().flatten()
    q = torch.ones(1, 1, len(values.flatten()), 1, dtype=dtype)
    each = torch.arange(q.shape[2]).view(1, 1, -1, 1)
    out = attend(q, torch.zeros_like(values), values, each, 1.0).view(-1)
    assert torch.equal(out[finite], values.view(-1)[finite])
    assert torch.equal(out[~finite].isnan(), values.view(-1)[~finite].isnan())


def test_the_exponential_is_that_of_the_library():
    x = np.concatenate([np.linspace(-87, 0, 20_001), [-88, -1e30, -np.inf]]).astype(np.float32) + np.float32(3)
    x.resize(-(-x.size // LANES) * LANES)  # with zeros
    expected, found = np.exp((x - np.float32(3)).astype(np.float64)), x.copy()
    total = exponentials(found, 0, x.size, np.float32(3))
    assert np.abs(found[:20_001] / expected[:20_001] - 1).max() < 2e-7
    assert (found[20_001:20_004] == 0).all()
    assert abs(total / expected.sum() - 1) < 1e-6
    found[:LANES] = np.nan
    assert np.isnan(exponentials(found, 0, LANES, np.float32(0)))
    assert np.isnan(found[:LANES]).all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3e38, 1e10, 100, 88.8, -np.inf, -3e38, -1e10])
def test_the_exponential_of_any_number_is_defined(odd):
    for at in range(LANES):
        found = np.linspace(-5, 0, LANES, dtype=np.float32)
        found[at] = odd
        with np.errstate(over="ignore"):
            expected = np.exp(found)
        total = exponentials(found, 0, LANES, np.float32(0))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)


@pytest.mark.parametrize("at", range(LANES))
def test_the_greatest_number_is_found_in_each_lane_and_nan_is_kept(at):
    x = np.full(3 * LANES, -np.inf, np.float32)
    assert greatest(x, 0, len(x)) == -np.inf
    x[LANES + at] = -5
    assert greatest(x, 0, len(x)) == -5
    assert greatest(x, 2 * LANES, LANES) == -np.inf
    x[at] = np.nan
    assert np.isnan(greatest(x, 0, len(x)))


@pytest.mark.usefixtures("real_threads")
def test_threads_change_nothing(monkeypatch):
    """Many times: where memory lies differs from thread to thread and from call to call, and must not matter."""
    q, k, v, indices = case((2, 6, 2, 9, 200, 16, 48, 64))
    options = logits_options(True, True, 6)
    serial = attend(q, k, v, indices, 0.3, **options)
    monkeypatch.setattr(threads, "TEAM_GRAIN", 1)
    for _ in range(100):
        assert torch.equal(attend(q, k, v, indices, 0.3, **options), serial)


def test_a_backward_pass_is_refused():
    q, k, v, indices = case(SHAPES[1])
    with torch.enable_grad():
        out = attend(q.requires_grad_(), k, v, indices, 0.3)
        with pytest.raises(RuntimeError, match="no backward"):
            out.sum().backward()


def test_wrong_arguments_are_named():
    q, k, v, indices = case(SHAPES[1])
    for arguments, message in [
        ((q.double(), k, v, indices), "float32, bfloat16 or float16, got torch.float64"),
        ((q, k.half(), v, indices), "got torch.float32, torch.float16"),
        ((q[:, :5], k, v, indices), "must agree"),
        ((q, k, v[:, :, :5], indices), "must agree"),
        ((q, k, v, indices.int()), "indices must be int64"),
        ((q, k, v, indices[:, :, :2]), "indices must be int64"),
        ((q, k, v, indices[:, :1]), "indices must be int64"),
        ((q, k, v, indices.clamp(min=37)), "indices must be below N = 37, got 37"),
        ((q, k, v.transpose(2, 3).contiguous().transpose(2, 3), indices), "must be contiguous"),
        ((q.to("meta"), k, v, indices), "runs on the CPU"),
    ]:
        with pytest.raises(ValueError, match=message):
            attend(*arguments, 0.3)
    with pytest.raises(ValueError, match="softcap must be above 0 or None, got 0"):
        attend(q, k, v, indices, 0.3, softcap=0.0)
    with pytest.raises(ValueError, match=r"sinks must be one logit per query head, shape \(6,\), got \(2,\)"):
        attend(q, k, v, indices, 0.3, sinks=torch.zeros(2))
