"""The CUDA kernel that hashes a few tokens, run on the CPU under the host simulator.

Codes and planes have tolerance 0 against `encode_reference`, which sums in the kernel's order. torch sums in another
order, so against the layers a bit may differ where a number lies beside a threshold.
"""

import encode_reference as reference
import hashcore
import numpy as np
import pytest
import torch
from hashtrain import HasherConfig, ModelShape
from hashtrain.hasher import make_layer
from hostsim import check_slack
from sparse_decode.cuda import encode as encode_cuda
from sparse_decode.cuda import encode_weights
from sparse_decode_simulated import device, inside
from torch._subclasses.fake_tensor import FakeTensorMode

HEADS = 4, 2
CASES = {  # variant, head_dim, bits, hidden, planes
    "transform": ("transform", 64, 128, 64, 6),
    "planes": ("planes", 64, 128, 64, 5),
    "planes-256": ("planes", 128, 256, 96, 8),
    "transform-wide": ("transform", 80, 64, 300, 1),
    "lsh": ("lsh", 64, 128, 64, 1),
    "linear": ("linear", 80, 96, 64, 1),
    "paper": ("paper", 48, 128, 96, 1),
    "paper-residuals": ("paper", 64, 64, 64, 1),
    "paper-residual": ("paper", 32, 96, 32, 1),
}
# Variant, planes, bits, query heads of a KV head: each number of planes, each of bits, the least and most of both, and
# votes of every group.
FORMS = [
    *(("planes", 1, 128, 2), ("planes", 2, 512, 2), ("transform", 3, 32, 2), ("transform", 4, 128, 2)),
    *(("transform", 5, 512, 2), ("planes", 6, 32, 2), ("transform", 1, 32, 2), ("planes", 6, 512, 2)),
    *(("lsh", 1, bits, group) for group, bits in ((1, 512), (2, 32), (3, 128), (4, 32), (7, 512), (8, 32))),
]
ORDERS = 0, 1, 7


def layer_of(variant, dim, bits, hidden, planes, heads=HEADS, residual=False):
    shape, more = ModelShape(1, *heads, dim), {"residual": True, "init": "gaussian"} if residual else {}
    layer = make_layer(HasherConfig(variant, shape, bits=bits, hidden=hidden, planes=planes, **more), 0, 0)
    for functions in (getattr(layer, side, layer) for side in ("key", "query")):  # as far from linear as training goes
        for name, x in functions.named_parameters(recurse=False):
            if name in ("b1", "b2"):
                x.data.normal_()
            elif residual:
                x.data.normal_(std=len(x[0]) ** -0.5)
            elif name == "w2" and variant != "paper":
                x.data.mul_(20)
    return layer.requires_grad_(False)


def case(name):
    return layer_of(*CASES[name], residual="residual" in name)


def round_matrices(layer):
    for weights in (encode_weights.weights_of(layer, "key"), encode_weights.weights_of(layer, "query")):
        for x in encode_weights.matrices(weights):
            x.copy_(x.half())


def tokens_of(layer, batch=1, tokens=1, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(batch, heads, tokens, layer.d, generator=draw).mul(3).to(dtype) for heads in (layer.hkv, layer.hq)
    )


def sides(layer, narrow=False):
    """Weights of keys and of queries, and digits, between guard pages."""
    found = encode_weights.weights_of(layer, "key"), encode_weights.weights_of(layer, "query")
    if narrow:
        found = [encode_weights._narrowed(weights) for weights in found]
    return *([inside(x) for x in weights] for weights in found), [inside(x) for x in encode_weights.digits_of(layer)]


def room_for(layer, batch, tokens, per_query_head):
    heads, words = encode_weights.code_shape(layer, per_query_head)
    return inside(torch.full((batch, heads, tokens, words), -2, dtype=torch.int32))


