"""The law of the coded cache layers: their codes are those of their keys, after anything that is done to them."""

import copy
import pickle

import pytest
import torch
from sparse_decode.caches.cache import Coded
from sparse_decode.caches.cache_encoder import Encoder
from sparse_decode.caches.cache_types import carry_codes
from sparse_decode.sums import Sums
from sparse_decode_layers import (
    ACTS,
    KINDS,
    RESIZABLE,
    check,
    check_all,
    check_means,
    encode,
    make,
    stored,
    update,
)
from transformers.cache_utils import DynamicLayer

OVERRIDES = {
    "dynamic": tuple(ACTS),
    "host": tuple(ACTS),
    "static": ("update", "reorder_cache", "lazy_initialization"),
}


def tour(kind):
    """Do everything that a layer of this kind allows, looking at its codes after each."""
    layer = make(kind)
    update(layer, 5, 0)
    check_all(layer)
    for name in ACTS if kind in RESIZABLE else ("update", "reorder_cache", "reset"):
        ACTS[name](layer)
        check(layer)
        # More tokens than were dropped, or stale sums would look too long and be made anew.
        update(layer, 40 if name == "reset" else 4, 7, layer.codes.shape[0] if layer.get_seq_length() else 3)
        check_all(layer)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in OVERRIDES[kind]])
def test_the_law_breaks_without(kind, name, monkeypatch):
    tour(kind)
    coded = KINDS[kind][1]
    owner = next(part for part in coded.__mro__ if name in vars(part))
    monkeypatch.setattr(owner, name, getattr(coded.plain, name))
    monkeypatch.setattr(Coded, "settle", lambda layer: None)
    with pytest.raises((AssertionError, RuntimeError, IndexError, TypeError, AttributeError, ValueError)):
        tour(kind)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in RESIZABLE for name in OVERRIDES[kind]])
def test_what_a_plain_method_does_behind_our_back_is_noticed(kind, name, monkeypatch):
    owner = next(part for part in KINDS[kind][1].__mro__ if name in vars(part))
    monkeypatch.setattr(owner, name, getattr(DynamicLayer, name))
    layer = make(kind)
    update(layer, 5, 0)
    ACTS[name](layer)
    check_all(layer) if layer.get_seq_length() else update(layer, 3, 1)
    update(layer, 4, 7)
    check_all(layer)


def prune(layer):
    """Keep the first and the last tokens, as presses do."""
    keys, values = stored(layer)
    layer.keys, layer.values = (torch.cat([x[:, :, :2], x[:, :, -2:]], dim=2).contiguous() for x in (keys, values))


def scale(layer):
    layer.keys[:, :, 1:3] *= -1
    layer.values.add_(1)


def shorten(layer):
    """A static layer cropped by hand."""
    layer.cumulative_length.sub_(3)


EDITS = [(kind, edit) for kind in RESIZABLE for edit in (prune, scale)] + [("static", scale), ("static", shorten)]


@pytest.mark.parametrize(("kind", "edit"), EDITS)
@pytest.mark.parametrize("then", ["update", "reorder_cache", "copy", "nothing"])
def test_what_others_do_to_keys_and_values_is_noticed(kind, edit, then):
    layer = make(kind)
    update(layer, 9, 0)
    check_all(layer)
    edit(layer)
    length = int(layer.get_seq_length())
    if then == "copy":
        layer = copy.deepcopy(layer)
        check_all(layer)
        edit(layer)
        length = int(layer.get_seq_length())
    elif then != "nothing":
        ACTS[then](layer)
    assert int(layer.get_seq_length()) == length + 3 * (then == "update")
    check_all(layer)
    update(layer, 8, 3)
    check_all(layer)


def test_edits_in_inference_mode_of_what_was_made_there_are_noticed():
    with torch.inference_mode():
        layer = DynamicLayer()
        update(layer, 9, 0)
        carry_codes(layer, Encoder(encode))
        scale(layer)
        check_all(layer)
    update(layer, 2, 1)
    scale(layer)
    check_all(layer)


