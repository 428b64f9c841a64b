"""A few tokens hashed in one pass over the weights: the codes and planes of `hashtrain`, whatever is beside them."""

import hashcore
import pytest
import torch
from hashcore.cpu import threads
from hashtrain import Hasher, HasherConfig, ModelShape
from hypothesis import given
from hypothesis import strategies as st
from sparse_decode.cpu.encode import MAX_TOKENS, CpuEncoder, supports
from sparse_decode.hashers import PerHead, QueryHeadHasher

SHAPES = [(4, 2, 16, 32), (7, 1, 64, 128), (6, 2, 13, 64), (3, 3, 20, 96)]
"""Query heads, KV heads, head size, bits."""


def make(shape, planes=3, whole=True, variant="planes"):
    """Make a layer's hash functions; of small whole numbers, whose products and sums with such numbers are exact."""
    hq, hkv, dim, bits = shape
    config = HasherConfig(variant, ModelShape(1, hq, hkv, dim), bits=bits, planes=planes)
    hasher = Hasher(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weights in hasher.named_parameters():
            if whole:
                drawn = torch.randint(-3, 4, weights.shape, generator=generator).float()
                # SiLU of a large multiple is 0 or the number itself, so that the hidden layer is whole, too.
                weights.copy_(256 * drawn + 128 if name.endswith(("w1", "b1")) else drawn)
            else:
                weights.copy_(torch.randn(weights.shape, generator=generator))
    return hasher.requires_grad_(False)


def tokens(shape, batch, count, heads, whole=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(batch * 100 + count)
    size = batch, heads, count, shape[2]
    drawn = torch.randint(-3, 4, size, generator=generator).float() if whole else torch.randn(size, generator=generator)
    return drawn.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("batch", "count"), [(1, 1), (3, 1), (2, 5)])
@pytest.mark.parametrize(("variant", "planes"), [("planes", 1), ("planes", 3), ("planes", 8), ("transform", 5)])
def test_equals_hashtrain_exactly_where_sums_are_exact(shape, batch, count, variant, planes):
    hasher = make(shape, planes, variant=variant)
    layer, q, k = hasher.layer(0), *(tokens(shape, batch, count, heads) for heads in shape[:2])
    assert supports(layer, q)
    assert torch.equal(CpuEncoder().keys(layer, k), layer.encode_keys(k))
    for per_query_head in (False, True):
        found, weights = CpuEncoder().queries(layer, q, per_query_head)
        expected = layer.encode_queries(q, per_query_head)
        assert weights == expected[1]
        assert torch.equal(found, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["planes", "transform"])
def test_real_weights_give_the_same_but_for_rounding(dtype, variant):
    shape = (14, 2, 64, 128)
    layer, encoder = make(shape, whole=False, variant=variant).layer(0), CpuEncoder()
    k, q = (tokens(shape, 2, 8, heads, whole=False, dtype=dtype) for heads in (2, 14))
    flipped = hashcore.unpack(encoder.keys(layer, k)) != hashcore.unpack(layer.encode_keys(k))
    assert flipped.double().mean() < 1e-3
    planes = encoder.queries(layer, q, False)[0], layer.encode_queries(q)[0]
    assert (hashcore.unpack(planes[0]) != hashcore.unpack(planes[1])).double().mean() < 1e-3


@given(st.integers(1, 8), st.lists(st.floats(width=32), min_size=32, max_size=32))
def test_planes_are_those_of_hashcore(planes, numbers):
    """The hidden layer and the rotation are left out, so that the numbers are the bias itself."""
    layer = make((1, 1, 16, 32), planes).layer(0)
    for name, weights in layer.query.named_parameters():
        weights.zero_() if name != "b2" else weights.copy_(torch.tensor(numbers))
    q = torch.ones(1, 1, 1, 16)
    expected = hashcore.planes(layer.query.b2[None], planes, check=False)[0]
    assert torch.equal(CpuEncoder().queries(layer, q, False)[0], expected)


def test_a_code_does_not_depend_on_what_is_hashed_beside_it():
    shape = SHAPES[1]
    layer, encoder = make(shape, whole=False).layer(0), CpuEncoder()
    k, q = (tokens(shape, 2, 4, heads, whole=False) for heads in (1, 7))
    together, planes = encoder.keys(layer, k), encoder.queries(layer, q, False)[0]
    for b in range(2):
        for t in range(4):
            one = slice(b, b + 1), slice(None), slice(t, t + 1)
            assert torch.equal(encoder.keys(layer, k[one]), together[one])
            assert torch.equal(encoder.queries(layer, q[one], False)[0], planes[one])


@pytest.mark.usefixtures("real_threads")
def test_threads_change_nothing(monkeypatch):
    shape = (8, 4, 64, 64)
    layer, encoder, q = make(shape, whole=False).layer(0), CpuEncoder(), tokens((8, 4, 64, 64), 3, 4, 8, whole=False)
    serial = encoder.queries(layer, q, False)[0]
    monkeypatch.setattr(threads, "TEAM_GRAIN", 1)
    assert torch.equal(encoder.queries(layer, q, False)[0], serial)


def test_weights_may_change_in_place_and_be_replaced():
    shape, encoder = SHAPES[0], CpuEncoder()
    hasher = make(shape)
    layer, k = hasher.layer(0), tokens(SHAPES[0], 1, 1, 2)
    first = encoder.keys(layer, k)
    with torch.no_grad():
        layer.key.b2.neg_()
        layer.key.r.neg_()
        layer.key.w2.neg_()
    changed = encoder.keys(layer, k)
    assert torch.equal(changed, layer.encode_keys(k))
    assert not torch.equal(changed, first)
    state = {name: weights.clone().neg() for name, weights in hasher.state_dict().items()}
    hasher.load_state_dict(state, assign=True)
    assert torch.equal(encoder.keys(layer, k), layer.encode_keys(k))


def test_digits_may_change_and_clipped_and_missing_numbers_have_the_same_ones():
    """The hidden layer and the maps are left out, so that the coordinates are the bias itself."""
    shape, encoder = SHAPES[0], CpuEncoder()
    layer, k = make(shape, variant="transform").layer(0), tokens(SHAPES[0], 1, 1, 2)
    for name, weights in layer.key.named_parameters():
        if name != "b2":
            weights.zero_()
    layer.key.b2.copy_(torch.linspace(-9, 9, 16).repeat(2, 1, 1))
    layer.key.b2[0, 0, 5] = torch.nan
    assert torch.equal(encoder.keys(layer, k), layer.encode_keys(k))
    changed = layer.digits.clone()
    changed[0, :3], changed[0, 3:6] = 4, 0
    layer.load_state_dict({**layer.state_dict(), "digits": changed})
    assert torch.equal(encoder.keys(layer, k), layer.encode_keys(k))
    assert torch.equal(
        encoder.queries(layer, tokens(shape, 1, 1, 4), False)[0], layer.encode_queries(tokens(shape, 1, 1, 4))[0]
    )


def test_what_it_does_not_take_is_hashed_by_hashtrain(monkeypatch):
    shape = SHAPES[0]
    many = tokens(shape, 1, MAX_TOKENS + 1, 2)
    monkeypatch.setattr(CpuEncoder, "keys", lambda *_: pytest.fail("taken"))
    hasher = make(shape)
    assert torch.equal(PerHead(hasher).encode_keys(0, many), hasher.encode_keys(0, many))


def test_per_query_head():
    hasher = make(SHAPES[0])
    q, k = tokens(SHAPES[0], 1, 1, 4), tokens(SHAPES[0], 1, 1, 2)
    own = QueryHeadHasher(hasher)
    assert torch.equal(own.encode_keys(0, k), hasher.layer(0).encode_keys(k, per_query_head=True))
    assert torch.equal(own.encode_queries(0, q)[0], hasher.layer(0).encode_queries(q, per_query_head=True)[0])
