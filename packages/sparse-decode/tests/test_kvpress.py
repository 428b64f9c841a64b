"""kvpress itself beside `attach`: its published presses prune the cache of an attached model (group `kvpress`).

Its presses read `cache_position`, which transformers has not handed to attention since 5.3: given to the model, it
arrives there. Importing kvpress wraps every attention function of the process, ours too if it is registered: here that
is undone after each test.
"""

import importlib.util
import os

import pytest
import torch
from sparse_decode import Budget, attach
from sparse_decode.interface import register
from sparse_decode_doubles import SignHasher, prompts, tiny_model
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytestmark = pytest.mark.slow
PROMPT, NEW = 40, 8
LEFT = PROMPT // 2
HALF, OFTEN = {"compression_ratio": 0.5}, {"compression_interval": 3, "target_size": LEFT}
PRESSES = {  # how it is made, the model's attention, the tokens left at the end
    "knorm": (lambda kvpress: kvpress.KnormPress(**HALF), None, LEFT + NEW),
    "snapkv": (lambda kvpress: kvpress.SnapKVPress(**HALF, window_size=8), None, LEFT + NEW),
    "expected-attention": (lambda kvpress: kvpress.ExpectedAttentionPress(**HALF), None, LEFT + NEW),
    "rerotated": (lambda kvpress: kvpress.KeyRerotationPress(kvpress.KnormPress(**HALF)), None, LEFT + NEW),
    "observed": (lambda kvpress: kvpress.ObservedAttentionPress(**HALF), "eager", LEFT + NEW),
    "think": (lambda kvpress: kvpress.ThinKPress(key_channel_compression_ratio=0.5, window_size=8), None, PROMPT + NEW),
    # Every third step the cache falls back to 20 tokens; what is new since then is hashed, what was kept anew.
    "decoding": (lambda kvpress: kvpress.DecodingPress(kvpress.KnormPress(), **OFTEN), None, LEFT + NEW % 3),
}


@pytest.fixture
def kvpress(monkeypatch):
    """kvpress, whose wrappers of the attention functions stand for this test alone."""
    if importlib.util.find_spec("kvpress") is None and os.environ.get("CI") != "true":
        pytest.skip("kvpress is not installed: uv sync --group kvpress")
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    import kvpress

    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()  # what the first import has wrapped
    register()  # as if something had been attached before
    kvpress.attention_patch.patch_attention_functions()
    assert "sparse_decode" in ALL_ATTENTION_FUNCTIONS._local_mapping
    return kvpress


def run(model, press):
    """Prefill and decode under a press; returns logits of each call, and the keys of each layer."""
    cache, step = DynamicCache(config=model.config), prompts((PROMPT + NEW,) * 2)[0]
    logits = []
    with press(model):
        for first, ids in zip([0, *range(PROMPT, PROMPT + NEW)], step.split([PROMPT] + [1] * NEW, 1), strict=True):
            at = torch.arange(first, first + ids.shape[1])
            given = {"position_ids": at[None], "cache_position": at, "attention_mask": None}
            logits.append(model(ids, past_key_values=cache, **given).logits[:, -1])
    return torch.stack(logits), [layer.keys for layer in cache.layers]


@pytest.mark.parametrize("kv", ["device", "host"])
@pytest.mark.parametrize("name", PRESSES)
def test_a_press_does_the_same_with_a_whole_budget_as_without_us(kvpress, name, kv):
    """Those of decode steps, those that read attention weights and those that change keys in their place, too."""
    make, implementation, left = PRESSES[name]
    model = tiny_model(implementation=implementation)
    dense, kept = run(model, make(kvpress))
    with attach(model, SignHasher(), Budget(1.0), dense_layers=0, kv=kv):
        logits, keys = run(model, make(kvpress))
    assert {x.shape[2] for x in kept} == {left}
    assert name != "think" or any((x[:, :, :PROMPT] == 0).any() for x in kept)
    torch.testing.assert_close(logits, dense, atol=1e-4, rtol=1e-4)
    for found, expected in zip(keys, kept, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_press_that_masks_keys_head_by_head_is_refused(kvpress):
    model = tiny_model()
    press = kvpress.AdaKVPress(kvpress.KnormPress(**HALF))
    with (
        attach(model, SignHasher(), Budget(), dense_layers=0),
        pytest.raises(ValueError, match="use a press that removes keys"),
    ):
        run(model, press)
