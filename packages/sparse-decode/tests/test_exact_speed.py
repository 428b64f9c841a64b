"""What the benchmark of exact mode counts: rounds at a given acceptance, and a cache that stays as long as it was."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from sparse_decode import Budget, attach
from sparse_decode_doubles import SignHasher, prompts, tiny_model
from transformers import DynamicCache

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def rounds_of(monkeypatch):
    """Return `Rounds` over a small model at a chance of acceptance, and its cache of 40 tokens."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    before = set(sys.modules)
    module, model = import_module("exact_speed"), tiny_model()
    module.LONGEST = 1e9
    attachment = attach(model, SignHasher(), Budget(0.2, min_tokens=4), exact=8)
    cache = DynamicCache(config=model.config)
    model(prompts((40,))[0], past_key_values=cache)
    yield lambda chance: (module.Rounds(model, attachment, cache, chance), cache)
    attachment.detach()
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize(("chance", "made"), [(1.0, 5), (-1.0, 1)])
def test_a_round_makes_the_accepted_drafts_and_one_token_more(rounds_of, chance, made):
    rounds, cache = rounds_of(chance)
    keys = cache.layers[0].keys.clone()
    for _ in range(3):
        seconds, tokens = rounds.round(4)
        assert tokens == made
        assert seconds > 0
        assert torch.equal(cache.layers[0].keys, keys), "as before the round"
    assert {name: len(times) for name, times in rounds.passes.items()} == {"draft": 3, "check 5": 3}
    assert (rounds.pace.chance > 0.8) == (chance == 1)


def test_no_drafts_are_a_dense_step(rounds_of):
    rounds, cache = rounds_of(1.0)
    assert rounds.turn(0)[1] == 8
    assert list(rounds.passes) == ["check 1"]
    assert cache.get_seq_length() == 40
