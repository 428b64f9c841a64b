"""The kernels of a decode step on a GPU, against the reference and the layers in torch. Skipped without one.

The other files run the same kernels on the CPU, under the host simulator.
"""

from types import SimpleNamespace

import hashcore
import pytest
import torch
from gather_cases import CLOSE, KINDS, expected, make, poisoned
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.hasher import make_layer
from paged_cases import BUDGETS, LENGTHS, SIZES, Batch, layer_of
from sparse_decode import HashSelector, attend
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.cache import retype
from sparse_decode.caches.growing import Owned
from sparse_decode.cuda import encode, encode_weights
from sparse_decode.cuda import pages as cuda_pages
from sparse_decode.inputs import Inputs
from sparse_decode.intervals import causal
from sparse_decode.reference import step_reference
from sparse_decode.step import SparseLayer
from sparse_decode.sums import FOLD
from transformers.cache_utils import DynamicLayer, StaticLayer

pytest.importorskip("cuda.core", reason="cuda-core comes with the extra hashcore[cuda]")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the other files run on the CPU"),
]
# variant, head_dim, bits, hidden, planes
HASHERS = [("planes", 128, 256, 96, 8), ("transform", 64, 128, 64, 6), ("transform", 80, 64, 300, 1)]
HASHERS += [("lsh", 64, 128, 64, 1), ("linear", 80, 96, 64, 1), ("paper", 48, 128, 96, 1)]
UNUSED = torch.tensor([-1])


def there(given):
    return [x.cuda() for x in given]


@pytest.mark.parametrize("kind", [*KINDS[:3], (256, 256, torch.float16)])
@pytest.mark.parametrize("group", [1, 7, 16])
@pytest.mark.parametrize("width", [1, 17, 600, 5000])
def test_equals_the_cpu(kind, group, width):
    """What is not selected is NaN."""
    q, k, v, indices = make(kind, group, 2, 3000, width, batch=2, queries=2, seed=width, unused=UNUSED)
    scaling, sinks = kind[0] ** -0.5, torch.linspace(-3, 3, 2 * group)
    for softcap, sink in ((None, None), (5.0, sinks)):
        given = there((q, *poisoned(k, v, indices), indices))
        ours = attend(*given, scaling, softcap=softcap, sinks=None if sink is None else sink.cuda())
        torch.testing.assert_close(ours.cpu(), expected(q, k, v, indices, scaling, softcap, sink), **CLOSE[q.dtype])


def test_the_answer_is_the_same_every_time():
    inputs = there(make(KINDS[0], 7, 4, 100_000, 2000, unused=UNUSED))
    first = attend(*inputs, 0.1)
    assert all(torch.equal(attend(*inputs, 0.1), first) for _ in range(50))


