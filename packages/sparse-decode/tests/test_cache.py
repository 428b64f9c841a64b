"""The law of the coded cache layer: its codes are those of its keys, after anything that is done to it."""

import copy

import hashcore
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode import cache
from sparse_decode.cache import CodedLayer, carry_codes, drop_codes
from transformers.cache_utils import DynamicLayer

WEIGHTS = torch.randint(0, 2, (2, 16, 128), generator=torch.Generator().manual_seed(0)).float() * 2 - 1


def encode(k):
    return hashcore.pack(k @ WEIGHTS)  # whole numbers times signs: exact


def check(layer):
    if layer.get_seq_length():
        assert torch.equal(layer.codes, encode(layer.keys))
    else:
        assert len(layer.buffer) == 0


def update(layer, tokens, seed, batch=2):
    batch = layer.keys.shape[0] if layer.is_initialized else batch  # cropped to nothing, a layer keeps its batch size
    k, v = torch.randint(-4, 5, (2, batch, 2, tokens, 16), generator=torch.Generator().manual_seed(seed)).float()
    keys, _ = layer.update(k, v)
    assert torch.equal(keys, layer.keys)


def act(layer, name, size, seed):
    """Do one of the things that generation does to a layer, and return the layer to go on with."""
    length = layer.get_seq_length()
    batch = layer.keys.shape[0] if length else 0
    if name == "update" or not length:
        update(layer, size, seed)
    elif name == "crop":
        layer.crop(-min(size, length))
    elif name == "reset":
        layer.reset()
    elif name == "reorder":
        layer.reorder_cache(torch.randint(0, batch, (batch,), generator=torch.Generator().manual_seed(seed)))
    elif name == "repeat" and batch < 8:
        layer.batch_repeat_interleave(size)
    elif name == "select":
        layer.batch_select_indices(torch.randperm(batch, generator=torch.Generator().manual_seed(seed))[:size])
    elif name == "copy":
        twin = copy.deepcopy(layer)
        update(layer, 1, seed + 1)  # must not show in the copy
        return twin
    return layer


ACTS = st.sampled_from(["update", "update", "crop", "reset", "reorder", "repeat", "select", "copy"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ACTS, st.integers(1, 3), st.integers(0, 99), st.booleans()), max_size=20), st.integers(0, 3))
def test_codes_are_those_of_the_cached_keys_after_anything(acts, prefilled):
    layer = DynamicLayer()
    if prefilled:
        update(layer, prefilled, seed=7)
    layer = carry_codes(layer, encode)
    for name, size, seed, look in acts:
        layer = act(layer, name, size, seed)
        if look:
            check(layer)
    check(layer)


OVERRIDES = ["crop", "reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"]
TOUR = ["update", "crop", "update", "reorder", "update", "repeat", "select", "update", "reset", "update"]


def tour():
    layer = carry_codes(DynamicLayer(), encode)
    for seed, name in enumerate(TOUR):
        layer = act(layer, name, 2, seed)
        check(layer)


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_law_breaks_without(name, monkeypatch):
    tour()
    monkeypatch.setattr(CodedLayer, name, getattr(DynamicLayer, name))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        tour()


def test_each_key_is_hashed_once_and_when_it_arrives():
    hashed = []

    def counting(k):
        hashed.append(k.shape[2])
        return encode(k)

    layer = carry_codes(DynamicLayer(), counting)
    for seed in range(4):
        update(layer, 3, seed)
    assert hashed == [3, 3, 3, 3]
    layer.crop(-5)
    update(layer, 1, 9)
    check(layer)
    assert hashed == [3, 3, 3, 3, 1]


def test_a_long_prefill_is_hashed_in_pieces(monkeypatch):
    monkeypatch.setattr(cache, "_CHUNK", 4)
    layer = DynamicLayer()
    update(layer, 11, 0)
    check(carry_codes(layer, encode))


def test_appending_does_not_copy_the_codes_before():
    layer = carry_codes(DynamicLayer(), encode)
    update(layer, 100, 0)
    places = set()
    for seed in range(60):
        update(layer, 1, seed)
        places.add(layer.codes.data_ptr())
    assert len(places) == 1
    check(layer)


def test_retyping_keeps_the_object_and_can_be_undone():
    layer = DynamicLayer()
    update(layer, 3, 0)
    coded = carry_codes(layer, encode)
    assert coded is layer
    check(coded)
    buffer = coded.buffer
    assert carry_codes(coded, encode).buffer is buffer
    other = carry_codes(coded, lambda k: ~encode(k))
    assert torch.equal(other.codes, ~encode(layer.keys))
    drop_codes(other)
    assert type(layer) is DynamicLayer
    assert not hasattr(layer, "buffer")
