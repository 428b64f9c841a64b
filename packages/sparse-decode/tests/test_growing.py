"""Cache layers that grow in place are plain ones in all but where they keep what they hold."""

import copy
import pickle
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode import attach, interface
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.growing import GrowingLayer, grow, stop_growing
from sparse_decode_doubles import SignHasher, prompts, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ACTS = {
    "one token": lambda layer, draw: layer.update(draw(len(layer.keys), 1), draw(len(layer.keys), 1)),
    "three tokens": lambda layer, draw: layer.update(draw(len(layer.keys), 3), draw(len(layer.keys), 3)),
    "crop": lambda layer, draw: layer.crop(-min(2, layer.get_seq_length() - 1)),
    "reorder": lambda layer, draw: layer.reorder_cache(torch.arange(len(layer.keys)).flip(0)),
    "repeat": lambda layer, draw: layer.batch_repeat_interleave(2),
    "select": lambda layer, draw: layer.batch_select_indices(torch.tensor([0])),
    "press": lambda layer, draw: (
        setattr(layer, "keys", layer.keys[:, :, ::2]) or setattr(layer, "values", layer.values[:, :, ::2])
    ),
    "write": lambda layer, draw: layer.keys[:, :, :1].zero_(),
}


def drawing(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda batch, tokens: torch.randn(batch, 2, tokens, 4, generator=generator)


def filled(seed=0):
    layer, draw = DynamicLayer(), drawing(seed)
    layer.update(draw(2, 5), draw(2, 5))
    return layer


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from([*ACTS, "copy", "pickle"]), max_size=14))
def test_whatever_is_done_to_it_it_holds_what_a_plain_one_holds(acts):
    plain, growing, held = filled(), filled(), WeakSet()
    grow(growing, held)
    for step, act in enumerate(acts):
        if act == "copy":
            growing = copy.deepcopy(growing)
        elif act == "pickle":
            growing = pickle.loads(pickle.dumps(growing))
        else:
            for layer in (plain, growing):
                if len(layer.keys) < 9 or act != "repeat":
                    ACTS[act](layer, drawing(step))
        if act in ("copy", "pickle"):
            assert type(growing) is DynamicLayer
            assert growing.keys.untyped_storage().nbytes() == growing.keys.nbytes, "without the room behind it"
            grow(growing, held)
        assert torch.equal(plain.keys, growing.keys)
        assert torch.equal(plain.values, growing.values)
        assert plain.get_seq_length() == growing.get_seq_length()


def test_tokens_are_written_behind_the_others_also_after_a_crop():
    layer, draw = filled(), drawing(1)
    grow(layer, WeakSet())
    layer.update(draw(2, 1), draw(2, 1))
    where = layer.keys.data_ptr(), layer.values.data_ptr()
    for _ in range(3):
        layer.update(draw(2, 4), draw(2, 4))
        layer.crop(-3)
        assert (layer.keys.data_ptr(), layer.values.data_ptr()) == where


def test_others_who_hold_the_tensors_see_no_change():
    layer, draw = filled(), drawing(1)
    mine = layer.keys
    before = mine.clone()
    grow(layer, WeakSet())
    for _ in range(3):
        layer.update(draw(2, 1), draw(2, 1))
        assert torch.equal(mine, before)


def test_a_stopped_layer_is_plain():
    layer, draw = filled(), drawing(1)
    grow(layer, WeakSet())
    layer.update(draw(2, 1), draw(2, 1))
    stop_growing(layer)
    assert type(layer) is DynamicLayer
    assert vars(layer).keys() == vars(filled()).keys()


@pytest.mark.parametrize("below", [30, 1000])
def test_a_cache_carries_codes_from_the_break_even_on(below, monkeypatch):
    """Before, its layers are plain ones, then plain ones that grow; all are plain after detach."""
    model, ids = tiny_model(), prompts((40,))[0]
    monkeypatch.setattr(interface, "FROM", 20)
    cache, kinds = DynamicCache(config=model.config), []
    with attach(model, SignHasher(), LayerBudget(0.1, dense_below=below)) as attachment:
        for first, last in ((0, 10), (10, 11), (11, 20), (20, 21), (21, 35), (35, 36)):
            model(ids[:, first:last], past_key_values=cache)
            kinds.append({type(layer).__name__ for layer in cache.layers})
        sizes = attachment.memory(cache)
    plain, growing, coded = ({f"{name}DynamicLayer"} for name in ("", "Growing", "Coded"))
    growing = {GrowingLayer.__name__}
    assert kinds == [plain, plain, plain, growing, *([coded] * 2 if below == 30 else [growing] * 2)]
    assert sizes == (4 * 2 * 2 * 36 * 16 * 4, 4 * 2 * 36 * 16 if below == 30 else 0)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    assert cache.get_seq_length() == 36
