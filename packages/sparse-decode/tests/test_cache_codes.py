"""Codes of cached keys: when they are hashed, what they take, and how a layer comes to have them and loses them."""

import copy

import pytest
import torch
from sparse_decode.caches import cache_encoder
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.cache_types import carry_codes, coded_type
from sparse_decode.caches.growing import revert
from sparse_decode.caches.offload import HostLayer
from sparse_decode_doubles import RoundedLayer
from sparse_decode_layers import KINDS, ROOM, cached_keys, check, encode, make, update
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def test_keys_of_dense_steps_are_hashed_when_they_are_needed_and_in_their_order():
    hashed = []

    def counting(k):
        hashed.append(k.shape[2])
        return encode(k)

    layer = make("dynamic", Encoder(counting))
    update(layer, 20, 0)  # prefill: at once
    for seed in range(3):
        update(layer, 1, seed)
    layer.crop(-1)
    assert hashed == [20]
    update(layer, 30, 4)
    assert hashed == [20, 2, 30]
    assert torch.equal(layer.codes, encode(layer.keys))
    update(layer, 1, 5)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.codes, encode(layer.keys))
    assert hashed == [20, 2, 30, 1]


def test_a_long_prefill_is_hashed_in_pieces(monkeypatch):
    key = 2 * 2 * 128 * 4 * cache_encoder._WIDTHS + 1  # two sequences, two heads of 128 bits, in float32
    monkeypatch.setattr(cache_encoder, "_CHUNK", 20 * key)
    hashed = []
    layer = make("dynamic", Encoder(lambda k: (hashed.append(k.shape[2]), encode(k))[1]))
    update(layer, 50, 0)
    check(layer)
    assert hashed == [20, 20, 10]


@pytest.mark.parametrize("kind", ["dynamic", "host", "static"])
def test_appending_copies_nothing_that_was_there(kind):
    layer = make(kind)
    update(layer, 10, 0)
    places = set()
    for seed in range(40):
        update(layer, 1, seed)
        places.add((layer.codes.data_ptr(), layer.keys.data_ptr(), layer.values.data_ptr()))
    assert len(places) == 1
    check(layer)


def test_codes_are_sixteen_bytes_per_token_and_head():
    for kind in KINDS:
        layer = make(kind)
        update(layer, ROOM, 0)
        kv, codes = layer.memory()
        assert codes - layer.sums.nbytes == 2 * 2 * ROOM * 16
        assert kv == 2 * 2 * 2 * ROOM * 16 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_retyping_keeps_the_object_and_can_be_undone(kind):
    plain, coded = KINDS[kind]
    layer = plain()
    update(layer, 3, 0)
    before = type(layer)
    names = set(vars(layer))
    assert carry_codes(layer, Encoder(encode), coded) is layer
    check(layer)
    update(layer, 2, 1)
    check(layer)
    carry_codes(layer, Encoder(lambda k: ~encode(k)))  # another hasher takes it over
    assert torch.equal(layer.codes[:, :, :5], ~encode(cached_keys(layer)))
    revert(layer)
    assert type(layer) is before
    assert set(vars(layer)) == names
    update(layer, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_released_encoder_lets_go_of_copies_too_but_not_of_what_another_took_over(kind):
    first, second = Encoder(encode), Encoder(encode)
    layer = make(kind, first)
    update(layer, 3, 0)
    twin, taken = copy.deepcopy(layer), copy.deepcopy(layer)
    assert twin.encoder is first
    carry_codes(taken, second)
    first.release()
    assert type(layer) is type(twin) is layer.__class__
    assert not hasattr(layer, "encoder")
    assert not hasattr(twin, "encoder")
    check(taken)


def test_a_compiled_step_writes_the_codes_of_its_keys():
    layer = make("static")
    update(layer, 3, 0)
    step = torch.compile(layer.update, backend="eager", fullgraph=True)
    step(*torch.randint(-4, 5, (2, 2, 2, 1, 16)).float())
    assert int(layer.get_seq_length()) == 4
    check(layer)


@pytest.mark.parametrize("other", [DynamicSlidingWindowLayer(8), RoundedLayer()])
def test_other_layers_are_refused(other):
    assert coded_type(type(other)) is None
    with pytest.raises(ValueError, match=f"got {type(other).__name__}"):
        carry_codes(other, Encoder(encode))


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_is_hashed_once_also_of_a_layer_that_was_filled_before(kind):
    plain, coded = KINDS[kind]
    layer, hashed = plain(), []
    update(layer, 6, 0)
    carry_codes(layer, Encoder(lambda k: (hashed.append(k.shape[2]), encode(k))[1]), coded)
    check(layer)
    for seed in range(3):
        update(layer, 3, seed)
        check(layer)
    assert hashed == [1] * (kind == "static") + [6, 3, 3, 3]  # a static layer asks once for the codes' shape


def test_the_rows_of_a_filled_layer_go_to_the_host_and_come_back():
    with FakeTensorMode():  # tensors of a GPU that is not there
        layer = DynamicLayer()
        layer.update(*torch.zeros(2, 1, 2, 6, 16, device="cuda"))
        carry_codes(
            layer, Encoder(lambda k: torch.zeros(*k.shape[:3], 4, dtype=torch.int32, device=k.device)), HostLayer
        )
        assert {layer.keys.device.type, layer.values.device.type} == {"cpu"}
        assert layer.codes.device.type == "cuda"
        revert(layer)
        assert {layer.keys.device.type, layer.values.device.type} == {"cuda"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_layer_takes_no_memory(kind):
    assert make(kind).memory() == (0, 0)
