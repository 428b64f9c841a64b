"""Session files: a loaded cache continues as the saved one would, and no other file is taken for one."""

import hashlib
import itertools
import json
import math
import os
import re
import signal

import numpy as np
import pytest
import torch
from fuzz_damage import damaged
from safetensors import safe_open
from sparse_decode import Budget, HashSelector, OracleSelector, attach, session
from sparse_decode.caches.growing import GrowingLayer
from sparse_decode_doubles import SignHasher, generate, hasher_for, prompts, tiny_model
from transformers import DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import DynamicLayer

MUTATIONS = 400


def prefilled(model, ids, mask=None):
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, past_key_values=cache)
    return cache


def with_adapter(model, name="one", scale=1.0):
    part = model.model.layers[0].mlp
    part.lora_A = torch.nn.ParameterDict({"one": torch.ones(2), "other": torch.zeros(2)})  # as a layer of peft
    part.adapter_layer_names, part.disable_adapters, part.active_adapters = ("lora_A",), False, [name]
    part.scaling = {name: scale}
    return model


@pytest.fixture
def saved(tmp_path, monkeypatch, request):
    """A model with a hasher, its attachment, a prompt of 60 tokens, and the session file of all but its last."""
    monkeypatch.setattr(session, "ROOM", 1)
    model = with_adapter(tiny_model())
    ids, _ = prompts((60,))
    with attach(model, hasher_for(model, remainder=getattr(request, "param", True)), Budget(0.2)) as attachment:
        attachment.save(prefilled(model, ids[:, :-1]), tmp_path / "saved.kv", ids[:, :-1])
        yield attachment, ids, tmp_path / "saved.kv"


def hash_per_query_head(model):
    return HashSelector(hasher_for(model, remainder=False), per_query_head=True)


WAYS = {
    "remainder": ("llama", hasher_for, {}),
    "no remainder": ("llama", hasher_for, {"remainder": False}),
    "planes": ("llama", lambda model: hasher_for(model, "planes"), {}),
    "per query head": ("llama", hash_per_query_head, {}),
    "dense layers": ("llama", hasher_for, {"dense_layers": {0, 2}}),
    "below the break-even": ("llama", hasher_for, {"budget": None}),
    "kv on the host": ("llama", hasher_for, {"kv": "host"}),
    "sliding layers": ("gemma3", hasher_for, {}),
    "sinks": ("gpt_oss", hasher_for, {}),
    "no codes": ("llama", lambda model: OracleSelector(), {}),
    "no hasher": ("llama", lambda model: None, {}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("way", "lengths"), [("remainder", (60,)), *((way, (60, 41)) for way in WAYS)])
def test_a_loaded_session_continues_with_the_tokens_of_the_saved_cache(way, lengths, tmp_path, monkeypatch):
    """Also beyond the room of the file, which no step changes."""
    monkeypatch.setattr(session, "ROOM", 8)
    family, made, how = WAYS[way]
    model = tiny_model(family)
    ids, mask = prompts(lengths)
    with attach(model, made(model), **{"budget": Budget(0.2), **how}) as attachment:
        cache = prefilled(model, ids, mask)
        tokens = generate(model, *later(ids, mask), 4, past_key_values=cache)  # sums of some steps are stored, too
        attachment.save(cache, tmp_path / "saved.kv", tokens[:, :-1])
        stored = (tmp_path / "saved.kv").read_bytes()
        more, shown = later(tokens, torch.cat([mask, torch.ones(len(ids), tokens.shape[1] - ids.shape[1])], 1).long())
        wanted = generate(model, more, shown, 20, past_key_values=cache)
        loaded, held = attachment.load(tmp_path / "saved.kv", more)
        assert torch.equal(held, tokens[:, :-1])
        kinds = {type(layer) for layer in cache.layers} | {GrowingLayer}
        assert {type(layer) for layer in loaded.layers} <= kinds
        assert torch.equal(generate(model, more, shown, 20, past_key_values=loaded), wanted)
        assert (tmp_path / "saved.kv").read_bytes() == stored


def later(ids, mask):
    """A prompt that goes on behind another, and its mask."""
    new = torch.tensor([[7, 9, 11]]).expand(len(ids), -1)
    return torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)


