"""The copy of codes' first words beside the codes of a GPU's cache: always that of the codes, and given to searches."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import TENTH, beyond_dense, config_of, fake_gpu, told
from hashcore import torch_ops
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, HashSelector, attach
from sparse_decode.caches import buffer
from sparse_decode.caches.buffer import CodeBuffer, keeps_first_words
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.cache_types import carry_codes
from sparse_decode.hashing import encode_cuda, encode_weights
from sparse_decode.layer.blocks import RowRule
from sparse_decode.layer.plan import LayerPlan
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from sparse_decode_layers import ACTS, KINDS, RESIZABLE, ROOM, encode, make, update
from sparse_decode_simulated import device, inside
from test_encode_cuda import CASES, layer_of
from transformers.cache_utils import StaticLayer

LISTED = Budget(0.1, shortlist=4)


@pytest.fixture
def kept(monkeypatch):
    """Caches in host memory keep first words, too."""
    for module in (buffer, "sparse_decode.caches.cache", "sparse_decode.costs.forecast"):
        place = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{place}.keeps_first_words", lambda wanted, device: wanted)


def check(layer):
    codes = layer.codes
    if layer.get_seq_length():
        assert torch.equal(layer.first_words, codes[..., 0])
        assert layer.first_words.stride(-1) == 1
    elif not isinstance(codes, torch.Tensor) or not codes.shape[2]:
        assert layer.first_words is None


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_the_codes_after_everything_that_is_done_to_a_cache(kept, kind, act):
    layer = make(kind, Encoder(encode, lists=True))
    for tokens, seed in ((9, 0), (1, 1), (1, 2)):
        update(layer, tokens, seed)
        check(layer)
    resizes = act in ("crop", "batch_repeat_interleave", "batch_select_indices")
    if not resizes or kind in RESIZABLE:
        ACTS[act](layer)
        if layer.get_seq_length():
            check(layer)
        update(layer, 2, 3)
        check(layer)
    twin = copy.deepcopy(layer)
    update(twin, 1, 4)
    check(twin)
    check(layer)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_counted_and_only_kept_for_a_shortlist(kept, kind):
    sizes = []
    for lists in (False, True):
        layer = make(kind, Encoder(encode, lists=lists))
        update(layer, ROOM, 0)
        sizes.append(layer.memory()[1])
        assert (layer.first_words is not None) == lists
    assert sizes[1] - sizes[0] == 2 * 2 * ROOM * 4


def test_a_cpu_keeps_none():
    assert [keeps_first_words(wanted, torch.device("cpu")) for wanted in (False, True)] == [False, False]
    assert [keeps_first_words(wanted, torch.device("cuda")) for wanted in (False, True)] == [False, True]
    buffer = CodeBuffer(lists=True)
    buffer.append(torch.ones(1, 2, 3, 4, dtype=torch.int32))
    assert buffer.first is None


def test_generation_with_them_is_generation_without(monkeypatch, kept):
    """The search gets them; on the CPU it reads the codes themselves."""
    model, (ids, _), given = tiny_model(), prompts((40,)), []
    search = torch_ops.search

    def listening(query, keys, *more, first, **how):
        given.append(first)
        assert torch.equal(first, keys[..., 0])
        return search(query, keys, *more, first=first, **how)

    monkeypatch.setattr(torch_ops, "search", listening)
    texts = []
    for budget in (Budget(0.2), Budget(0.2, shortlist=3)):
        with attach(model, SignHasher(), budget):
            texts.append(generate(model, ids))
    assert given
    assert torch.equal(*texts)  # a list of so few tokens is everything


@pytest.mark.sample(1)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("name", ["transform", "planes-256", "lsh", "paper"])
def test_the_kernel_that_hashes_a_key_writes_its_first_word_twice(name, per_query_head):
    layer = layer_of(*CASES[name])
    k = torch.randn(2, layer.hkv, 3, layer.d).bfloat16()
    weights, digits = encode_weights.weights_of(layer, "key"), encode_weights.digits_of(layer)
    heads, words = encode_weights.code_shape(layer, per_query_head)
    codes = torch.zeros(2, heads, 9, words, dtype=torch.int32)
    first = torch.full((2, heads, 11), 7, dtype=torch.int32)
    encode_cuda.hash_keys(inside(k), weights, digits, codes, torch.tensor(4), first[:, :, :9], run=device(5))
    assert torch.equal(first[:, :, 4:7], codes[:, :, 4:7, 0])
    assert (first[:, :, :4] == 7).all()
    assert (first[:, :, 7:] == 7).all()
    again = torch.zeros_like(codes)  # the launch that is kept has no copy to write any more
    encode_cuda.hash_keys(inside(k), weights, digits, again, torch.tensor(4), run=device(5))
    assert torch.equal(again, codes)
    cpus = torch.full_like(first, 7)
    encode_cuda.OPERATORS.hash_keys(k.float(), weights, digits, again, torch.tensor(4), cpus)
    assert torch.equal(cpus[:, :, 4:7], again[:, :, 4:7, 0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["plain", "host", "beam"])
def test_a_search_of_a_gpu_gets_them_side_by_side(kind, monkeypatch):
    """The key is hashed in a launch of its own then, as it always is where keys are in host memory."""
    seen, search = [], torch_ops.OPERATORS.search

    def listening(*given):
        seen.append(given[13])
        return search(*given)

    monkeypatch.setattr("sparse_decode.select.OPERATORS", SimpleNamespace(search=listening))
    listed, whole = (beyond_dense("llama", "transform", budget, kind) for budget in (LISTED, TENTH))
    given = [first for first in seen if first is not None]  # the others are those of the budget without a list
    assert given
    assert all(first.device.type == "cuda" and first.stride(-1) == 1 for first in given)
    assert listed.launches - whole.launches == (1 if kind == "host" else 2)


def test_a_static_cache_of_a_gpu_has_them_only_for_a_shortlist():
    config = config_of("llama")
    hasher = Hasher(HasherConfig("transform", ModelShape.of(config)), 0)
    for budget, wanted in ((LISTED, True), (TENTH, False)):
        with fake_gpu():
            plan = LayerPlan(0, HashSelector(hasher), budget, RowRule(None, 1))
            layer = carry_codes(StaticLayer(ROOM), plan.encoder)
            k = torch.zeros(2, 2, 1, 64, dtype=torch.bfloat16, device="cuda")
            with told(0):
                layer.update(k, k)
            assert (layer.first_words is not None) == wanted
            if wanted:
                assert layer.first_words.shape == (2, 2, ROOM)
