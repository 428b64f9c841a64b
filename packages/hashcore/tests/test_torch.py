"""Tensors: the same results as numpy, as tensors, for every dtype and stride."""

import hashcore
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is an optional extra of hashcore")

# Integers, or floats that went through the same operations: tolerance 0 everywhere.


def random_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def assert_equal(tensor, array) -> None:
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def test_every_function_returns_tensors_equal_to_numpy(rng):
    w, codes = rng.normal(size=(2, 5, 64)).astype(np.float32), random_codes(rng, 2, 5, 2)
    scores, k = rng.integers(-9, 9, (3, 70)).astype(np.int16), np.array([3, 0, 70])
    tw, tcodes, tscores, tk = (torch.from_numpy(x.copy()) for x in (w, codes, scores, k))
    assert_equal(hashcore.pack(tw), hashcore.pack(w))
    assert_equal(hashcore.unpack(tcodes), hashcore.unpack(codes))
    for tensor, array in zip(hashcore.quantise(tw, 2), hashcore.quantise(w, 2), strict=True):
        assert_equal(tensor, array)
    for tensor, array in zip(hashcore.quantise(tw, 8), hashcore.quantise(w, 8), strict=True):
        assert_equal(tensor, array)
    planes, weights = hashcore.planes(tw)
    assert_equal(planes, hashcore.planes(w)[0])
    assert weights == (1, 2, 4)
    merged, weights = hashcore.group_planes(tcodes)
    assert_equal(merged, hashcore.group_planes(codes)[0])
    assert weights == (1, 2, 2)
    assert_equal(hashcore.score(tcodes, tcodes), hashcore.score(codes, codes))
    assert_equal(hashcore.score(merged, tcodes, weights), hashcore.score(merged.numpy(), codes, weights))
    for size in (4, (tk, k)):
        ours, theirs = size if isinstance(size, tuple) else (size, size)
        for tensor, array in zip(hashcore.topk(tscores, ours), hashcore.topk(scores, theirs), strict=True):
            assert_equal(tensor, array)


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
        assert_equal(half, full.numpy())


def test_expanded_and_transposed_tensors_equal_their_copies(rng):
    keys = torch.from_numpy(random_codes(rng, 1, 33, 2))
    query = torch.from_numpy(random_codes(rng, 6, 2, 4))
    wide = keys.expand(4, 33, 2)
    assert_equal(
        hashcore.score(query.permute(2, 0, 1), wide),
        hashcore.score(query.permute(2, 0, 1).contiguous(), wide.contiguous()).numpy(),
    )
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    for view in (x.T, x.T.bfloat16(), x[:, :1].T.expand(5, 64)):
        assert_equal(hashcore.pack(view), hashcore.pack(view.contiguous()).numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_that_require_grad_are_read_as_values(dtype):
    w = torch.nn.Parameter(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)))
    assert_equal(hashcore.pack(w), hashcore.pack(w.detach()).numpy())
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


def test_a_tensor_elsewhere_is_refused_with_its_device():
    message = r"hashcore runs on CPU tensors in this version, got a tensor on meta; move it with \.cpu\(\)"
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=message):
            hashcore.pack(torch.zeros(32, device="meta", dtype=dtype))


def test_a_sparse_tensor_is_refused():
    with pytest.raises(ValueError, match=r"expected a strided tensor, got layout torch\.sparse_coo"):
        hashcore.pack(torch.zeros(2, 32).to_sparse())