def test_a_layer_with_fewer_values_than_keys_is_refused():
    layer = make("dynamic")
    update(layer, 6, 0)
    layer.keys = layer.keys[:, :, :3]
    with pytest.raises(ValueError, match=r"as many keys as values, got \(2, 2, 3, 16\) and \(2, 2, 6, 16\)"):
        update(layer, 1, 1)


def test_nothing_is_hashed_twice_while_nobody_else_touches_a_layer():
    hashed = []
    layer = make("dynamic", Encoder(lambda k: (hashed.append(k.shape[2]), encode(k))[1]))
    update(layer, 9, 0)
    for act in ("reorder_cache", "batch_repeat_interleave", "crop", "update", "batch_select_indices"):
        ACTS[act](layer)
        check_all(layer)
    check(copy.deepcopy(layer))
    assert hashed == [9, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_pickled_layer_is_a_plain_one_of_the_same_tokens(kind, way):
    layer = make(kind)
    update(layer, 9, 0)
    check_all(layer)
    twin = way(layer)
    assert type(twin) is KINDS[kind][1].plain
    assert not {"encoder", "sums", "_codes", "_marks"} & set(vars(twin))
    assert twin.keys.untyped_storage().nbytes() == twin.keys.nbytes
    before = stored(layer)
    update(twin, 3, 1)
    assert torch.equal(stored(layer)[0], before[0])
    check_all(layer)
    carry_codes(twin, Encoder(encode), KINDS[kind][1])
    check_all(twin)


GUARDS = {"drop": RESIZABLE, "map_batch": tuple(KINDS)}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for name, kinds in GUARDS.items() for kind in kinds])
def test_the_means_break_without(kind, name, monkeypatch):
    monkeypatch.setattr(Sums, name, lambda *arguments: None)
    with pytest.raises(AssertionError):
        tour(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_sums_only_what_is_new(kind):
    layer = make(kind)
    update(layer, 9, 0)
    check_means(layer, None, 1)
    update(layer, 1, 1)
    k, v = stored(layer)
    expected = Sums().advance(k, v, None, 10, k.device)
    poisoned = (x.index_fill(2, torch.arange(9), torch.nan) for x in (k, v))
    for found, wanted in zip(layer.sums.advance(*poisoned, None, 10, k.device), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


def test_what_a_static_layer_adds_stays_in_place_and_is_empty_after_a_reset():
    layer = make("static")
    update(layer, 6, 0)
    check_means(layer, None, 1)
    added = [layer.codes, *layer.sums.tensors]
    assert all(hasattr(x, "_dynamo_static_input_type") for x in added)  # as torch._dynamo.mark_static_address says it
    assert layer.codes.any()
    layer.reset()
    assert layer.codes is added[0]
    assert not layer.codes.any()


@pytest.mark.parametrize("kind", RESIZABLE)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_leave_the_sums_with_the_tokens_that_are_cropped(kind, bad):
    layer, other = make(kind), make(kind)
    for one, last in ((layer, bad), (other, 1.0)):
        update(one, 9, 0)
        k, v = torch.full((2, 2, 2, 3, 16), 2.0)
        k[1, :, 1] = last
        one.update(k, v)
        one.sums.advance(*stored(one), None, 12, k.device)
        one.crop(-3)
    found, expected = (one.sums.advance(*stored(one), None, 9, torch.device("cpu")) for one in (layer, other))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[0], y[0])
        torch.testing.assert_close(x[1], y[1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_reset_the_means_are_those_of_the_new_text(kind):
    layer = make(kind)
    update(layer, 6, 0)
    check_all(layer)
    layer.reset()
    update(layer, 9, 1)  # of as many sequences and longer: the sums of the old text would fit
    check_all(layer)


def test_reordering_an_empty_static_layer_leaves_its_room():
    layer = make("static")
    update(layer, 6, 0)
    layer.reset()
    layer.reorder_cache(torch.tensor([0]))
    update(layer, 6, 1)
    check(layer)