def test_steps_in_the_room_write_to_the_mapped_arrays_and_beyond_it_to_memory(saved):
    attachment, ids, path = saved
    cache, _ = attachment.load(path)
    places = [layer.keys.data_ptr() for layer in cache.layers]
    room = cache.layers[0]._keys._data.shape[2]
    generate(attachment.model, ids, new_tokens=room - 60, past_key_values=cache)
    assert [layer.keys.data_ptr() for layer in cache.layers] == places
    assert cache.layers[0]._codes._data.shape[2] == room
    generate(attachment.model, torch.cat([ids, ids], 1), new_tokens=1, past_key_values=cache)
    assert all(layer.keys.data_ptr() not in places for layer in cache.layers)


@pytest.mark.parametrize("alike", [59, 1])
def test_a_prompt_that_differs_continues_behind_what_is_alike(saved, alike):
    """The last token of a prompt is left to the model."""
    attachment, ids, path = saved
    other = torch.cat([ids[:, :alike], ids[:, alike:] + 1, ids[:, :5]], 1)
    cache, tokens = attachment.load(path, other[0].tolist())
    assert torch.equal(tokens, ids[:, :alike])
    assert cache.get_seq_length() == alike
    wanted = prefilled(attachment.model, ids[:, :alike])
    assert torch.equal(*(generate(attachment.model, other, new_tokens=8, past_key_values=x) for x in (cache, wanted)))
    assert attachment.load(path, ids[:, :59])[1].shape == (1, 58)
    assert attachment.load(path)[1].shape == (1, 59)


def test_dense_layers_and_other_budgets_take_the_keys_of_a_file_with_codes(saved):
    attachment, ids, path = saved
    model, wanted = attachment.model, None
    attachment.detach()
    for hasher, how in ((None, {}), (hasher_for(model), {"dense_layers": {0, 1}, "budget": Budget(1.0)})):
        with attach(model, hasher, **how) as other:
            cache, _ = other.load(path, ids)
            coded = [layer.encoder is not None for layer in cache.layers]
            assert coded == [layer in other.layers for layer in range(4)]
            tokens = generate(model, ids, new_tokens=8, past_key_values=cache)
            assert wanted is None or torch.equal(tokens, wanted)
            wanted = tokens


def test_it_is_a_safetensors_file_with_holes_and_nothing_is_hashed_again(saved, monkeypatch):
    attachment, ids, path = saved
    monkeypatch.setattr(type(attachment._layers[0].encoder), "__call__", lambda *_: pytest.fail("keys were hashed"))
    cache, _ = attachment.load(path, ids)
    with safe_open(path, "pt") as file:
        for index, layer in enumerate(cache.layers):
            assert torch.equal(file.get_tensor(f"layers.{index}.keys")[:, :, :59], layer.keys)
            assert torch.equal(file.get_tensor(f"layers.{index}.codes")[:, :, :59], layer.codes)
        assert torch.equal(file.get_tensor("tokens"), ids[:, :-1])


def test_a_damaged_file_is_refused_in_one_sentence(saved):
    attachment, _, path = saved
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(MUTATIONS):
        if (data := damaged(rng, content)) != content:
            path.write_bytes(data)
            with pytest.raises(ValueError, match="is not a usable session file: ") as refused:
                attachment.load(path)
            assert "\n" not in str(refused.value)


