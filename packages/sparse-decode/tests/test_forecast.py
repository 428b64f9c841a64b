"""Memory said beforehand: what a forecast says is what a run takes, or a little more."""

import tracemalloc

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, LshSelector, OracleSelector, attach
from sparse_decode.caches import cache_encoder
from sparse_decode.layer import blocks
from sparse_decode.unselected import sums
from sparse_decode_doubles import VOCABULARY, tiny_model
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

CHUNK = 1 << 18  # bytes
TOKENS = 2048
STEPS = 3


def calibrated(model, variant="planes"):
    hasher = Hasher(HasherConfig(variant, ModelShape.of(model.config), bits=64))
    for index in range(model.config.num_hidden_layers):
        hasher.layer(index).remainder.fill_(0.1)
    return hasher


def filled(model, batch, tokens):
    """Make a cache of random keys and values, as a dense prefill would leave it."""
    cache = DynamicCache(config=model.config)
    size = batch, model.config.num_key_value_heads, tokens, model.config.hidden_size // model.config.num_attention_heads
    draw = torch.Generator().manual_seed(3)
    for layer in range(model.config.num_hidden_layers):
        cache.update(*(torch.randn(size, generator=draw) for _ in range(2)), layer)
    return cache


def decode(model, cache, steps):
    batch, n = cache.layers[0].keys.shape[0], cache.get_seq_length()
    for at in range(n, n + steps):
        model(torch.full((batch, 1), at % VOCABULARY), past_key_values=cache, cache_position=torch.tensor([at]))


def most_held(work):
    """Return the most bytes that torch and numpy held at once while `work` ran, beyond what was there before."""
    work()  # kernels are compiled, and what is kept is there
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    by_numpy = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most + by_numpy


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cache_encoder, "_CHUNK", CHUNK)
    monkeypatch.setattr(sums, "_CHUNK", CHUNK)
    monkeypatch.setattr(blocks, "_CHUNK_SCORES", CHUNK // 8)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_what_is_kept_is_what_was_said(family):
    model = tiny_model(family, max_position_embeddings=TOKENS)
    ids = torch.arange(2 * 90).view(2, 90) % VOCABULARY
    with attach(model, calibrated(model), Budget()) as attachment:
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        decode(model, cache, STEPS)
        said = attachment.forecast(2, 90 + STEPS)
        assert attachment.memory(cache) == (said.keys_values, said.codes + said.sums)


@pytest.mark.parametrize("batch", [1, 32])
@torch.no_grad()
def test_no_more_is_held_than_was_said(batch):
    model = tiny_model(max_position_embeddings=TOKENS)
    tokens = TOKENS // batch - STEPS
    with attach(model, calibrated(model), Budget()) as attachment:
        said = attachment.forecast(batch, tokens + STEPS)
        cache = filled(model, batch, tokens)

        def hash_and_step():
            again = DynamicCache(config=model.config)
            for here, there in zip(again.layers, cache.layers, strict=True):
                here.lazy_initialization(there.keys, there.values)
                here.keys, here.values = there.keys, there.values
            attachment.prepare(again)
            decode(model, again, STEPS)

        # Its own copy of keys and values is in the room that it holds ahead.
        assert 0 < most_held(hash_and_step) <= said.keys_values + said.beyond


@pytest.mark.parametrize(("batch", "tokens"), [(16, 96), pytest.param(64, 512, marks=pytest.mark.full)])
@torch.no_grad()
def test_a_prefill_takes_no_more_beyond_a_dense_one_than_was_said(batch, tokens):
    model = tiny_model(max_position_embeddings=tokens)
    ids = torch.arange(batch * tokens).view(batch, tokens) % VOCABULARY

    def prefill():
        model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)

    dense = most_held(prefill)
    with attach(model, calibrated(model), Budget()) as attachment:
        taken, said = most_held(prefill), attachment.forecast(batch, tokens)
    assert 0 < taken - dense <= said.beyond


@torch.no_grad()
def test_hashing_a_prompt_takes_no_more_than_was_said():
    model = tiny_model(max_position_embeddings=TOKENS)
    with attach(model, calibrated(model), Budget()) as attachment:
        said, encoder = attachment.forecast(1, TOKENS), attachment._plans[0].encoder
        keys = torch.randn(1, 2, TOKENS, 16)
        assert CHUNK // 8 < most_held(lambda: encoder(keys)) <= said.prompt


def test_the_smaller_ones_are_added_up():
    model = tiny_model()
    with attach(model, calibrated(model), Budget()) as attachment:
        said = attachment.forecast(3, 100)
    assert said.beyond == said.codes + said.sums + said.spare + max(said.step, said.prompt)
    with attach(model, LshSelector(model.config), Budget()) as attachment:
        assert attachment.forecast(3, 100).sums == 0
    with attach(model, OracleSelector(), Budget()) as attachment:
        assert attachment.forecast(3, 100)[:3] == (said.keys_values, 0, 0)
    with attach(model, None) as attachment:
        assert attachment.forecast(3, 100) == (said.keys_values, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 8), (2, 0), (1.0, 8)])
def test_what_is_no_size_is_refused(batch, tokens):
    model = tiny_model()
    with (
        attach(model, LshSelector(model.config), Budget()) as attachment,
        pytest.raises(ValueError, match="1 or more, got"),
    ):
        attachment.forecast(batch, tokens)
