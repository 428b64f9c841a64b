"""Presses: what prunes a cache between prefill and decoding, as kvpress does, works together with `attach`.

Doubles of how kvpress's presses act, under `generate` and where it is not installed (test_kvpress.py has itself):
forward hooks on attention modules that score the cached tokens and put shorter keys and values into the cache's layer.
"""

import contextlib

import pytest
import torch
from sparse_decode import Budget, RecentSelector, attach
from sparse_decode_doubles import Auditor, Calibrated, SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache

KEEP = 0.5
PROMPT, NEW = 40, 8


def streaming(module, keys, values, kwargs):
    """The first tokens and the last ones (StreamingLLM)."""
    n = keys.shape[2]
    kept = torch.cat([torch.arange(4), torch.arange(n - int(n * KEEP) + 4, n)])
    return kept.expand(*keys.shape[:2], -1)


def key_norm(module, keys, values, kwargs):
    """The keys of the smallest norm, each head its own."""
    return (-keys.norm(dim=-1)).topk(int(keys.shape[2] * KEEP), dim=-1).indices.sort(-1).values


def window_attention(module, keys, values, kwargs):
    """What the last queries attend to (SnapKV)."""
    states = kwargs["hidden_states"][:, -4:]
    q = module.q_proj(states).view(*states.shape[:2], -1, module.head_dim).transpose(1, 2)
    grouped = q.unflatten(1, (keys.shape[1], -1))
    scores = (grouped @ keys[:, :, None].transpose(-1, -2)).softmax(-1).mean((2, 3))
    return scores.topk(int(keys.shape[2] * KEEP), dim=-1).indices.sort(-1).values


PRESSES = (streaming, key_norm, window_attention)


@contextlib.contextmanager
def pressed(model, press, every=None):
    """Prune after prefill, or after each `every` tokens of decoding."""

    def hook(module, args, kwargs, output):
        layer, rows = kwargs["past_key_values"].layers[module.layer_idx], output[0].shape[1]
        n = layer.keys.shape[2]
        if rows == n if every is None else n % every == 0:
            chosen = press(module, layer.keys, layer.values, kwargs)[..., None]
            layer.keys, layer.values = (
                x.gather(2, chosen.expand(-1, -1, -1, x.shape[3])) for x in (layer.keys, layer.values)
            )

    handles = [block.self_attn.register_forward_hook(hook, with_kwargs=True) for block in model.model.layers]
    yield
    for handle in handles:
        handle.remove()


def run(model):
    cache = DynamicCache(config=model.config)
    tokens = generate(model, prompts((PROMPT, PROMPT))[0], new_tokens=NEW, past_key_values=cache)
    return tokens, [layer.keys for layer in cache.layers]


@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("every", [None, 21])
@pytest.mark.parametrize("kv", ["device", "host"])
def test_a_press_does_the_same_with_a_whole_budget_as_without_us(press, every, kv):
    model = tiny_model()
    with pressed(model, press, every):
        dense, kept = run(model)
        with attach(model, SignHasher(), Budget(1.0), dense_layers=0, kv=kv):
            tokens, keys = run(model)
    assert torch.equal(tokens, dense)
    assert [x.shape for x in keys] == [x.shape for x in kept]
    assert kept[0].shape[2] < PROMPT + NEW - 1
    for found, expected in zip(keys, kept, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("hasher", [SignHasher(), Calibrated()])
def test_selections_behind_a_press_are_made_from_the_codes_of_what_it_left(press, hasher, monkeypatch):
    model = tiny_model()
    auditor = Auditor(monkeypatch)
    with pressed(model, press), attach(model, hasher, Budget(0.25, min_tokens=2), dense_layers=0) as attachment:
        _, keys = run(model)
    assert auditor.steps == 4 * (NEW - 1)
    left = int(PROMPT * KEEP)
    assert {x.shape[2] for x in keys} == {left + NEW - 1}
    visible = 2 * 4 * sum(range(left + 1, left + NEW))  # two sequences, four query heads
    assert {seen for _, seen in attachment.counts().values()} == {visible}


def test_a_press_that_masks_keys_head_by_head_is_refused_at_prefill():
    model = tiny_model()
    model.model.layers[3].self_attn.masked_key_indices = (torch.tensor([0]),)
    with attach(model, RecentSelector()), pytest.raises(ValueError, match="use a press that removes keys"):
        model(prompts((PROMPT,))[0])
