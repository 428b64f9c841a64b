"""The CUDA kernels that hash a few tokens, run on the CPU under the host simulator, against the layers in torch."""

import hashcore
import pytest
import torch
from hashtrain import HasherConfig, ModelShape
from hashtrain.artefact.hasher import make_layer
from sparse_decode import encode_cuda
from sparse_decode_simulated import device, inside
from torch._subclasses.fake_tensor import FakeTensorMode

CASES = [  # variant, head_dim, bits, hidden, planes
    ("planes", 64, 128, 64, 5),
    ("planes", 128, 256, 96, 8),
    ("transform", 64, 128, 64, 6),
    ("transform", 128, 128, 48, 3),
    ("transform", 80, 64, 300, 1),
]


def layer_of(variant, dim, bits, hidden, planes):
    config = HasherConfig(variant, ModelShape(1, 6, 2, dim), bits=bits, hidden=hidden, planes=planes)
    layer = make_layer(config, 0, 0).requires_grad_(False)
    for functions in (layer.key, layer.query):
        functions.w2.mul_(20)  # as far from linear as training takes it
        functions.b1.normal_()
        functions.b2.normal_()
    return layer


def nearly_equal(ours, theirs):
    """All bits are alike but those of a number beside a threshold: sums have another order here."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    return (hashcore.unpack(ours) != hashcore.unpack(theirs)).double().mean() < 2e-3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("batch", "tokens", "dtype", "order"), [(1, 1, torch.bfloat16, 0), (2, 3, torch.float16, 5)])
def test_codes_and_planes_are_those_of_the_layer(case, batch, tokens, dtype, order):
    layer = layer_of(*case)
    generator = torch.Generator().manual_seed(0)
    k, q = (torch.randn(batch, heads, tokens, layer.d, generator=generator).mul(3).to(dtype) for heads in (2, 6))
    weights = [[getattr(f, name) for name in encode_cuda.NAMES] for f in (layer.key, layer.query)]
    digits = encode_cuda._digits(layer)
    room = torch.zeros(batch, 2, tokens + 5, layer.bits // 32, dtype=torch.int32)  # codes lie in a longer cache
    encode_cuda.hash_keys(inside(k), weights[0], digits, room[:, :, 2:-3], run=device(order))
    assert nearly_equal(room[:, :, 2:-3], layer.encode_keys(k))
    later = torch.zeros_like(room)
    encode_cuda.hash_keys(inside(k), weights[0], digits, later, torch.tensor(2), run=device(order))
    assert torch.equal(later, room)
    for group in (1, layer.group):
        found = encode_cuda.hash_queries(
            inside(q), weights[1], digits, layer.bits, group, layer.planes, run=device(order)
        )
        assert nearly_equal(found, layer.encode_queries(q, per_query_head=group == 1)[0])


def test_the_order_of_threads_changes_nothing():
    layer = layer_of(*CASES[2])
    q = torch.randn(1, 6, 2, 64).bfloat16()
    weights, digits = [getattr(layer.query, name) for name in encode_cuda.NAMES], encode_cuda._digits(layer)
    first, *others = (
        encode_cuda.hash_queries(q, weights, digits, 128, 3, 6, run=device(order)) for order in (0, 1, 5, 9)
    )
    assert all(torch.equal(first, other) for other in others)


def test_what_is_not_finite_is_hashed_as_documented():
    layer = layer_of(*CASES[2])
    k = torch.full((1, 2, 1, 64), torch.nan).bfloat16()
    weights, digits = [getattr(layer.key, name) for name in encode_cuda.NAMES], encode_cuda._digits(layer)
    codes = torch.ones(1, 2, 1, 4, dtype=torch.int32)
    encode_cuda.hash_keys(k, weights, digits, codes, run=device(0))
    assert (codes == 0).all()


@pytest.mark.parametrize("case", CASES[1:3])
def test_a_layer_that_stays_in_place_is_looked_up(case, monkeypatch):
    layer = layer_of(*case)
    described = encode_cuda._describe(encode_cuda._weights(layer.key), encode_cuda._digits(layer))
    encode_cuda.place(layer)
    known, seen = encode_cuda._placed[id(layer)], []
    k = torch.zeros(1, 2, 1, layer.d, dtype=torch.bfloat16)
    codes = torch.zeros(1, 2, 1, layer.bits // 32, dtype=torch.int32)

    def run(launches, device, folder):
        seen.extend(
            bytes(x) for x in launches[0].arguments if isinstance(x, encode_cuda.Functions | encode_cuda.Digits)
        )

    with monkeypatch.context() as patched:
        patched.setattr(encode_cuda, "_describe", lambda *_: pytest.fail("described again"))
        encode_cuda.hash_keys(k, known.key, known.digits, codes, run=run)
    assert seen == [described.functions, described.described]
    other = [x.clone() for x in known.key]
    encode_cuda.hash_keys(k, other, known.digits, codes, run=run)
    assert seen[2] == encode_cuda._describe(other, known.digits).functions != seen[0]
    numbers = id(layer), id(known.key[0]), id(known.query[0])
    del layer, known
    assert numbers[0] not in encode_cuda._placed
    assert not set(numbers[1:]) & set(encode_cuda._sides)


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"variant": "transform"}, True),
        ({"tokens": 8}, True),
        ({"tokens": 9}, False),  # 18 of both rows
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"variant": "lsh"}, False),
        ({"hidden": encode_cuda.MOST}, True),
        ({"hidden": encode_cuda.MOST + 1}, False),
        ({"bits": 512}, True),
        ({"bits": 544}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_what_the_kernels_take(changed, taken):
    how = {"variant": "planes", "tokens": 1, "dtype": torch.bfloat16, "hidden": 64, "bits": 128, "device": "cuda"}
    how |= changed
    config = HasherConfig(how["variant"], ModelShape(1, 6, 2, 64), bits=how["bits"], hidden=how["hidden"])
    layer = make_layer(config, 0, 0)
    with FakeTensorMode():
        x = torch.zeros(2, 2, how["tokens"], 64, dtype=how["dtype"], device=how["device"])
        assert encode_cuda.supports(layer, x) is taken
