"""Tensors give the results of numpy arrays, for every dtype and stride."""

import hashcore
import numpy as np
import pytest
from hashcore_samples import assert_same, random_codes

torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")

# Integers, or floats that went through the same operations: tolerance 0 everywhere.


def test_every_function_returns_tensors_equal_to_numpy(rng, place):
    w, codes = rng.normal(size=(2, 5, 64)).astype(np.float32), random_codes(rng, 2, 5, 2)
    scores, k = rng.integers(-9, 9, (3, 70)).astype(np.int16), np.array([3, 0, 70])
    tw, tcodes, tscores, tk = (torch.from_numpy(x.copy()) for x in (w, codes, scores, k))
    assert_same(hashcore.pack(tw), hashcore.pack(w))
    assert_same(hashcore.unpack(tcodes), hashcore.unpack(codes))
    assert_same(hashcore.quantise(tw, 2), hashcore.quantise(w, 2))
    assert_same(hashcore.quantise(tw, 8), hashcore.quantise(w, 8))
    planes, weights = hashcore.planes(tw)
    assert_same(planes, hashcore.planes(w)[0])
    assert weights == (1, 2, 4)
    merged, weights = hashcore.group_planes(tcodes)
    assert_same(merged, hashcore.group_planes(codes)[0])
    assert weights == (1, 2, 2)
    assert_same(hashcore.score(tcodes, tcodes), hashcore.score(codes, codes))
    assert_same(hashcore.score(merged, tcodes, weights), hashcore.score(merged.numpy(), codes, weights))
    for size in (4, (tk, k)):
        ours, theirs = size if isinstance(size, tuple) else (size, size)
        assert_same(hashcore.topk(tscores, ours), hashcore.topk(scores, theirs))
    found = (
        hashcore.pack(tw),
        hashcore.unpack(tcodes),
        planes,
        merged,
        *hashcore.quantise(tw),
        *hashcore.topk(tscores, 4),
    )
    assert {type(x) for x in (*found, *hashcore.search(tcodes, tcodes, 1))} == {torch.Tensor}
    if place:
        expected = ["pack_f32", "levels_f32", "levels_f32", "planes_f32", "group_planes", "score_all", "score_all"]
        assert place.kernels[: len(expected)] == expected


@pytest.mark.parametrize("order", ["best", "index"])
def test_search_and_ranges_return_tensors_equal_to_numpy(rng, order, place):
    query, keys = random_codes(rng, 2, 3, 4), random_codes(rng, 2, 90, 4)
    lengths, k = np.array([[90], [40]]), np.array([7, 0, 50])
    arguments = [torch.from_numpy(x.copy()) for x in (query, keys, k, lengths)]
    for weights in (None, (1, 2, 4)):
        rows = slice(None) if weights is None else (..., 0)
        ranges = dict(lengths=lengths[rows], starts=3, recent=2)
        theirs = hashcore.search(query, keys, 7 if weights else k, weights, order=order, **ranges)
        ranges["lengths"] = arguments[3][rows]
        ours = hashcore.search(*arguments[:2], 7 if weights else arguments[2], weights, order=order, **ranges)
        assert_same(ours, theirs)


def test_results_go_to_the_given_tensors(rng):
    codes = torch.from_numpy(random_codes(rng, 3, 4))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed, scores = torch.empty(3, 4, dtype=torch.int32), torch.empty(3, 9, dtype=torch.int32)[:, 2:5]
    assert hashcore.pack(x, out=packed) is packed
    assert torch.equal(packed, hashcore.pack(x))
    assert hashcore.score(codes, codes, out=scores) is scores
    assert torch.equal(scores, hashcore.score(codes, codes))
    pair = torch.empty(3, 2, dtype=torch.int32), torch.empty(3, 2, dtype=torch.int32)
    assert hashcore.topk(scores, 2, out=pair) is pair
    assert torch.equal(pair[1], hashcore.topk(scores, 2)[1].int())
    assert hashcore.search(codes, codes, 2, out=pair) is pair
    assert torch.equal(pair[1], hashcore.search(codes, codes, 2)[1].int())


def test_an_expanded_tensor_cannot_take_a_result(rng):
    codes = torch.from_numpy(random_codes(rng, 3, 4))
    with pytest.raises(ValueError, match="elements of out must not share memory"):
        hashcore.score(codes, codes, out=torch.zeros(3, 1, dtype=torch.int32).expand(3, 3))


def test_a_tensor_does_not_take_a_numpy_result(rng):
    codes = random_codes(rng, 3, 4)
    with pytest.raises(TypeError, match="not mixed, got query: ndarray, keys: ndarray, out: Tensor"):
        hashcore.score(codes, codes, out=torch.zeros(3, 3, dtype=torch.int32))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "bool", "int8", "int64", "uint8"])
def test_every_dtype_packs_its_signs(dtype):
    x = torch.tensor([-2.0, -0.0, 0.0, 1.0, 3.0, -1.0, 0.25, 2.0] * 8).to(getattr(torch, dtype))
    assert hashcore.unpack(hashcore.pack(x)).tolist() == (x > 0).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_negative_zero_nan_and_subnormals_pack_by_their_sign(dtype):
    tiny = torch.finfo(getattr(torch, dtype)).smallest_normal / 2
    x = torch.tensor([-0.0, float("nan"), tiny, -tiny] * 8, dtype=torch.float64).to(getattr(torch, dtype))
    assert hashcore.unpack(hashcore.pack(x)).tolist() == [False, False, True, False] * 8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_weights_quantise_as_their_float32_values(dtype):
    w = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    for half, full in zip(hashcore.quantise(w), hashcore.quantise(w.float()), strict=True):
        assert_same(half, full.numpy())


def test_expanded_and_transposed_tensors_equal_their_copies(rng):
    keys = torch.from_numpy(random_codes(rng, 1, 33, 2))
    query = torch.from_numpy(random_codes(rng, 6, 2, 4))
    wide = keys.expand(4, 33, 2)
    assert_same(
        hashcore.score(query.permute(2, 0, 1), wide),
        hashcore.score(query.permute(2, 0, 1).contiguous(), wide.contiguous()).numpy(),
    )
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    for view in (x.T, x.T.bfloat16(), x[:, :1].T.expand(5, 64)):
        assert_same(hashcore.pack(view), hashcore.pack(view.contiguous()).numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_require_grad_are_read_as_values(dtype):
    w = torch.nn.Parameter(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)))
    assert_same(hashcore.pack(w), hashcore.pack(w.detach()).numpy())
    codes, _ = hashcore.planes(w)
    assert not codes.requires_grad
    assert w.grad is None
    assert w.requires_grad


def test_tensors_are_not_modified(rng):
    codes = torch.from_numpy(random_codes(rng, 5, 4))
    before = codes.clone()
    hashcore.group_planes(codes), hashcore.score(codes, codes), hashcore.topk(codes % 7, 2), hashcore.unpack(codes)
    assert torch.equal(codes, before)


def test_mixing_kinds_is_refused(rng):
    codes = random_codes(rng, 3, 4)
    with pytest.raises(TypeError, match="not mixed, got query: ndarray, keys: Tensor; convert them to one kind"):
        hashcore.score(codes, torch.from_numpy(codes))
    with pytest.raises(TypeError, match="not mixed, got scores: Tensor, k: ndarray"):
        hashcore.topk(torch.zeros(2, 5, dtype=torch.int32), np.array([1, 2]))


def test_a_sparse_tensor_is_refused():
    with pytest.raises(ValueError, match=r"expected a strided tensor, got layout torch\.sparse_coo"):
        hashcore.pack(torch.zeros(2, 32).to_sparse())
