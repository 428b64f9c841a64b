"""What benchmarks count: rounds of exact mode at a given acceptance, and the parts of a step."""

import pytest
import torch
from sparse_decode import Budget, attach
from sparse_decode_doubles import SignHasher, prompts, tiny_model
from transformers import DynamicCache


@pytest.fixture
def rounds_of(benchmark):
    """Return `Rounds` over a small model at a chance of acceptance, and its cache of 40 tokens."""
    module, model = benchmark("exact_speed"), tiny_model()
    module.LONGEST = 1e9
    with attach(model, SignHasher(), Budget(0.2, min_tokens=4), exact=8) as attachment:
        cache = DynamicCache(config=model.config)
        model(prompts((40,))[0], past_key_values=cache)
        yield lambda chance: (module.Rounds(model, attachment, cache, chance), cache)


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


def test_the_parts_of_a_step_contain_one_another(benchmark):
    module = benchmark("host_share")
    model = benchmark("shapes").smollm2(2)
    own = torch.nn.Linear.forward
    with attach(model, benchmark("shapes").make_hasher(model), Budget()):
        found = module.measure(model, 300, 3)
    assert 0 < found["kernel"] < found["fused"] < found["attention"] < found["step"]
    assert found["products"] > 0
    assert found["host"] < found["step"] - found["kernel"]
    assert torch.nn.Linear.forward is own
