"""Selectors are copied, pickled, saved and forked, or refuse in one sentence.

So are attached models, their caches and their configs.
"""

import copy
import io
import os
import pickle
import signal
import threading

import check_families
import pytest
import torch
from hashtrain import Hasher
from sparse_decode import Attachment, Budget, attach
from sparse_decode.budget import LayerBudget, Tally
from sparse_decode.caches.cache import HYBRIDS
from sparse_decode.caches.growing import GrowingLayer
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from test_bad_rows import SELECTORS
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

WHOLE = Budget(1.0)
MODEL = tiny_model()


def saved(x):
    torch.save(x, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


WAYS = [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved]


def logits(selector):
    ids, _ = prompts((40,))
    with torch.no_grad(), Attachment(MODEL, selector, Budget(0.2), sparse_rows=0):
        cache = MODEL(ids[:, :38]).past_key_values
        return MODEL(ids[:, 38:39], past_key_values=cache).logits


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_selects_as_the_original(name, way):
    """And, of all but shallow copies, is another one."""
    selector = SELECTORS[name]()
    expected = logits(selector)
    twin = way(selector)
    if way is not copy.copy and (own := getattr(selector, "hasher", selector)) and isinstance(own, Hasher):
        for layer in own.layers:
            for x in layer.parameters():
                x.detach().zero_()
    assert torch.equal(logits(twin), expected)


@pytest.mark.parametrize("way", WAYS)
def test_an_attachment_is_refused(way):
    refused = pytest.raises(TypeError, match=r"cannot be copied or pickled; call detach\(\) first")
    with Attachment(MODEL, SignHasher(), sparse_rows=0) as attachment, refused:
        way(attachment)


@pytest.mark.parametrize("hasher", [SignHasher(), None])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())])
def test_copying_an_attached_model_is_refused_in_one_sentence(copied, hasher):
    """Shallow copies, too, which would keep this model's way to feed prompts, also when it is gone."""
    model, (ids, _) = tiny_model(), prompts((40,))
    dense = generate(model, ids)
    attachment = attach(model, hasher, WHOLE if hasher else None)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled; call detach\(\) first"):
        copied(model)
    attachment.detach()
    for way in (copy.copy, copy.deepcopy):
        assert torch.equal(generate(way(model), ids), dense)


PLAIN = [DynamicCache, DynamicLayer, StaticCache, StaticLayer, HYBRIDS[0]]


def saved_as_plain(x):
    """Write a cache, or an output with one, and read it as a plain one, which needs the names of transformers alone."""
    torch.save(x, file := io.BytesIO())
    assert b"sparse_decode" not in file.getvalue()
    with torch.serialization.safe_globals(PLAIN):
        return torch.load(io.BytesIO(file.getvalue()), weights_only=isinstance(x, Cache))  # it takes no output at all


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["dynamic", "growing", "host", "static", "hybrid"])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved_as_plain])
def test_the_cache_of_an_attached_model_can_be_kept(way, kind, monkeypatch):
    """Also as a part of what `generate` returns."""
    model, (ids, _) = check_families.build("falcon_h1", {}) if kind == "hybrid" else tiny_model(), prompts((40,))
    dense = generate(model, ids)
    monkeypatch.setattr("sparse_decode.interface.FROM", 4)
    budget, kv = LayerBudget(1.0, dense_below=100 * (kind == "growing")), "host" if kind == "host" else "device"
    with attach(model, SignHasher(), budget, dense_layers=0, kv=kv):
        cache = StaticCache(model.config, 64) if kind == "static" else DynamicCache(config=model.config)
        model(ids[:, :30], past_key_values=cache)
        model(ids[:, 30:31], past_key_values=cache)
        held = cache.layers[0]
        assert (held.encoder is None, held.on_host) == (kind == "growing", kind == "host")
        twin = way(cache)
        for name in ("conv_states", "recurrent_states") if kind == "hybrid" else ():
            assert torch.equal(getattr(twin.layers[0], name)[0], getattr(held, name)[0])
        assert torch.equal(generate(model, ids, past_key_values=twin), dense)
        found = way(generate(model, ids, past_key_values=cache, return_dict_in_generate=True))
        assert torch.equal(found.sequences, dense)
        assert found.past_key_values.get_seq_length() == dense.shape[1] - 1


