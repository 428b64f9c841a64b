"""The operators of a decode step beside attention on a GPU, against the same on the CPU. Skipped without one."""

import copy

import hashcore
import pytest
import torch
from hashtrain import HasherConfig, ModelShape
from hashtrain.artefact.hasher import make_layer
from sparse_decode.hashing import encode_cuda, encode_weights
from sparse_decode.unselected import remainder
from sparse_decode.unselected.sums import FOLD, Moments, Rounded

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
    ("lsh", 64, 128, 64, 1),
    ("linear", 80, 96, 64, 1),
    ("paper", 48, 128, 96, 1),
]
SHAPES = [(64, 64, torch.bfloat16), (128, 128, torch.float16), (80, 48, torch.bfloat16), (32, 256, torch.float16)]


def assert_nearly_equal(ours, theirs):
    """All bits are alike but those of a number beside a threshold: sums have another order on the device."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert (hashcore.unpack(ours.cpu()) != hashcore.unpack(theirs)).double().mean() < 2e-3


def assert_alike(ours, theirs):
    """Results and sums are alike, levels but for a step: a sum in another order may round to the next."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        if mine.dtype == torch.int8:
            assert (mine.cpu().int() - other.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=2e-5)


def there(x):
    return (
        [there(part) for part in x] if isinstance(x, list | tuple) else x.cuda() if isinstance(x, torch.Tensor) else x
    )


@pytest.mark.parametrize(("variant", "dim", "bits", "hidden", "planes"), HASHERS)
@pytest.mark.parametrize(
    ("batch", "tokens", "dtype", "narrow"), [(1, 1, torch.bfloat16, False), (2, 3, torch.float16, True)]
)
def test_hashed_tokens_are_those_of_the_layer(variant, dim, bits, hidden, planes, batch, tokens, dtype, narrow):
    """Keys and queries at once and apart, per KV head and per query head; narrow: matrices of 16 bits."""
    config = HasherConfig(variant, ModelShape(1, 6, 2, dim), bits=bits, hidden=hidden, planes=planes)
    layer = make_layer(config, 0, 0).requires_grad_(False)
    for weights in (
        (encode_weights.weights_of(layer, "key"), encode_weights.weights_of(layer, "query")) if narrow else ()
    ):
        for x in encode_weights.matrices(weights):
            x.copy_(x.half())
    own = copy.deepcopy(layer).cuda()
    if own.remainder.is_cuda:  # the CPU's operators take no matrices of 16 bits
        encode_weights.place(own, layer)
        matrices = encode_weights.matrices(encode_weights.placed[id(own)].key)
        assert {x.dtype for x in matrices} == {torch.float16 if narrow else torch.float32}
    draw = torch.Generator().manual_seed(0)
    k, q = (torch.randn(batch, heads, tokens, dim, generator=draw).mul(3).to(dtype) for heads in (2, 6))
    for per_query_head in (False, True):
        heads, words = encode_weights.code_shape(layer, per_query_head)
        codes = layer.encode_keys(k, per_query_head=per_query_head)
        expected = layer.encode_queries(q, per_query_head=per_query_head)[0]
        room = torch.zeros(batch, heads, tokens + 5, words, dtype=torch.int32, device="cuda")
        encode_cuda.write_keys(own, k.cuda(), room, torch.tensor(2, device="cuda"))
        assert_nearly_equal(room[:, :, 2:-3], codes)
        assert not room[:, :, :2].any()
        assert not room[:, :, -3:].any()
        assert_nearly_equal(encode_cuda.queries(own, q.cuda(), per_query_head)[0], expected)
        part = room[:, :, :tokens]
        assert_nearly_equal(encode_cuda.step(own, k.cuda(), part, q.cuda(), per_query_head)[0], expected)
        assert_nearly_equal(part, codes)


@pytest.mark.parametrize(("dim", "value_dim", "dtype"), SHAPES)
@pytest.mark.parametrize(("batch", "group", "tokens", "new"), [(1, 1, 1, 1), (2, 3, 50, FOLD), (1, 16, 7, 5)])
def test_sums_of_a_step_equal_the_cpus(dim, value_dim, dtype, batch, group, tokens, new):
    draw, n = torch.Generator().manual_seed(tokens), tokens + new
    shapes = (batch, 2 * group, dim), (batch, 2, n, dim), (batch, 2, n, value_dim)
    q, k, v = (torch.randn(shape, generator=draw).add(0.5).to(dtype) for shape in shapes)
    sums = Moments.of(k, v, None, 0, tokens, k.device)
    given = q, torch.rand(2 * group, generator=draw), k, v, *sums[1:], *Rounded.of(sums.spread), tokens
    rows = None, None, None
    assert_alike(remainder.OPERATORS.add_token(*there(given), *rows), remainder.OPERATORS.add_token(*given, *rows))


@pytest.mark.parametrize("new", [3, FOLD])
def test_sums_of_a_static_cache_equal_the_cpus(new):
    """Of rows with padding, in place; tokens up to 70 of a cache with room for 90."""
    draw, room, tokens = torch.Generator().manual_seed(1), 90, 70
    shapes = (3, 4, 64), (3, 2, room, 64), (3, 2, room, 64)
    q, k, v = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    slopes, shown = torch.rand(4, generator=draw), torch.zeros(3, room, dtype=torch.bool)
    shown[0, :tokens] = shown[1, 9:tokens] = shown[2, 3:tokens] = True
    before = shown.clone()
    before[:, tokens - new :] = False
    known = Moments.of(k, v, shown, 0, tokens - new, k.device)
    sums = [*known, *Rounded.of(known.spread), before, torch.full((3, 2), tokens - new)]
    rest = shown.sum(-1, keepdim=True), shown, torch.tensor(tokens)
    ours, theirs = [x.clone() for x in there(sums)], sums
    means = remainder.OPERATORS.add_in_place(*there((q, slopes, k, v)), *ours, *there(rest))
    assert_alike([*means, *ours], [*remainder.OPERATORS.add_in_place(q, slopes, k, v, *theirs, *rest), *theirs])
