"""The codes of each variant, and that training scores match the deployed ones."""

import copy

import hashcore
import pytest
import torch
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.layers import BY_VARIANT

SHAPE = ModelShape(num_layers=1, num_query_heads=6, num_kv_heads=2, head_dim=64)
CASES = [
    ("lsh", "rotation"),
    ("linear", "rotation"),
    ("paper", "random"),
    ("paper", "gaussian"),
    ("planes", "rotation"),
    ("transform", "rotation"),
]


def make(variant, init="rotation", **changes):
    return BY_VARIANT[variant](
        HasherConfig(variant, SHAPE, init=init, **changes), torch.Generator().manual_seed(5)
    ).requires_grad_(False)


def qk(t=40, rows=7):
    generator = torch.Generator().manual_seed(6)
    return torch.randn(2, 6, rows, 64, generator=generator), torch.randn(2, 2, t, 64, generator=generator)


def scores(layer, q, k, per_query_head=False):
    planes, weights = layer.encode_queries(q, per_query_head)
    return hashcore.score(planes, layer.encode_keys(k, per_query_head)[:, :, None], weights=weights)


@pytest.mark.parametrize(("variant", "init"), CASES)
def test_codes_have_the_documented_shapes(variant, init):
    layer, (q, k) = make(variant, init), qk()
    words = 4 * 3 if variant == "paper" else 4
    assert layer.encode_keys(k).shape == (2, 2, 40, words)
    planes, weights = layer.encode_queries(q)
    assert planes.shape == (2, 2, 7, len(weights), words)
    assert layer.encode_keys(k, per_query_head=True).shape == (2, 6, 40, 4)
    assert layer.encode_queries(q, per_query_head=True)[0].shape[:3] == (2, 6, 7)


@pytest.mark.parametrize(("variant", "init"), [c for c in CASES if c[0] not in ("planes", "transform")])
def test_group_score_is_the_sum_of_its_query_heads_scores(variant, init):
    layer, (q, k) = make(variant, init), qk()
    alone = scores(layer, q, k, per_query_head=True)
    torch.testing.assert_close(scores(layer, q, k), alone.unflatten(1, (2, 3)).sum(2, dtype=torch.int32))


def test_linear_starts_as_lsh():
    layer, (q, k) = make("linear"), qk()
    assert torch.equal(scores(layer, q, k), scores(make("lsh"), q, k))
    assert layer.rotation.shape == (2, 64, 128)


def test_paper_with_residuals_is_the_published_function():
    layer, (q, _) = make("paper", "random", residual=True, hidden=64, bits=64), qk()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = q[0, 4, 3]
    h = torch.nn.functional.silu(x @ layer.w1[4] + layer.b1[4, 0]) + x
    torch.testing.assert_close(layer.values(q)[0, 4, 3], h @ layer.w2[4] + layer.b2[4, 0] + h, atol=1e-4, rtol=1e-4)


def soft_scores(layer, q, k):
    heads = 6 if layer.target_heads == "query" else 2
    return layer.soft_queries(q) @ layer.soft_keys(k.repeat_interleave(heads // 2, 1)).transpose(-1, -2)


def test_training_scores_of_planes_are_the_deployed_scores():
    layer, (q, k) = make("planes"), qk()
    deployed = (2 * scores(layer, q, k) - 128 * 7) / 7
    torch.testing.assert_close(soft_scores(layer, q, k), deployed, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("variant", "init"), CASES)
def test_rounded_matrices_are_float16_numbers_and_nearly_the_same(variant, init):
    layer, (q, k) = make(variant, init), qk()
    before, codes, planes = copy.deepcopy(layer.state_dict()), layer.encode_keys(k), layer.encode_queries(q)[0]
    layer.round_matrices()
    changed = set()
    for name, x in layer.state_dict().items():
        assert x.dtype == before[name].dtype
        if not torch.equal(x, before[name]):
            assert torch.equal(x, x.half().float())
            torch.testing.assert_close(x, before[name], atol=1e-6, rtol=5e-4)
            changed.add(name.split(".")[-1])
    assert changed <= {"rotation", "r", "w1", "w2"}
    assert changed
    for ours, theirs in ((layer.encode_keys(k), codes), (layer.encode_queries(q)[0], planes)):
        assert (hashcore.unpack(ours) != hashcore.unpack(theirs)).double().mean() < 2e-3


@pytest.mark.parametrize("number", [1e5, 1e-8, float("inf")])
def test_matrices_that_float16_is_too_narrow_for_stay_as_they_are(number):
    layer = make("planes")
    layer.query.w1[1, :, 3] = number
    before = copy.deepcopy(layer.state_dict())
    layer.round_matrices()
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
