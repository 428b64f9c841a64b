"""The codes of each variant against their definitions, and that training scores match the deployed ones."""

import copy
import math

import hashcore
import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.config import SINK
from hashtrain.layers import BY_VARIANT
from hashtrain.layers.surrogate import digits
from hashtrain.layers.transform import DISTORTIONS, MAX_DIGITS, allocate, moments, start
from hashtrain_runs import captured
from hypothesis import given
from hypothesis import strategies as st

SHAPE = ModelShape(num_layers=1, num_query_heads=6, num_kv_heads=2, head_dim=64)
CASES = [("lsh", "rotation"), ("linear", "rotation"), ("planes", "rotation"), ("transform", "rotation")]
CASES += [("paper", "random"), ("paper", "gaussian")]


def make(variant, init="rotation", **changes):
    config = HasherConfig(variant, SHAPE, init=init, **changes)
    return BY_VARIANT[variant](config, torch.Generator().manual_seed(5)).requires_grad_(False)


def qk(t=40, rows=7):
    generator = torch.Generator().manual_seed(6)
    return torch.randn(2, 6, rows, 64, generator=generator), torch.randn(2, 2, t, 64, generator=generator)


def scores(layer, q, k, per_query_head=False):
    planes, weights = layer.encode_queries(q, per_query_head)
    return hashcore.score(planes, layer.encode_keys(k, per_query_head)[:, :, None], weights=weights)


@pytest.mark.parametrize("variant", ["lsh", "linear", "paper"])
def test_group_score_is_the_sum_of_its_query_heads_scores_and_linear_starts_as_lsh(variant):
    layer, (q, k) = make(variant, "random" if variant == "paper" else "rotation"), qk()
    alone, found = scores(layer, q, k, per_query_head=True), scores(layer, q, k)
    torch.testing.assert_close(found, alone.unflatten(1, (2, 3)).sum(2, dtype=torch.int32))
    assert torch.equal(found, scores(make("lsh"), q, k)) == (variant != "paper")


def test_paper_with_residuals_is_the_published_function():
    layer, (q, _) = make("paper", "random", residual=True, hidden=64, bits=64), qk()
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = q[0, 4, 3]
    h = torch.nn.functional.silu(x @ layer.w1[4] + layer.b1[4, 0]) + x
    torch.testing.assert_close(layer.values(q)[0, 4, 3], h @ layer.w2[4] + layer.b2[4, 0] + h, atol=1e-4, rtol=1e-4)


def test_training_scores_of_planes_are_the_deployed_scores():
    layer, (q, k) = make("planes"), qk()
    deployed = (2 * scores(layer, q, k) - 128 * 7) / 7
    torch.testing.assert_close(layer.soft_queries(q) @ layer.soft_keys(k).mT, deployed, atol=1e-4, rtol=1e-5)


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


SMALL = ModelShape(num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=16)


def transform(bits=64, **changes):
    config = HasherConfig("transform", SMALL, bits=bits, planes=5, hidden=8, **changes)
    return BY_VARIANT["transform"](config, torch.Generator().manual_seed(0)).requires_grad_(False)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=12), st.integers(1, MAX_DIGITS), st.data())
def test_no_digit_would_save_more_elsewhere(variances, most, data):
    bits = data.draw(st.integers(0, MAX_DIGITS * len(variances)))
    found = allocate(torch.tensor(variances, dtype=torch.float64), bits, most).long().tolist()
    left = (1.0, *DISTORTIONS)
    most = max(most, math.ceil(bits / len(variances)))
    assert sum(found) == bits
    assert max(found) <= most
    given_up = [v * (left[n - 1] - left[n]) for v, n in zip(variances, found, strict=True) if n]
    wanted = [v * (left[n] - left[n + 1]) for v, n in zip(variances, found, strict=True) if n < most]
    assert min(given_up, default=math.inf) >= max(wanted, default=0) * (1 - 1e-9)


def test_coordinates_are_uncorrelated_and_rebuild_the_inner_product():
    data = captured()
    found = moments(data.read(c, 0)[:2] for c in range(3))
    made = start(found, 64, 16)
    keys = data.k[:, :, SINK:].permute(1, 0, 2, 3).flatten(1, 2)  # the first tokens are always read
    z = keys @ made.key + made.bias
    centred = z - z.mean(1, keepdim=True)
    covariance = centred.mT @ centred / z.shape[1]
    off = covariance - torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))
    assert z.mean(1).abs().max() < 0.02
    assert off.abs().max() < 0.03 * covariance.max()
    used = made.digits > 0
    queries = torch.randn(2, 50, 16)
    exact = queries @ (keys - found.mean[:, None].float()).mT
    rebuilt = (queries @ made.query) @ z.mT
    assert used.sum() < 32  # some directions are too narrow for a digit
    assert torch.corrcoef(torch.stack([exact.flatten(), rebuilt.flatten()]))[0, 1] > 0.999