def forgeries(header):
    """Headers with another text, or other numbers, in one place, or without what is there; values' are as keys'."""
    for name, entry in header.items():
        rest = {other: header[other] for other in header if other != name}
        for key, value in entry.items() if name[:8] in ("tokens", "layers.0", "__metada") else ():
            news = ["", "F32", "F64", "I32", "I64", "BF16"]
            if isinstance(value, list):
                pairs = itertools.product(range(len(value)), repeat=2)
                news = [[n << (at == i) >> (at == j) for at, n in enumerate(value)] for i, j in pairs]
                news += [value[::-1], [math.prod(value)], [*value, 1]]
            names = {name, name.replace("keys", "values")}
            yield from (header | {one: header[one] | {key: new} for one in names} for new in news)
            yield rest | {name: {other: entry[other] for other in entry if other != key}}
        yield rest | {"another": entry}


@pytest.mark.parametrize("saved", [True, False], indirect=True, ids=["remainder", "no remainder"])
def test_a_forged_header_above_its_right_checksum_is_refused_or_says_the_same(saved):
    attachment, ids, path = saved
    content, model, n = path.read_bytes(), attachment.model, int.from_bytes(path.read_bytes()[:8], "little")
    wanted = generate(model, ids, None, 4, past_key_values=attachment.load(path)[0])
    for header in forgeries(json.loads(content[8 : 8 + n])):
        header["__metadata__"] = header.get("__metadata__", {}) | {"header": session._BLANK}
        text = json.dumps(header).encode().ljust(n)
        text = text.replace(session._BLANK.encode(), hashlib.sha256(text).hexdigest().encode(), 1)
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + n :])
        words = ""
        try:
            tokens = generate(model, ids, None, 4, past_key_values=attachment.load(path)[0])
        except ValueError as error:
            words = str(error)
        assert re.fullmatch(".* is not a usable session file: .*", words) if words else torch.equal(tokens, wanted)


def test_without_the_checksum_of_the_arrays_that_of_the_header_still_counts(saved):
    attachment, _, path = saved
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    attachment.load(path, verify=False)
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"the checksum of its header|expected a header"):
        attachment.load(path, verify=False)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (lambda model: (tiny_model(seed=1), hasher_for(model)), "expected one of this model "),
        (lambda model: (model.bfloat16(), hasher_for(model)), "expected one of this model "),
        (lambda model: (with_adapter(model, "other"), hasher_for(model)), "expected one of this model "),
        (lambda model: (with_adapter(model, scale=2.0), hasher_for(model)), "expected one of this model "),
        (lambda model: (model, hasher_for(model, seed=1)), "expected one of this hasher "),
        (lambda model: (model, hash_per_query_head(model)), "expected one of this hasher "),
        (lambda model: (model, SignHasher()), "a session needs a hashtrain.Hasher, .* got SignHasher"),
    ],
    ids=["model", "dtype", "adapter", "scale", "hasher", "heads", "no digest"],
)
def test_a_file_of_another_is_refused(saved, other, sentence):
    attachment, _, path = saved
    attachment.detach()
    model, hasher = other(attachment.model)
    with attach(model, hasher, Budget(0.2)) as foreign, pytest.raises(ValueError, match=sentence):
        foreign.load(path)