def assert_nearly_equal(ours, theirs):
    """All bits are alike but those of a number beside a threshold: sums have another order on the device."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert (hashcore.unpack(ours.cpu()) != hashcore.unpack(theirs)).double().mean() < 2e-3


@pytest.mark.parametrize(("variant", "dim", "bits", "hidden", "planes"), HASHERS)
@pytest.mark.parametrize(
    ("batch", "tokens", "dtype", "narrow"), [(1, 1, torch.bfloat16, False), (2, 3, torch.float16, True)]
)
def test_hashed_tokens_are_those_of_the_layer(variant, dim, bits, hidden, planes, batch, tokens, dtype, narrow):
    """Keys and queries at once and apart, per KV head and per query head; narrow: matrices of 16 bits."""
    config = HasherConfig(variant, ModelShape(1, 6, 2, dim), bits=bits, hidden=hidden, planes=planes)
    layer = make_layer(config, 0, 0).requires_grad_(False)
    if narrow:
        layer.round_matrices()
    own = encode_weights.place(layer, torch.device("cuda"))
    if narrow:
        assert {x.dtype for x in encode_weights.matrices(own.key)} == {torch.float16}
    draw = torch.Generator().manual_seed(0)
    k, q = (torch.randn(batch, heads, tokens, dim, generator=draw).mul(3).to(dtype) for heads in (2, 6))
    for per_query_head in (False, True):
        heads, words = encode_weights.code_shape(layer, per_query_head)
        codes = layer.encode_keys(k, per_query_head=per_query_head)
        planes_of = layer.encode_queries(q, per_query_head=per_query_head)[0]
        room = torch.zeros(batch, heads, tokens + 5, words, dtype=torch.int32, device="cuda")
        encode.tokens(own, per_query_head, k.cuda(), room, torch.tensor(2, device="cuda"))
        assert_nearly_equal(room[:, :, 2:-3], codes)
        assert not room[:, :, :2].any()
        assert not room[:, :, -3:].any()
        assert_nearly_equal(encode.tokens(own, per_query_head, q=q.cuda())[0], planes_of)
        part = room[:, :, :tokens]
        assert_nearly_equal(encode.tokens(own, per_query_head, k.cuda(), part, q=q.cuda())[0], planes_of)
        assert_nearly_equal(part, codes)


def padding(n):
    return torch.tensor([[[0, n]], [[9, n]], [[40, n]]])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_are_those_of_the_reference(static, padded, dtype):
    """With a remainder; the reference searches the codes that the device has made."""
    hasher = Hasher(HasherConfig("planes", ModelShape(1, 4, 2, 64), bits=128), 0).eval().requires_grad_(False)
    fitted = torch.tensor([[-1.0, 0.4, 0.5, 0.1, -0.2, 0.6]]).repeat(4, 1)
    selector, budget, cuda = HashSelector(hasher), LayerBudget(0.1, sink=1, recent=2), torch.device("cuda")
    layer = SparseLayer(0, selector, budget, None, fitted, device=cuda)
    draw, room = torch.Generator().manual_seed(0), 60 + FOLD + 4
    k, v = (torch.randn(3, 2, room, 64, generator=draw).to(dtype) for _ in range(2))
    held = retype(StaticLayer(100) if static else DynamicLayer(), Owned(), layer.encoder)
    held.update(*there((k[:, :, :60], v[:, :, :60])))
    if static:
        starts = padding(60)[:, 0, 0] if padded else torch.zeros(3, dtype=torch.int64)
        held.sums.advance(k.cuda(), v.cuda(), starts.cuda(), 60, cuda)
    for n in range(61, room + 1):
        q = torch.randn(3, 4, 1, 64, generator=draw).to(dtype)
        keys, values = held.update(*there((k[:, :, n - 1 : n], v[:, :, n - 1 : n])))
        interval = padding(n) if padded else causal(3, 1, n, torch.device("cpu"))
        seen = interval.cuda() if static or padded else None
        out = layer.step(Inputs(q.cuda(), keys, values, 0.125), seen, held)
        codes, (planes, weights) = held.codes[:, :, :n].cpu(), selector.encode_queries(0, q.cuda())
        of_row = {"b": -1}

        def keys_of(_, x, codes=codes, of_row=of_row):
            of_row["b"] += 1
            return codes[of_row["b"] : of_row["b"] + 1]

        def queries_of(_, x, planes=planes, weights=weights, of_row=of_row):
            return planes.cpu()[of_row["b"] : of_row["b"] + 1], weights

        own = SimpleNamespace(encode_keys=keys_of, encode_queries=queries_of)
        alike = SimpleNamespace(layer=0, selector=own, budget=budget, remainder=layer.remainder)
        theirs = step_reference(alike, Inputs(q, k[:, :, :n], v[:, :, :n], 0.125), interval)
        torch.testing.assert_close(out.cpu(), theirs, rtol=2e-2, atol=2e-2)


def on_device(batch, budget, longest):
    lengths = torch.tensor(batch.lengths, dtype=torch.int32).cuda()
    return cuda_pages.DeviceStep.of(batch.blocks.cuda(), lengths, budget, batch.size, longest)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_step_over_pages_is_that_of_the_cpu(name, size):
    layer = layer_of()
    batch = Batch(LENGTHS, size, torch.bfloat16, layer)
    theirs = layer.decode(batch.q, batch.pages, batch.step(BUDGETS[name]))
    batch.moved(torch.Tensor.cuda)
    out = cuda_pages.decode(layer, batch.q.cuda(), batch.pages, on_device(batch, BUDGETS[name], 1500))
    torch.testing.assert_close(out.cpu(), theirs, **CLOSE[torch.bfloat16])


def test_codes_go_to_their_slots():
    batch = Batch([100, 40], 16, torch.bfloat16, layer_of())
    before = batch.pages.codes.clone()
    slots, codes = torch.tensor([17, -1, 40]), torch.randint(-(2**31), 2**31, (3, 2, 4)).int()
    before[1, :, 1], before[2, :, 8] = codes[0], codes[2]
    batch.moved(torch.Tensor.cuda)
    cuda_pages.OPERATORS.place_codes(codes.cuda(), slots.cuda(), batch.pages.codes)
    assert torch.equal(batch.pages.codes.cpu(), before)


def test_a_graph_over_pages_replays_at_other_lengths():
    """Captured for the longest context, the step included; replayed as requests grow."""
    layer, budget = layer_of(), LayerBudget(0.1, sink=2, recent=3)
    batch = Batch([700, 400], 16, torch.bfloat16, layer)
    host = batch.pages
    batch.moved(torch.Tensor.cuda)
    q, blocks, lengths = batch.q.cuda(), batch.blocks.cuda(), torch.tensor([700, 400], dtype=torch.int32).cuda()

    def step():
        made = cuda_pages.DeviceStep.of(blocks, lengths, budget, 16, 700)
        return cuda_pages.decode(layer, q, batch.pages, made)

    step()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for ends in ([700, 400], [33, 399], [600, 1]):
        lengths.copy_(torch.tensor(ends))
        graph.replay()
        batch.lengths = ends
        torch.testing.assert_close(out.cpu(), layer.decode(batch.q, host, batch.step(budget)), **CLOSE[torch.bfloat16])
