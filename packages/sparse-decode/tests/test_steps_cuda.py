"""The operators of a decode step beside attention on a GPU, against the same on the CPU. Skipped without one."""

import hashcore
import pytest
import torch
from hashtrain import HasherConfig, ModelShape
from hashtrain.artefact.hasher import make_layer
from sparse_decode import encode_cuda, moments
from sparse_decode.remainder import RunningMoments

pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; test_encode_cuda.py needs none"),
]
HASHERS = [  # variant, head_dim, bits, hidden, planes
    ("planes", 64, 128, 64, 5),
    ("planes", 128, 256, 96, 8),
    ("transform", 64, 128, 64, 6),
    ("transform", 128, 128, 128, 6),
    ("transform", 80, 64, 300, 1),
]
SHAPES = [(64, 64, torch.bfloat16), (128, 128, torch.float16), (80, 48, torch.bfloat16), (32, 256, torch.float16)]


def assert_nearly_equal(ours, theirs):
    """All bits are alike but those of a number beside a threshold: sums have another order on the device."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert (hashcore.unpack(ours.cpu()) != hashcore.unpack(theirs)).double().mean() < 2e-3


def there(x):
    return (
        [there(part) for part in x] if isinstance(x, list | tuple) else x.cuda() if isinstance(x, torch.Tensor) else x
    )


@pytest.mark.parametrize(("variant", "dim", "bits", "hidden", "planes"), HASHERS)
@pytest.mark.parametrize(("batch", "tokens", "dtype"), [(1, 1, torch.bfloat16), (2, 3, torch.float16)])
def test_hashed_tokens_are_those_of_the_layer(variant, dim, bits, hidden, planes, batch, tokens, dtype):
    config = HasherConfig(variant, ModelShape(1, 6, 2, dim), bits=bits, hidden=hidden, planes=planes)
    layer = make_layer(config, 0, 0).requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    k, q = (torch.randn(batch, heads, tokens, dim, generator=draw).mul(3).to(dtype) for heads in (2, 6))
    digits = there(encode_cuda._digits(layer))
    weights = there([encode_cuda._weights(layer.key), encode_cuda._weights(layer.query)])
    room = torch.zeros(batch, 2, tokens + 5, bits // 32, dtype=torch.int32, device="cuda")
    at = torch.tensor(2, device="cuda")
    encode_cuda.OPERATORS.hash_keys(k.cuda(), weights[0], digits, room, at)
    assert_nearly_equal(room[:, :, 2:-3], layer.encode_keys(k))
    assert not room[:, :, :2].any()
    assert not room[:, :, -3:].any()
    for group in (1, layer.group):
        found = encode_cuda.OPERATORS.hash_queries(q.cuda(), weights[1], digits, bits, group, planes)
        assert_nearly_equal(found, layer.encode_queries(q, per_query_head=group == 1)[0])


@pytest.mark.parametrize(("dim", "value_dim", "dtype"), SHAPES)
@pytest.mark.parametrize(("batch", "group", "tokens"), [(1, 1, 1), (2, 3, 50), (1, 16, 7)])
def test_sums_of_a_step_equal_the_cpus(dim, value_dim, dtype, batch, group, tokens):
    draw = torch.Generator().manual_seed(tokens)
    shapes = (batch, 2 * group, 1, dim), (batch, 2, tokens + 1, dim), (batch, 2, tokens + 1, value_dim)
    q, k, v = (torch.randn(shape, generator=draw).add(0.5).to(dtype) for shape in shapes)
    slopes, running = torch.rand(2 * group, generator=draw), RunningMoments()
    running.rows(q, slopes, k[:, :, :tokens], v[:, :, :tokens], None, tokens - 1, tokens)
    sums = running._sums[1:]
    given = q[:, :, 0], slopes, k, v, *sums, None, None, None
    for ours, theirs in zip(
        moments.OPERATORS.add_token(*there(given)), moments.OPERATORS.add_token(*given), strict=True
    ):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


def test_sums_of_a_static_cache_equal_the_cpus():
    """Of rows with padding, in place; token 70 of a cache with room for 90."""
    draw, room, tokens = torch.Generator().manual_seed(1), 90, 70
    shapes = (3, 4, 64), (3, 2, room, 64), (3, 2, room, 64)
    q, k, v = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    slopes, shown = torch.rand(4, generator=draw), torch.zeros(3, room, dtype=torch.bool)
    shown[0, :tokens] = shown[1, 9:tokens] = shown[2, 3:tokens] = True
    before = shown.clone()
    before[:, tokens - 1 :] = False
    double = {"generator": draw, "dtype": torch.float64}
    sums = [before.sum(-1).double(), torch.randn(3, 2, 64, **double), torch.randn(3, 2, 64, **double)]
    sums += [torch.randn(3, 2, 64, 64, generator=draw), before, torch.full((3,), tokens - 1)]
    rest = shown.sum(-1, keepdim=True), shown, torch.tensor(tokens)
    ours, theirs = there(sums), sums
    means = moments.OPERATORS.add_in_place(*there((q, slopes, k, v)), *ours, *there(rest))
    cpus = moments.OPERATORS.add_in_place(q, slopes, k, v, *theirs, *rest)
    for mine, other in zip((*ours, *means), (*theirs, *cpus), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=1e-5)
