"""Transform coding against its definition: starts, digits, and damaged files."""

import copy
import math

import hashcore
import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.config import SINK
from hashtrain.layers import BY_VARIANT
from hashtrain.layers.surrogate import digits
from hashtrain.layers.transform import DISTORTIONS, MAX_DIGITS, STEPS, allocate, moments, start
from hashtrain_runs import Whole
from hypothesis import given
from hypothesis import strategies as st

SHAPE = ModelShape(num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=16)


def make(bits=64, **changes):
    config = HasherConfig("transform", SHAPE, bits=bits, planes=5, hidden=8, **changes)
    return BY_VARIANT["transform"](config, torch.Generator().manual_seed(0)).requires_grad_(False)


class Captured(Whole):
    """Normally distributed queries and keys, keys mostly in a few directions; reads like a capture."""

    def __init__(self, contexts=3, tokens=400):
        generator = torch.Generator().manual_seed(1)
        spread = torch.linspace(3, 0.1, 16)
        self.mixed = torch.randn(2, 16, 16, generator=generator)
        self.q = torch.randn(contexts, 4, tokens, 16, generator=generator)
        self.k = (torch.randn(contexts, 2, tokens, 16, generator=generator) * spread) @ self.mixed + 2

    def __len__(self):
        return len(self.q)

    def read(self, context, layer):
        return self.q[context : context + 1], self.k[context : context + 1], 0.25


@pytest.mark.parametrize("bits", range(1, MAX_DIGITS + 1))
def test_the_table_of_quantisers_is_that_of_the_normal_distribution(bits):
    """Numerically: the error of a uniform quantiser with this step, and that no other step is better."""
    x = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    weight = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def error(step):
        level = (2 * torch.floor(x / step) + 1).clamp(1 - 2**bits, 2**bits - 1)
        return float(((x - level * step / 2).square() * weight).sum())

    best = error(STEPS[bits - 1])
    assert best == pytest.approx(DISTORTIONS[bits - 1], rel=2e-3)
    assert best <= min(error(STEPS[bits - 1] * 0.98), error(STEPS[bits - 1] * 1.02))


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
    data = Captured()
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


def test_digits_are_those_of_the_quantiser():
    """One coordinate with three digits and one with one: levels are odd integers, clipped; NaN is the lowest."""
    z = torch.tensor([-99.0, -6.1, -0.1, 0.0, 1.9, 2.0, 7.9, 99.0, torch.nan])[None, None, :, None].expand(1, 1, 9, 2)
    coordinate = torch.tensor([0, 0, 0, 1]).expand(1, 1, 9, 4)
    power, limit = torch.tensor([[[4.0, 2.0, 1.0, 1.0]]]), torch.tensor([[[7.0, 1.0]]])
    found = digits(z, coordinate, power, limit)[0, 0]
    levels = (found[:, :3] * power[0, 0, :3]).sum(-1)
    assert levels.tolist() == [-7, -7, -1, 1, 1, 3, 7, 7, -7]
    assert found[:, 3].tolist() == [-1, -1, -1, 1, 1, 1, 1, 1, -1]


def test_the_slope_of_a_level_is_one_inside_and_none_where_it_clips():
    z = torch.tensor([[[[0.3, 0.3], [7.9, 1.9], [8.1, 2.1]]]], requires_grad=True)
    coordinate = torch.tensor([0, 0, 0, 1]).expand(1, 1, 3, 4)
    power, limit = torch.tensor([[[4.0, 2.0, 1.0, 1.0]]]), torch.tensor([[[7.0, 1.0]]])
    u = torch.tensor([0.5, -2.0])
    (digits(z, coordinate, power, limit) * (u[coordinate[0, 0, 0]] * power[0, 0])).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(z.grad[0, 0], torch.stack([u, u, torch.zeros(2)]))


@pytest.mark.parametrize("per_query_head", [False, True])
def test_scores_are_inner_products_of_levels_and_quantised_weights(per_query_head):
    layer, data = make(), Captured()
    layer.start(data, 0)
    q, k, _ = data.read(0, 0)
    q = q[:, :, :9]
    planes, weights = layer.encode_queries(q, per_query_head)
    found = hashcore.score(planes, layer.encode_keys(k, per_query_head)[:, :, None], weights=weights)
    laid = layer.layout()
    z = layer.key(k)
    level = (2 * (z / 2).floor() + 1).maximum(-laid.limit[:, None]).minimum(laid.limit[:, None])
    group = (level + laid.limit[:, None]) / 2
    spread = laid.coordinate[None, :, None].expand(1, 2, k.shape[2], -1)
    bits = (group.gather(-1, spread).long() // laid.power[:, None].long()) % 2
    levels, _ = hashcore.quantise(layer.query_weight(q, per_query_head), 5)
    signs = bits.repeat_interleave(2 if per_query_head else 1, 1) * 2 - 1
    torch.testing.assert_close(found.float(), (levels.float() @ signs.float().mT + 64 * 31) / 2)


def test_training_scores_are_the_deployed_scores():
    layer, data = make(), Captured()
    layer.start(data, 0)
    q, k, _ = data.read(0, 0)
    _, scale = hashcore.quantise(layer.query_weight(q), 5)
    deployed = (2 * layer.scores(q, k).float() - 64 * 31) * scale
    torch.testing.assert_close(layer.soft_queries(q) @ layer.soft_keys(k).mT, deployed, atol=1e-3, rtol=1e-5)


def test_a_layout_goes_where_its_layer_goes_and_survives_inference_mode():
    layer = make()
    with torch.inference_mode():
        copied = copy.deepcopy(layer)
        codes = layer.encode_keys(torch.ones(1, 2, 3, 16))
        assert torch.equal(copied.encode_keys(torch.ones(1, 2, 3, 16)), codes)
    layer.requires_grad_(True)
    layer.soft_keys(torch.ones(1, 2, 3, 16)).sum().backward()  # codes made in inference mode can be trained
    assert {x.device.type for x in make().to("meta").layout()} == {"meta"}
    compiled = torch.compile(layer.requires_grad_(False).encode_keys, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(1, 2, 3, 16)), codes)


@pytest.mark.parametrize("value", [-1.0, 9.0, 3.5, 5.0])
def test_impossible_digits_of_a_file_are_refused(tmp_path, value):
    hasher = Hasher(HasherConfig("transform", SHAPE, bits=64, hidden=8))
    hasher.layer(0).digits[1, 3] = value
    hasher.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"invalid values: the digits of a head must be integers from 0 to 8"):
        Hasher.from_pretrained(tmp_path)
