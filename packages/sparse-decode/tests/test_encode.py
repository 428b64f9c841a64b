"""A few tokens hashed in one pass over the weights, on every backend: the codes and planes of `hashtrain`.

The backends: the CPU's kernel, and CUDA's under the host simulator, between guard pages and in several orders of
threads. Whole numbers have exact sums in any order, so there the results are equal to the bit; with others a bit may
differ where a number lies beside a threshold.
"""

import re
from typing import NamedTuple

import hashcore
import pytest
import torch
from hashcore.cpu import threads
from hashcore.cuda.source import read_source
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.hasher import make_layer
from hostsim import check_slack
from hypothesis import given
from hypothesis import strategies as st
from sparse_decode.cpu.encode import MAX_TOKENS, hash_queries, views_of
from sparse_decode.cuda import encode as encode_cuda
from sparse_decode.cuda import encode_weights
from sparse_decode.select import HashSelector
from sparse_decode_simulated import device, inside
from torch._subclasses.fake_tensor import FakeTensorMode


class Form(NamedTuple):
    """A layer: its query and KV heads, head size, bits, planes and width of the hidden layer."""

    variant: str
    hq: int = 4
    hkv: int = 2
    dim: int = 64
    bits: int = 128
    planes: int = 5
    hidden: int = 64
    residual: bool = False


BOTH = [  # each number of planes, each of words, heads in groups of 1 to 7
    *(Form("planes", 4, 2, 16, 32, 1, 32), Form("planes", 7, 1, planes=3), Form("planes", 3, 3, 20, 96, 8, 300)),
    *(Form("transform"), Form("transform", 7, 1, 80, 64, 3, 96), Form("transform", 4, 2, 64, 512, 1, 24)),
    *(Form("planes", 2, 1, 128, 256, 2, 96), Form("transform", 2, 1, 64, 32, 4, 24), Form("planes", 2, 1, planes=6)),
]
CPU_ONLY = [Form("planes", 6, 2, 13, 64, 3, 32)]  # rows that are not aligned
CUDA_ONLY = [
    *(Form("linear", dim=80, bits=96), Form("paper", dim=48, hidden=96), Form("paper", bits=64, residual=True)),
    *(Form("paper", 4, 2, 32, 96, 1, 32, residual=True), Form("lsh", 1, 1, bits=512), Form("lsh", 4, 2, bits=32)),
    *(Form("lsh", 3, 1), Form("lsh", 7, 1, bits=512), Form("lsh", 8, 1, bits=32)),
]
CASES = [("cpu", form) for form in BOTH + CPU_ONLY] + [("cuda", form) for form in BOTH + CUDA_ONLY]


def make(form, whole=True):
    """Make hash functions of one layer; whole: of small whole numbers, whose products and sums are exact."""
    shape = ModelShape(1, form.hq, form.hkv, form.dim)
    more = {"residual": True, "init": "gaussian"} if form.residual else {}
    hasher = Hasher(HasherConfig(form.variant, shape, bits=form.bits, hidden=form.hidden, planes=form.planes, **more))
    draw = torch.Generator().manual_seed(1)
    for name, weights in (*hasher.named_parameters(), *hasher.named_buffers()):
        if not name.endswith((".r", ".w1", ".b1", ".w2", ".b2", ".rotation")):
            continue
        drawn = torch.randint(-3, 4, weights.shape, generator=draw).float()
        # SiLU of a large multiple is 0 or the number itself, so that the hidden layer is whole, too.
        drawn = 256 * drawn + 128 if name.endswith(("w1", "b1")) else drawn
        weights.data.copy_(drawn if whole else torch.randn(weights.shape, generator=draw) * weights.shape[-2] ** -0.5)
    return hasher.requires_grad_(False)


def tokens(form, batch=1, count=1, whole=True, dtype=torch.float32):
    """Keys and queries."""
    draw = torch.Generator().manual_seed(batch * 100 + count)
    sizes = [(batch, heads, count, form.dim) for heads in (form.hkv, form.hq)]
    drawn = (torch.randint(-3, 4, x, generator=draw) if whole else torch.randn(x, generator=draw) for x in sizes)
    return [x.to(dtype) for x in drawn]


def on_cpu(hasher, k, q, per_query_head):
    """Hash a step: codes, planes and the planes' weights."""
    own = HashSelector(hasher, per_query_head)
    return own.encode_keys(0, k), *own.encode_queries(0, q)


