"""Cache layers that grow in place are plain ones in all but where they keep what they hold."""

from weakref import WeakSet

import pytest
import torch
from sparse_decode import attach, interface
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.growing import GrowingLayer, grow, revert
from sparse_decode_doubles import SignHasher, prompts, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def drawing(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda batch, tokens: torch.randn(batch, 2, tokens, 4, generator=generator)


def filled(seed=0):
    layer, draw = DynamicLayer(), drawing(seed)
    layer.update(draw(2, 5), draw(2, 5))
    return layer


def test_tokens_are_written_behind_the_others_and_after_a_crop_elsewhere():
    layer, draw = filled(), drawing(1)
    grow(layer, WeakSet())
    places, kept = [], []
    for removed in (0, 2, 5):
        layer.crop(-removed)
        kept += [(x, x.clone()) for x in (layer.keys, layer.values)]
        for _ in range(3):
            layer.update(draw(2, 2), draw(2, 2))
            places.append((layer.keys.data_ptr(), layer.values.data_ptr()))
            assert all(torch.equal(x, before) for x, before in kept)
    assert places[:3] == [places[0]] * 3
    assert len(set(places)) == 3


def test_a_stopped_layer_is_plain():
    layer, draw = filled(), drawing(1)
    grow(layer, WeakSet())
    layer.update(draw(2, 1), draw(2, 1))
    revert(layer)
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