def test_sums_that_no_step_made_are_looked_at_before_the_first_step(tmp_path):
    model, (ids, mask) = tiny_model(), prompts((60, 41))
    with attach(model, hasher_for(model), Budget(0.2)) as attachment:
        cache = prefilled(model, ids, mask)
        attachment.save(cache, tmp_path / "saved.kv", ids)
        for held in (cache, attachment.load(tmp_path / "saved.kv")[0]):
            layer, starts = held.layers[0], torch.tensor([0, 19])
            assert not layer.sums.ready, "a step on a GPU would take them as they are, of no padding"
            found = layer.sums.advance(layer.keys, layer.values, starts, 60, torch.device("cpu"))
            assert layer.sums.ready
            torch.testing.assert_close(found.keys[1], layer.keys[1, :, 19:].double().sum(1))


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (torch.full((1, 5), 90), "expected tokens that begin this prompt"),
        (torch.zeros(2, 70, dtype=torch.long), "expected a prompt of 1 sequences, got 2"),
        (torch.zeros(1, 70), "tokens must be integers"),
        (torch.zeros(1, 1, dtype=torch.long), "expected a prompt of at least 2 tokens, got 1"),
        ("sparse", r"expected one of this kind of prompts \(sparse\), got exact"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(saved, prompt, sentence):
    attachment, _, path = saved
    if prompt == "sparse":
        attachment.prompt, prompt = prompt, None  # which only some machines can run
    with pytest.raises(ValueError, match=sentence):
        attachment.load(path, prompt)


def test_codes_that_a_file_lacks_are_refused(tmp_path):
    model, (ids, _) = tiny_model(), prompts((20,))
    for hasher, sentence in ((hasher_for(model), "expected codes of layer 0"), (None, r"this hasher .*, got none")):
        with attach(model, hasher, dense_layers=None if hasher is None else 1) as attachment:
            attachment.save(prefilled(model, ids), tmp_path / "saved.kv", ids)
        with attach(model, hasher_for(model)) as attachment, pytest.raises(ValueError, match=sentence):
            attachment.load(tmp_path / "saved.kv")


def test_full_sliding_layers_are_not_cut(tmp_path):
    model, (ids, _) = tiny_model("gemma3"), prompts((60,))
    with attach(model, hasher_for(model), Budget(0.2)) as attachment:
        for n in (10, 60):
            attachment.save(prefilled(model, ids[:, :n]), tmp_path / "saved.kv", ids[:, :n])
            if n == 10:
                assert attachment.load(tmp_path / "saved.kv", ids[:, :8])[0].get_seq_length() == 7
        with pytest.raises(ValueError, match="sliding layers cannot be cut"):
            attachment.load(tmp_path / "saved.kv", ids)


def test_layers_that_reuse_keys_are_left_out(tmp_path):
    model, (ids, _) = tiny_model("gemma3"), prompts((60,))
    cache = prefilled(model, ids)
    cache.layers[3] = getattr(cache_utils, "DummyLayer", DynamicLayer)()
    with attach(model, dense_layers=4) as attachment:
        attachment.save(cache, tmp_path / "saved.kv", ids)
        assert "layers.3.keys" not in session._File(tmp_path / "saved.kv")


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(saved, tmp_path):
    attachment, ids, _ = saved
    model, cache = attachment.model, prefilled(attachment.model, ids)
    for given, tokens, sentence in (
        (StaticCache(config=model.config, max_cache_len=64), ids, "needs a DynamicCache, got StaticCache"),
        (DynamicCache(config=model.config), ids, "got an empty one"),
        (cache, ids[:, :-1], r"expected the tokens that the cache holds, \[1, 60\], got \[1, 59\]"),
        (cache, ids.expand(2, -1), r"got \[2, 60\]"),
    ):
        with pytest.raises(ValueError, match=sentence):
            attachment.save(given, tmp_path / "new.kv", tokens)
    for path in (tmp_path, tmp_path / "new.kv"):
        with pytest.raises(ValueError, match="expected a session file at"):
            attachment.load(path)


@pytest.mark.parametrize("when", ["write", "replace"])
def test_a_kill_while_saving_leaves_the_old_file(saved, when, monkeypatch):
    attachment, ids, path = saved
    before, cache = path.read_bytes(), prefilled(attachment.model, ids[:, :30])
    child = os.fork()
    if not child:
        name, owner = ("_header", session) if when == "write" else ("replace", os)
        real, calls = getattr(owner, name), []

        def die(*given):
            calls.append(given)
            if when == "replace" or len(calls) == 2:  # the second header, after all arrays
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given)

        setattr(owner, name, die)
        attachment.save(cache, path, ids[:, :30])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == before
    attachment.save(cache, path, ids[:, :30])
    assert attachment.load(path)[1].shape == (1, 30)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "what the killed writer left is gone"