def on_cuda(hasher, k, q, per_query_head, order=0, narrow=False):
    """Hash a step in one launch; keys and queries alone are the same, also where a tensor says in a longer cache."""
    layer = hasher.layer(0)
    known = encode_weights.found_in(layer)
    how, (heads, words) = known.hows[per_query_head], encode_weights.code_shape(layer, per_query_head)
    sides = (encode_weights._narrowed(weights) if narrow else weights for weights in (known.key, known.query))
    of_keys, of_queries = ([inside(x) for x in weights] for weights in sides)
    digits, k, q = [inside(x) for x in known.digits], inside(k), inside(q)
    codes = inside(torch.full((len(k), heads, k.shape[2], words), -2, dtype=torch.int32))
    planes = encode_cuda.hash_tokens(k, of_keys, codes, None, q, of_queries, digits, *how, device(order))
    for x in (codes, k, q, *of_keys, *of_queries, *digits):
        check_slack((x.view(torch.int16) if x.element_size() == 2 else x).numpy())
    assert torch.equal(encode_cuda.hash_tokens(None, [], None, None, q, of_queries, digits, *how, device(7)), planes)
    for at in (None, torch.tensor(2)):
        room = torch.zeros(len(k), heads, k.shape[2] + 5, words, dtype=torch.int32)
        to = room[:, :, 2 : 2 + k.shape[2]]
        target = to if at is None else room
        encode_cuda.hash_tokens(k, of_keys, target, at, None, [], digits, *how, device(7))
        assert torch.equal(to, codes)
        assert not torch.cat([room[:, :, :2], room[:, :, 2 + k.shape[2] :]], 2).any()
    tickets = encode_cuda.zeroed(1, torch.device("cpu"))[: encode_cuda.TICKETS]
    assert not tickets.any(), "the heads of a group leave what they count in at 0, whichever is the last"
    return codes, planes, known.planes[per_query_head]


def of_layer(hasher, k, q, per_query_head):
    layer = hasher.layer(0)
    codes = layer.encode_keys(k, per_query_head=per_query_head)
    return codes, *layer.encode_queries(q, per_query_head=per_query_head)


def assert_equal(found, expected):
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert found[2] == expected[2]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("backend", "form"), CASES)
def test_equals_hashtrain_exactly_where_sums_are_exact(backend, form):
    hasher = make(form)
    for per_query_head in (False, True):
        if backend == "cpu":
            for batch, count in ((1, 1), (3, 1), (2, 5)):
                given = hasher, *tokens(form, batch, count), per_query_head
                assert_equal(on_cpu(*given), of_layer(*given))
            continue
        ways = (1, 1, torch.bfloat16, 1, False), (2, 2, torch.float16, 5, False), (1, 3, torch.float16, 0, True)
        for batch, count, dtype, order, narrow in ways:  # narrow: matrices of 16 bits, which hold the same numbers
            given = hasher, *tokens(form, batch, count, dtype=dtype), per_query_head
            if narrow:
                for x in encode_weights.matrices(encode_weights.weights_of(hasher.layer(0), "key")):
                    assert torch.equal(x.half().float(), x)
            assert_equal(on_cuda(*given, order, narrow), of_layer(*given))


@pytest.mark.parametrize(
    ("backend", "variant"),
    [*((one, variant) for one in ("cpu", "cuda") for variant in ("planes", "transform")), ("cuda", "paper")],
)
def test_real_weights_give_the_same_but_for_rounding_and_whatever_is_beside_a_token(backend, variant):
    form = Form(variant, 6, 2)
    hasher, run = make(form, whole=False), on_cpu if backend == "cpu" else on_cuda
    k, q = tokens(form, 2, 3, whole=False, dtype=torch.bfloat16)
    together = run(hasher, k, q, False)
    for ours, theirs in zip(together[:2], of_layer(hasher, k, q, False)[:2], strict=True):
        assert (hashcore.unpack(ours) != hashcore.unpack(theirs)).double().mean() < 2e-3
    for b in range(2):
        one = slice(b, b + 1), slice(None), slice(1, 2)
        assert_equal(run(hasher, k[one], q[one], False), [together[0][one], together[1][one], together[2]])


@given(st.integers(1, 8), st.lists(st.floats(width=32), min_size=32, max_size=32))
def test_planes_are_those_of_hashcore(planes, numbers):
    """The hidden layer and the rotation are left out, so that the numbers are the bias itself."""
    layer = make(Form("planes", 1, 1, 16, 32, planes)).layer(0)
    for name, weights in layer.query.named_parameters():
        weights.zero_() if name != "b2" else weights.copy_(torch.tensor(numbers))
    expected = hashcore.planes(layer.query.b2[None], planes, check=False)[0]
    assert torch.equal(hash_queries(views_of(layer), torch.ones(1, 1, 1, 16), False)[0], expected)