COORDINATE = torch.tensor([0, 0, 0, 1])
POWER, LIMIT = torch.tensor([[[4.0, 2.0, 1.0, 1.0]]]), torch.tensor([[[7.0, 1.0]]])


def test_digits_are_those_of_the_quantiser():
    """One coordinate with three digits and one with one: levels are odd integers, clipped; NaN is the lowest."""
    z = torch.tensor([-99.0, -6.1, -0.1, 0.0, 1.9, 2.0, 7.9, 99.0, torch.nan])[None, None, :, None].expand(1, 1, 9, 2)
    found = digits(z, COORDINATE.expand(1, 1, 9, 4), POWER, LIMIT)[0, 0]
    assert (found[:, :3] * POWER[0, 0, :3]).sum(-1).tolist() == [-7, -7, -1, 1, 1, 3, 7, 7, -7]
    assert found[:, 3].tolist() == [-1, -1, -1, 1, 1, 1, 1, 1, -1]


def test_the_slope_of_a_level_is_one_inside_and_none_where_it_clips():
    z = torch.tensor([[[[0.3, 0.3], [7.9, 1.9], [8.1, 2.1]]]], requires_grad=True)
    u = torch.tensor([0.5, -2.0])
    (digits(z, COORDINATE.expand(1, 1, 3, 4), POWER, LIMIT) * (u[COORDINATE] * POWER[0, 0])).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(z.grad[0, 0], torch.stack([u, u, torch.zeros(2)]))


@pytest.mark.parametrize("per_query_head", [False, True])
def test_scores_are_inner_products_of_levels_and_quantised_weights(per_query_head):
    layer, data = transform(), captured()
    layer.start(data, 0)
    q, k, _ = data.read(0, 0)
    q = q[:, :, :9]
    planes, weights = layer.encode_queries(q, per_query_head)
    found = hashcore.score(planes, layer.encode_keys(k, per_query_head)[:, :, None], weights=weights)
    z = layer.key(k)
    level = (2 * (z / 2).floor() + 1).maximum(-layer.limit[:, None]).minimum(layer.limit[:, None])
    group = (level + layer.limit[:, None]) / 2
    spread = layer.coordinate[None, :, None].expand(1, 2, k.shape[2], -1)
    bits = (group.gather(-1, spread).long() // layer.power[:, None].long()) % 2
    levels, _ = hashcore.quantise(layer.query_weight(q, per_query_head), 5)
    signs = bits.repeat_interleave(2 if per_query_head else 1, 1) * 2 - 1
    torch.testing.assert_close(found.float(), (levels.float() @ signs.float().mT + 64 * 31) / 2)


def test_training_scores_are_the_deployed_scores():
    layer, data = transform(), captured()
    layer.start(data, 0)
    q, k, _ = data.read(0, 0)
    _, scale = hashcore.quantise(layer.query_weight(q), 5)
    deployed = (2 * layer.scores(q, k).float() - 64 * 31) * scale
    torch.testing.assert_close(layer.soft_queries(q) @ layer.soft_keys(k).mT, deployed, atol=1e-3, rtol=1e-5)


def test_a_layout_goes_where_its_layer_goes_and_survives_inference_mode():
    layer = transform()
    with torch.inference_mode():
        copied = copy.deepcopy(layer)
        codes = layer.encode_keys(torch.ones(1, 2, 3, 16))
        assert torch.equal(copied.encode_keys(torch.ones(1, 2, 3, 16)), codes)
    layer.requires_grad_(True)
    layer.soft_keys(torch.ones(1, 2, 3, 16)).sum().backward()  # codes made in inference mode can be trained
    moved = transform().to("meta")
    assert {x.device.type for x in (moved.coordinate, moved.power, moved.limit)} == {"meta"}


def test_impossible_digits_of_a_file_are_refused(tmp_path):
    for value in (-1.0, 9.0, 3.5, 5.0):
        hasher = Hasher(HasherConfig("transform", SMALL, bits=64, hidden=8))
        hasher.layer(0).digits[1, 3] = value
        hasher.save_pretrained(tmp_path)
        words = r"invalid values: the digits of a head must be integers from 0 to 8"
        with pytest.raises(ValueError, match=words):
            Hasher.from_pretrained(tmp_path)