def expected_codes(layer, k, per_query_head):
    """The reference's codes, in the heads in which they are stored."""
    heads, words = encode_weights.code_shape(layer, per_query_head)
    found = torch.from_numpy(
        reference.codes(k, encode_weights.weights_of(layer, "key"), encode_weights.digits_of(layer))
    )
    if (join := words * 32 // layer.bits) > 1:
        return torch.cat([found[:, i::join] for i in range(join)], -1)
    return found.repeat_interleave(heads // found.shape[1], 1)


def expected_planes(layer, q, per_query_head):
    how = encode_weights.hows(layer)[per_query_head]
    return torch.from_numpy(
        reference.planes(q, encode_weights.weights_of(layer, "query"), encode_weights.digits_of(layer), how).astype(
            np.int32
        )
    )


def step(layer, k, q, per_query_head=False, order=0, narrow=False):
    """Hash a step between guard pages: codes and planes."""
    of_keys, of_queries, digits = sides(layer, narrow)
    codes = room_for(layer, len(k), k.shape[2], per_query_head)
    given = inside(k), of_keys, inside(q), of_queries, digits, codes
    how = encode_weights.hows(layer)[per_query_head]
    planes = encode_cuda.hash_step(*given, how, run=device(order))
    for x in (codes, given[0], given[2], *of_keys, *of_queries, *digits):
        check_slack((x.view(torch.int16) if x.element_size() == 2 else x).numpy())
    return codes, planes


def nearly_equal(ours, theirs):
    """All bits are alike but those of a number beside a threshold: sums have another order here."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    return (hashcore.unpack(ours) != hashcore.unpack(theirs)).double().mean() < 2e-3


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("batch", "tokens", "dtype", "order", "per_query_head", "narrow"),
    [
        (1, 1, torch.bfloat16, 0, False, False),
        (2, 2, torch.float16, 5, True, False),
        (1, 2, torch.float16, 1, False, True),
    ],
)
def test_codes_and_planes_are_those_of_the_reference_and_nearly_of_the_layer(
    name, batch, tokens, dtype, order, per_query_head, narrow
):
    """Narrow: matrices of 16 bits, which hold the same numbers."""
    layer = case(name)
    if narrow:
        round_matrices(layer)
    k, q = tokens_of(layer, batch, tokens, dtype)
    codes, planes = step(layer, k, q, per_query_head, order, narrow)
    assert torch.equal(codes, expected_codes(layer, k, per_query_head))
    assert torch.equal(planes, expected_planes(layer, q, per_query_head))
    assert nearly_equal(codes, layer.encode_keys(k, per_query_head=per_query_head))
    theirs, weights = layer.encode_queries(q, per_query_head=per_query_head)
    assert nearly_equal(planes, theirs)
    assert encode_weights.found_in(layer).planes[per_query_head] == weights


def assert_exact(layer, k, q):
    """In every order of threads; the heads of a group leave what they count in at 0, whichever is the last."""
    expected = expected_codes(layer, k, False), expected_planes(layer, q, False)
    for order in ORDERS:
        assert all(map(torch.equal, step(layer, k, q, order=order), expected))
    assert not encode_cuda.zeroed(1, torch.device("cpu")).tensor[: encode_cuda.TICKETS].any()
    return expected


@pytest.mark.sample(6)
@pytest.mark.parametrize(("variant", "planes", "bits", "group"), FORMS)
def test_every_number_of_planes_bits_and_heads_is_exact_in_every_order_of_threads(variant, planes, bits, group):
    layer = layer_of(variant, 64, bits, 24, planes, heads=(group, 1))
    assert_exact(layer, *tokens_of(layer))


@pytest.mark.parametrize("variant", ["planes", "lsh"])
def test_numbers_that_are_rounding_errors_alone_are_those_of_the_reference(variant):
    """Sums that would be 0 without rounding: their signs and levels tell the order of every addition."""
    layer = layer_of(variant, 64, 128, 24, 6, heads=(2, 1))
    k, q = tokens_of(layer)
    for x in (k, q):
        x[..., 32:] = x[..., :32]
    for side in ("key", "query"):
        of = getattr(layer, side, layer)
        matrix = of.rotation if variant == "lsh" else of.r
        matrix[:, 32:] = -matrix[:, :32]
        if variant == "planes":
            of.w2.zero_()
            of.b2.zero_()
    expected = assert_exact(layer, k, q)
    theirs = layer.encode_keys(k), layer.encode_queries(q)[0]
    assert not any(nearly_equal(a, b) for a, b in zip(expected, theirs, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["transform", "lsh", "paper"])
@pytest.mark.parametrize("per_query_head", [False, True])
def test_keys_alone_and_queries_alone_are_those_of_the_step(name, per_query_head):
    """Codes also go where a tensor says, in a longer cache."""
    layer = case(name)
    k, q = tokens_of(layer, 1, 3)
    of_keys, of_queries, digits = sides(layer)
    codes, planes = step(layer, k, q, per_query_head)
    how = encode_weights.hows(layer)[per_query_head]
    assert torch.equal(encode_cuda.hash_queries(inside(q), of_queries, digits, how, run=device(7)), planes)
    for at in (None, torch.tensor(2)):
        room = torch.zeros(1, codes.shape[1], 8, codes.shape[3], dtype=torch.int32)
        to = room[:, :, 2:5] if at is None else room
        encode_cuda.hash_keys(inside(k), of_keys, digits, to, at, run=device(7))
        assert torch.equal(room[:, :, 2:5], codes)
        assert not room[:, :, :2].any()
        assert not room[:, :, 5:].any()


def test_what_is_not_finite_is_hashed_as_documented():
    layer = case("transform")
    k = torch.full((1, 2, 1, 64), torch.nan).bfloat16()
    codes = torch.ones(1, 2, 1, 4, dtype=torch.int32)
    of_keys, _, digits = sides(layer)
    encode_cuda.hash_keys(k, of_keys, digits, codes, run=device(0))
    assert (codes == 0).all()


@pytest.mark.parametrize("name", ["planes-256", "transform", "lsh", "paper"])
def test_a_layer_that_stays_in_place_is_looked_up(name, monkeypatch):
    layer = case(name)
    described = encode_weights.describe(encode_weights.weights_of(layer, "key"), encode_weights.digits_of(layer))
    encode_weights.place(layer)
    known, seen = encode_weights.placed[id(layer)], []
    k, _ = tokens_of(layer)
    codes = room_for(layer, 1, 1, False)

    def run(launches, device, folder):
        seen.extend(
            bytes(x) for x in launches[0].arguments if isinstance(x, encode_weights.Functions | encode_weights.Digits)
        )

    with monkeypatch.context() as patched:
        patched.setattr(encode_cuda, "describe", lambda *_: pytest.fail("described again"))
        encode_cuda.hash_keys(k, known.key, known.digits, codes, run=run)
    assert seen == [described.functions, bytes(len(described.functions)), described.described]
    other = [x.clone() for x in known.key]
    encode_cuda.hash_keys(k, other, known.digits, codes, run=run)
    assert seen[3] == encode_weights.describe(other, known.digits).functions != seen[0]
    numbers = id(layer), id(known.key[0]), id(known.query[0])
    del layer, known
    assert numbers[0] not in encode_weights.placed
    assert not set(numbers[1:]) & set(encode_weights.sides)


@pytest.mark.parametrize("name", ["transform", "lsh", "paper"])
def test_a_copy_has_16_bits_where_that_loses_nothing(name):
    for narrow in (False, True):
        layer, copied = case(name), case(name)
        if narrow:
            round_matrices(layer)
            copied.load_state_dict(layer.state_dict())
        encode_weights.place(copied, layer)
        known = encode_weights.placed[id(copied)]
        kinds = [[x.dtype for x in encode_weights.matrices(weights)] for weights in known[:2]]
        assert {x for of in kinds for x in of} == {torch.float16 if narrow else torch.float32}
        assert all(
            torch.equal(a.float(), b) for a, b in zip(known.key, encode_weights.weights_of(copied, "key"), strict=True)
        )


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"variant": "transform"}, True),
        ({"variant": "lsh"}, True),
        ({"variant": "linear"}, True),
        ({"variant": "paper", "hidden": 128}, True),
        ({"tokens": 8}, True),
        ({"tokens": 9}, False),  # 18 of both rows
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"hidden": encode_weights.MOST}, True),
        ({"hidden": encode_weights.MOST + 1}, False),
        ({"variant": "paper", "hidden": encode_weights.MOST + 1}, False),
        ({"bits": 512}, True),
        ({"bits": 544}, False),
        ({"device": "cpu"}, False),
        ({"heads": (257, 257)}, False),
    ],
)
def test_what_the_kernel_takes(changed, taken):
    how = {"variant": "planes", "tokens": 1, "dtype": torch.bfloat16, "hidden": 64, "bits": 128, "device": "cuda"}
    how |= {"heads": HEADS} | changed
    config = HasherConfig(how["variant"], ModelShape(1, *how["heads"], 64), bits=how["bits"], hidden=how["hidden"])
    layer = make_layer(config, 0, None if how["heads"] != HEADS else 0)
    with FakeTensorMode():
        x = torch.zeros(2, 2, how["tokens"], 64, dtype=how["dtype"], device=how["device"])
        assert encode_cuda.supports(layer, x) is taken