@pytest.mark.parametrize("run", [on_cpu, on_cuda])
def test_clipped_and_missing_numbers_and_other_digits(run):
    """The hidden layer and the maps are left out, so that the coordinates are the bias itself."""
    form = Form("transform", dim=16, bits=32)
    hasher, given = make(form), (*tokens(form, dtype=torch.bfloat16), False)
    layer = hasher.layer(0)
    for name, weights in layer.key.named_parameters():
        weights.zero_() if name != "b2" else weights.copy_(torch.linspace(-9, 9, 16).repeat(2, 1, 1))
    layer.key.b2[0, 0, 5] = torch.nan
    assert_equal(run(hasher, *given), of_layer(hasher, *given))
    changed = layer.digits.clone()
    changed[0, :3], changed[0, 3:6] = 4, 0
    layer.load_state_dict({**layer.state_dict(), "digits": changed})
    assert_equal(run(hasher, *given), of_layer(hasher, *given))


@pytest.mark.usefixtures("real_threads")
def test_threads_change_nothing_and_many_tokens_are_hashed_by_hashtrain(monkeypatch):
    form = Form("planes", 8, 4)
    hasher, (_, q) = make(form, whole=False), tokens(form, 3, 4, whole=False)
    serial = hash_queries(views_of(hasher.layer(0)), q, False)[0]
    monkeypatch.setattr(threads, "TEAM_GRAIN", 1)
    assert torch.equal(hash_queries(views_of(hasher.layer(0)), q, False)[0], serial)
    monkeypatch.setattr("sparse_decode.cpu.encode.hash_keys", lambda *_: pytest.fail("taken"))
    many, _ = tokens(form, 1, MAX_TOKENS + 1)
    assert torch.equal(HashSelector(hasher).encode_keys(0, many), hasher.encode_keys(0, many))


def test_a_step_of_many_sequences_is_one_product_for_each_head():
    form, batches = Form("transform", 8, 4), []
    hasher, (k, q) = make(form), tokens(form, MAX_TOKENS + 1, 1)
    selector, layer = HashSelector(hasher), hasher.layer(0)
    for side in (layer.key, layer.query):
        side.register_forward_pre_hook(lambda _, given: batches.append(given[0].shape[0]))
    codes, (planes, _) = selector.encode_keys(0, k), selector.encode_queries(0, q)
    assert batches == [1, 1], "torch would copy the matrices for each sequence"
    assert torch.equal(codes[3:4], selector.encode_keys(0, k[3:4]))
    assert torch.equal(planes[3:4], selector.encode_queries(0, q[3:4])[0])


@pytest.mark.parametrize("variant", ["transform", "lsh", "paper"])
def test_a_copy_has_16_bits_where_that_loses_nothing(variant):
    for narrow in (False, True):
        layer = make(Form(variant), whole=narrow).layer(0)
        known = encode_weights.place(layer, torch.device("meta"))
        for weights in (known.key, known.query):
            kinds = {x.dtype for x in encode_weights.matrices(weights)}
            assert kinds == {torch.float16 if narrow else torch.float32}


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        *(({}, True), ({"tokens": 8}, True), ({"hidden": encode_weights.MOST}, True), ({"bits": 512}, True)),
        *(({"tokens": 9}, False), ({"hidden": encode_weights.MOST + 4}, False), ({"bits": 544}, False)),
        *(({"dtype": torch.float32}, False), ({"device": "cpu"}, False), ({"heads": (257, 257)}, False)),
    ],
)
def test_what_the_kernel_takes(changed, taken):
    how = {"tokens": 1, "dtype": torch.bfloat16, "hidden": 64, "bits": 128, "device": "cuda", "heads": (4, 2)} | changed
    config = HasherConfig("planes", ModelShape(1, *how["heads"], 64), bits=how["bits"], hidden=how["hidden"])
    own = encode_weights.found_in(make_layer(config, 0, None if "heads" in changed else 0))
    with FakeTensorMode():
        x = torch.zeros(2, 2, how["tokens"], 64, dtype=how["dtype"], device=how["device"])
        assert encode_cuda.supports(own, x) is taken


def test_the_kernel_waits_before_it_reads():
    """It starts early. The host simulator runs one kernel after the other, and cannot see it."""
    text = read_source(encode_cuda.KERNELS, "encode.cu")
    before, after = re.search(r" hash_tokens\(const.*?\n}", text, re.S)[0].split("wait_for_predecessor();")
    assert not re.search(r"\bBit\b|functions_of|\bx\(|__ld", before)
    assert "let_dependents_start();" in after  # only then is the memory that both use free