def test_a_copy_of_a_cache_on_the_host_pins_its_rows_anew(monkeypatch):
    began = []
    monkeypatch.setattr(GrowingLayer, "begin", lambda layer, own=GrowingLayer.begin: began.append(layer) or own(layer))
    model, (ids, _) = tiny_model(), prompts((40,))
    with attach(model, SignHasher(), WHOLE, kv="host"):
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        assert copy.deepcopy(cache).layers[0] in began


AFTERWARDS = {
    "crop": lambda cache: cache.crop(-12),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
}


@pytest.mark.parametrize("kv", ["device", "host"])
@pytest.mark.parametrize("act", AFTERWARDS)
def test_tensors_that_a_cache_has_shown_are_not_written_again(act, kv, monkeypatch):
    """In sparse and in dense layers, of which those of index 1 have been plain until they grew."""
    monkeypatch.setattr("sparse_decode.interface.FROM", 4)
    model, (ids, _) = tiny_model(), prompts((40, 40))
    dense = model(ids).logits[:, 36:]
    with attach(model, SignHasher(), WHOLE, dense_layers={1, 2}, kv=kv):
        cache = DynamicCache(config=model.config)
        for first, last in ((0, 30), *((n, n + 1) for n in range(30, 36))):
            model(ids[:, first:last], past_key_values=cache)
        kept = [(layer.keys, layer.values) for layer in cache.layers]
        AFTERWARDS[act](cache)
        for n in range(8):  # another text
            model(ids[:, n : n + 1].repeat(2, 1)[: len(cache.layers[0].keys)], past_key_values=cache)
    again = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(kept):
        again.update(keys, values, layer)
    torch.testing.assert_close(model(ids[:, 36:], past_key_values=again).logits, dense, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), copy.copy])
def test_a_config_copied_while_attached_belongs_to_nobody(way):
    model, (ids, _) = tiny_model(), prompts((40,))
    dense = generate(model, ids)
    with attach(model, SignHasher(), WHOLE):
        config = way(model.config)
        assert "sparse_decode" not in config.to_json_string()
    assert way is copy.copy or config._attn_implementation == "sdpa"
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(generate(other, ids), dense)
    with attach(other, SignHasher(), WHOLE):
        assert torch.equal(generate(other, ids), dense)
    assert other.config._attn_implementation == "sdpa"


def test_a_config_of_a_model_that_was_dropped_while_attached_is_free():
    model, (ids, _) = tiny_model(), prompts((40,))
    config, weights, dense = model.config, model.state_dict(), generate(model, ids)
    attach(model, SignHasher(), WHOLE)
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(weights)
    assert other.config is config
    with pytest.raises(ValueError, match=r"its config object; .* returned, or load the model again if that is lost"):
        attach(other, SignHasher())
    del model
    with attach(other, SignHasher(), WHOLE):
        assert torch.equal(generate(other, ids), dense)
    assert type(config._attn_implementation) is str


def test_a_model_saved_while_attached_is_a_plain_one(tmp_path):
    model, (ids, _) = tiny_model(), prompts((40,))
    with attach(model, SignHasher()):
        model.save_pretrained(tmp_path)
    assert "sparse_decode" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of a fork beside threads, which is meant
def test_a_fork_counts_while_another_thread_does():
    tally, stop = Tally(), threading.Event()

    def count():
        while not stop.is_set():
            tally.add(1, 2)

    thread = threading.Thread(target=count)
    thread.start()
    children = []
    for _ in range(8):
        if not (child := os.fork()):
            signal.alarm(5)  # a lock that was held in the fork would stay so
            tally.add(1, 2)
            os._exit(0)
        children.append(child)
    stop.set()
    thread.join()
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
