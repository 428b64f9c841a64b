"""The cost of sparse attention in each layer, compared with decoding itself, and the layers that stay dense."""

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.evaluation.cost import (
    DENSE_ABOVE,
    FALLS,
    LEAST_COST,
    LEAST_SHARE,
    MOST_SHARE,
    Steps,
    layer_costs,
    layer_shares,
)
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=3, head_dim=32, max_position_embeddings=256, **sizes)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def steps(model):
    ids = torch.randint(97, (160,), generator=torch.Generator().manual_seed(1))
    return Steps(model, ids, torch.tensor([60, 99, 100, 159]))


def lsh(model):
    return Hasher(HasherConfig("lsh", ModelShape.of(model.config)))


def test_dense_steps_are_the_rows_of_a_whole_pass(model, steps):
    with torch.inference_mode():
        whole = model(steps.ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(steps.dense, whole[steps.positions], atol=TOLERANCE, rtol=0)


def test_steps_do_not_see_each_other(model, steps):
    alone = Steps(model, steps.ids, steps.positions[1:2])
    torch.testing.assert_close(alone.dense[0], steps.dense[1], atol=TOLERANCE, rtol=0)
    found, single = (s.log_probs(lsh(model), range(3), 0.1) for s in (steps, alone))
    torch.testing.assert_close(single[0], found[1], atol=TOLERANCE, rtol=0)


def test_a_whole_budget_costs_nothing_and_less_costs_something(model, steps):
    assert steps.cost(lsh(model), range(3), 1.0).abs().max() < TOLERANCE
    assert steps.cost(lsh(model), (), 0.1).abs().max() < TOLERANCE
    assert steps.cost(lsh(model), range(3), 0.05).min() > 10 * TOLERANCE


def test_the_costliest_layers_stay_dense_but_few(steps):
    class Given:
        def cost(self, hasher, layers, fraction):
            return torch.tensor([5.0 if len(layers) > 1 else DENSE_ABOVE * (layers[0] + 0.5)])

    shape = ModelShape(30, 4, 2, 32)
    hasher = torch.nn.Module()
    hasher.remainder = lambda layer: None
    hasher.config = HasherConfig("lsh", shape)
    found = layer_costs([Given()], hasher, 0.02, lambda doing, count: None)
    assert found["all"] == 5.0
    assert found["dense"] == [27, 28, 29]  # of the 29 above the bound
    hasher.config = HasherConfig("lsh", ModelShape(9, 4, 2, 32))
    assert layer_costs([Given()], hasher, 0.02, lambda doing, count: None)["dense"] == []


def test_a_remainder_that_makes_a_layer_worse_is_taken_off(model):
    """Costs are invented: the remainder of layer 0 makes it worse, the others help."""

    class Given:
        def cost(self, hasher, layers, fraction):
            whole = [hasher.remainder(layer) is not None for layer in layers]
            return torch.tensor([sum((0.3 if n == 0 else -0.1) * on for n, on in zip(layers, whole, strict=True)) + 1])

    hasher = lsh(model)
    for layer in range(3):
        hasher.layer(layer).remainder[:] = layer + 1.0
    found = layer_costs([Given()], hasher, 0.02, lambda doing, count: None)
    assert found["bare"] == [0]
    assert hasher.remainder(0) is None
    assert [hasher.remainder(layer).unique().tolist() for layer in (1, 2)] == [[2.0], [3.0]]
    assert found["layers"] == pytest.approx([1.0, 0.9, 0.9])
    assert found["all"] == pytest.approx(0.8)


@given(st.lists(st.floats(0, 0.1), min_size=2, max_size=12))
def test_no_budget_moves_from_one_layer_to_another_at_a_gain(costs):
    shares = layer_shares(costs)
    assert sum(shares) == pytest.approx(len(costs), abs=0.001 * len(costs))
    assert min(shares) >= LEAST_SHARE
    assert max(shares) <= MOST_SHARE
    slopes = [max(cost, LEAST_COST) * share ** -(FALLS + 1) for cost, share in zip(costs, shares, strict=True)]
    free = [n for n, share in enumerate(shares) if LEAST_SHARE < share < MOST_SHARE]
    for n in free:  # what a token more gains is alike, but where a bound holds it
        assert slopes[n] == pytest.approx(slopes[free[0]], rel=0.01)


def test_shares_follow_costs_and_leave_dense_layers_out():
    shares = layer_shares([0.0, 0.001, 0.008, 0.1, 0.001], dense=[3])
    assert shares[3] == 1.0
    assert sum(shares) == pytest.approx(5, abs=0.01)
    assert shares[0] < shares[1] == shares[4] < shares[2]
    assert shares[2] / shares[1] == pytest.approx(8 ** (1 / (1 + FALLS)), rel=0.01)
    assert layer_shares([0.0, 0.0, 0.0]) == (1.0, 1.0, 1.0)


def test_a_config_keeps_shares_and_refuses_others():
    shape = ModelShape(3, 4, 2, 32)
    config = HasherConfig("lsh", shape, layer_shares=[0.5, 1, 1.5])
    assert config.layer_shares == (0.5, 1, 1.5)
    assert HasherConfig("lsh", shape).layer_shares == ()
    for wrong in ([1.0, 1.0], [1.0, 0.0, 2.0], [1.0, float("nan"), 1.0], ["1", 1, 1], 3, [True, 1, 1]):
        with pytest.raises(ValueError, match="layer_shares must list 3 numbers above 0, or none"):
            HasherConfig("lsh", shape, layer_shares=wrong)
