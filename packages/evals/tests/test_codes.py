"""Codes of 16 bytes: each against a slow reference or the property that its paper proves."""

import math

import numpy as np
import pytest
import torch
from evals.codes import CODES, require_usable
from evals.codes.base import (
    BYTES,
    Metric,
    Training,
    orthonormal,
    pack_factors,
    pack_signs,
    principal,
    unpack_factors,
    unpack_signs,
)
from evals.codes.product import ProductCode, balanced, kmeans, nearest
from evals.codes.scores import Coded, Hashed, exact, fit_factor, probabilities
from evals.codes.signs import ItqCode, RaBitQCode, TurboMseCode, TurboProductCode, itq_rotation, round_evenly
from hashtrain import Hasher, HasherConfig, ModelShape

D = 64


def drawn(seed):
    return torch.Generator().manual_seed(seed)


def training(keys=2000, d=D, seed=0):
    """Keys with a mean and unequal variances, and queries of unequal variances along other directions."""
    draw = drawn(seed)
    scale, turn = torch.logspace(1, -1, d), orthonormal(d, d, draw)
    k = 3 * torch.randn(d, generator=draw) + torch.randn(keys, d, generator=draw) * scale @ turn
    q = torch.randn(500, d, generator=draw) * torch.logspace(0.5, -0.5, d)
    return Training(k, (q.mT @ q).double() / len(q), draw), q


@pytest.fixture(scope="module")
def sample():
    return training()


@pytest.fixture(scope="module")
def fitted(sample):
    return {name: entry.fit(sample[0]) for name, entry in CODES.items()}


# Bytes


@pytest.mark.parametrize("name", CODES)
def test_a_key_is_16_bytes_and_scores_follow_from_them_alone(name, fitted, sample):
    code, k = fitted[name], sample[0].keys[:33]
    stored = code.encode(k)
    assert (stored.dtype, stored.shape) == (torch.uint8, (33, 16))
    whole = code.decode(stored)
    apart = torch.cat([code.decode(one[None]) for one in stored])  # a key needs nothing of the others
    assert torch.allclose(whole, apart, atol=1e-5)
    changed = stored.clone()
    changed[0, 0] ^= 1
    assert not torch.equal(code.decode(changed)[0], whole[0])


def test_bits_and_factors_come_back():
    x = torch.randn(9, 24, generator=drawn(0))
    x[0, 0] = 0.0
    assert torch.equal(unpack_signs(pack_signs(x)), torch.where(x > 0, 1.0, -1.0))
    assert pack_signs(x).shape == (9, 3)
    a, b = torch.tensor([1.5, -3.0, 1e9]), torch.tensor([0.0, 0.25, -1e9])
    assert pack_factors(a, b).shape == (3, 4)
    assert unpack_factors(pack_factors(a, b)).tolist() == [[1.5, 0.0], [-3.0, 0.25], [65504.0, -65504.0]]


def test_more_than_16_bytes_are_refused():
    class Wide(TurboMseCode):
        def encode(self, k):
            return torch.cat([super().encode(k), super().encode(k)], -1)

    wide = Coded([Wide(training()[0])])
    with pytest.raises(ValueError, match=r"expected 16 bytes a key, got torch\.uint8 \[5, 32\]"):
        wide(torch.randn(1, 2, 3, D), torch.randn(1, 1, 5, D))


# The metric


def test_the_metric_keeps_products_and_measures_their_error(sample):
    data, q = sample
    metric = Metric(data)
    k = data.keys[:50]
    products = metric.queries(q) @ metric.keys(k).mT
    assert torch.allclose(products, q @ (k - metric.mean).mT, atol=1e-2)
    error = torch.randn(7, D, generator=drawn(1))
    length = (metric.keys(k[:7] + error) - metric.keys(k[:7])).square().sum(-1)
    assert torch.allclose(length, (q @ error.mT).square().mean(0), rtol=1e-3)


@pytest.mark.parametrize("make", [lambda t: ProductCode(t, 16), lambda t: ProductCode(t, 32)])
def test_the_metric_lowers_the_error_of_products(make, sample):
    data, q = sample
    plain = Training(data.keys, torch.eye(D, dtype=torch.float64), drawn(0))
    assert error_of(make(Training(data.keys, data.moment, drawn(0))), data.keys, q) < error_of(
        make(plain), data.keys, q
    )


def error_of(code, k, q):
    """Return the mean square error of centred products, relative to their variance."""
    real, found = q @ k.mT, code.query(q) @ code.decode(code.encode(k)).mT
    real, found = (x - x.mean(-1, keepdim=True) for x in (real, found))
    return ((real - found).square().mean() / real.square().mean()).item()


# Product quantisation


def test_nearest_is_the_nearest():
    x, centroids = torch.randn(3, 70, 4, generator=drawn(0)), torch.randn(3, 20, 4, generator=drawn(1))
    slow = [[((v - c) ** 2).sum(-1).argmin().item() for v in part] for part, c in zip(x, centroids, strict=True)]
    assert nearest(x, centroids).tolist() == slow


def test_more_rounds_and_more_centroids_lower_the_error():
    x = torch.randn(2, 900, 4, generator=drawn(0))

    def error(count, rounds):
        centroids = kmeans(x, count, drawn(1), rounds)
        found = centroids[torch.arange(2)[:, None], nearest(x, centroids)]
        return (x - found).square().mean().item()

    falling = [error(16, rounds) for rounds in (0, 1, 2, 4, 12)]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 5
    assert error(8, 12) > error(16, 12) > error(64, 12) > error(900, 12) == 0  # a centroid for every vector: exact


def test_scores_are_sums_over_the_tables_of_a_query(sample, fitted):
    data, q = sample
    for name, parts in (("pq-16x8", 16), ("pq-32x4", 32)):
        code, k = fitted[name], data.keys[:9]
        stored = code.encode(k)
        tables = torch.einsum("pd,pcd->pc", code.query(q[0]).view(parts, -1), code.centroids)
        numbers = stored if parts == 16 else torch.stack([stored % 16, stored // 16], -1).flatten(1)
        slow = [sum(tables[p, n].item() for p, n in enumerate(key)) for key in numbers.tolist()]
        assert torch.allclose(code.query(q[:1]) @ code.decode(stored).mT, torch.tensor([slow]), atol=1e-3)


def test_coordinates_are_dealt_by_the_product_of_variances():
    sets = balanced(torch.tensor([16.0, 8.0, 4.0, 2.0, 1.0, 1.0]), 3).view(3, 2)
    assert sets.tolist() == [[0, 5], [1, 4], [2, 3]]
    variances = principal(training()[0].keys)[0]
    logs = variances[balanced(variances, 16)].view(16, -1).log().sum(1)
    assert logs.max() - logs.min() < 0.3 * (variances.view(16, -1).log().sum(1).max() - logs.min())


# ITQ


def test_every_round_of_itq_loses_less():
    y = torch.randn(600, 16, generator=drawn(0)) * torch.logspace(0.5, -0.5, 16)

    def lost(rounds):
        z = y @ itq_rotation(y, drawn(2), rounds)
        return (z - torch.where(z > 0, 1.0, -1.0)).square().mean().item()

    found = [lost(rounds) for rounds in (0, 1, 5, 50)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4
    rotation = itq_rotation(y, drawn(2))
    assert torch.allclose(rotation @ rotation.mT, torch.eye(16), atol=1e-5)


def test_the_decoder_of_itq_is_the_least_squares_one(sample):
    code = ItqCode(sample[0])
    y = sample[0].keys - sample[0].keys.mean(0)
    signs = unpack_signs(code.encode(sample[0].keys))
    best = torch.linalg.lstsq(signs.double(), y.double()).solution
    assert torch.allclose(code.decoder.double(), best, atol=1e-2)


def test_itq_codes_what_its_first_signs_leave(sample):
    data, _ = sample
    code = ItqCode(data)
    assert [directions.shape for directions, _ in code.blocks] == [(D, D)] * 2
    y = data.keys - data.keys.mean(0)
    (directions, decoder), (second, _) = code.blocks
    rest = y - unpack_signs(pack_signs(y @ directions)) @ decoder
    stored = code.encode(data.keys)
    assert torch.equal(stored, torch.cat([pack_signs(y @ directions), pack_signs(rest @ second)], 1))
    left = (y - code.decode(stored)).square().sum()
    assert left < 0.5 * rest.square().sum() < 0.5 * y.square().sum()


def test_itq_spends_all_bits_on_heads_of_any_size():
    for d in (24, 96, 128, 160):
        data, _ = training(keys=300, d=d)
        code = ItqCode(data)
        assert code.encode(data.keys).shape == (300, BYTES)
        assert code.decode(code.encode(data.keys)).shape == (300, d)


# RaBitQ


def test_rabitq_is_unbiased_and_within_its_bound():
    """Theorem 3.2: the error of <o, q> is at most sqrt((1 - <x, o>^2) / <x, o>^2) e / sqrt(bits - 1), and 0 in mean."""
    draw = drawn(5)
    o, q = (torch.nn.functional.normalize(torch.randn(40, D, generator=draw), dim=-1) for _ in range(2))
    errors, bounds = [], []
    for _ in range(150):  # the mean is over rotations
        code = RaBitQCode(Training(torch.cat([o, -o]), torch.eye(D), draw), query_bits=16)  # their mean is 0
        signs = unpack_signs(code.encode(o)[:, :14]) / math.sqrt(112)
        product = (signs * (o @ code.rotation)).sum(-1)
        errors.append((code.query(q) * code.decode(code.encode(o))).sum(-1) - (o * q).sum(-1))
        bounds.append(((1 - product**2) / product**2).sqrt() / math.sqrt(111))
    errors, bounds = torch.stack(errors), torch.stack(bounds)
    assert errors.mean(0).abs().max() < 4 * errors.std() / math.sqrt(150)
    assert errors.mean().abs() < 4 * errors.std() / math.sqrt(errors.numel())
    assert 0.9 < (errors / bounds).square().mean().sqrt() < 1.1
    assert (errors.abs() <= 3 * bounds).float().mean() > 0.99


def test_rabitq_expects_products_with_its_signs():
    """Lemma: E <x, o> is close to .8 for many bits."""
    o = torch.nn.functional.normalize(torch.randn(500, D, generator=drawn(0)), dim=-1)
    code = RaBitQCode(Training(torch.cat([o, -o]), torch.eye(D), drawn(1)))
    product = (unpack_signs(code.encode(o)[:, :14]) / math.sqrt(112) * (o @ code.rotation)).sum(-1)
    assert product.mean().item() == pytest.approx(math.sqrt(2 / math.pi), abs=0.01)


def test_queries_are_rounded_to_the_nearest_of_even_levels():
    x = torch.randn(6, 112, generator=drawn(0))
    for bits in (1, 4, 8):
        rounded = round_evenly(x, bits)
        step = (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
        assert ((rounded - x).abs().amax(-1) <= step / 2 + 1e-5).all()
        assert max(len(row.unique()) for row in rounded) <= 2**bits
    assert torch.allclose(round_evenly(x, 24), x, atol=1e-4)


# TurboQuant


def test_turboquant_loses_what_its_quantiser_must():
    """1-bit Lloyd-Max leaves 1 - 2 / pi = .363 of a normal number's variance; padded to 112 of 64 dimensions, less."""
    y = torch.randn(4000, D, generator=drawn(0))
    data = Training(torch.cat([y, -y]), torch.eye(D), drawn(1))
    first = TurboProductCode(data)
    unit = torch.nn.functional.normalize(y @ first.rotation, dim=-1)
    rest = unit - first._first(pack_signs(unit))
    assert rest.square().sum(-1).mean().item() == pytest.approx(1 - 2 / math.pi, abs=0.01)
    code = TurboMseCode(data)
    found = code.decode(code.encode(y)) @ code.rotation.mT
    assert ((y - found).square().sum(-1) / y.square().sum(-1)).mean() < 0.3


def test_turboquants_products_are_unbiased():
    draw = drawn(5)
    y, q = torch.randn(20, D, generator=draw), torch.randn(20, D, generator=draw)
    errors = []
    for _ in range(200):
        code = TurboProductCode(Training(torch.cat([y, -y]), torch.eye(D), draw))
        errors.append((code.query(q) * code.decode(code.encode(y))).sum(-1) - (y * q).sum(-1))
    errors = torch.stack(errors)
    assert errors.mean().abs() < 4 * errors.std() / math.sqrt(errors.numel())
    assert (errors.mean(0).abs() / (errors.std(0) / math.sqrt(200))).max() < 4


def test_a_code_that_does_not_fit_is_named():
    require_usable(tuple(CODES), (64,), 256)
    with pytest.raises(ValueError, match="rabitq takes head_dim of at most 112, a multiple of 1, got 128; leave it"):
        require_usable(("itq", "rabitq"), (64, 128), 1000)
    with pytest.raises(ValueError, match="pq-32x4 takes head_dim, a multiple of 32, got 80"):
        require_usable(("pq-16x8", "pq-32x4"), (80,), 1000)
    with pytest.raises(ValueError, match="pq-16x8 needs at least 256 training keys, got 255; raise --training-keys"):
        require_usable(("pq-16x8",), (64,), 255)


# Scores


def test_exact_scores_are_the_products():
    q, k = torch.randn(1, 4, 3, D, generator=drawn(0)), torch.randn(1, 2, 7, D, generator=drawn(1))
    found = exact(q, k)
    slow = torch.stack([q[0, head] @ k[0, head // 2].mT for head in range(4)])
    assert torch.allclose(found.single[0], slow, atol=1e-4)
    assert torch.allclose(found.added[0], slow.view(2, 2, 3, 7).sum(1), atol=1e-4)


def test_coded_scores_are_those_of_each_head_with_its_code():
    data = [training(seed=seed)[0] for seed in (0, 1)]
    coded = Coded([TurboMseCode(one) for one in data])
    q, k = torch.randn(1, 4, 3, D, generator=drawn(0)), torch.stack([one.keys[:7] for one in data])[None]
    found = coded(q, k)
    for head in range(4):
        code = coded.codes[head // 2]
        own = code.query(q[0, head]) @ code.decode(code.encode(k[0, head // 2])).mT
        assert torch.allclose(found.single[0, head], own, atol=1e-4)
    assert torch.allclose(found.added[0], found.single[0].view(2, 2, 3, 7).sum(1), atol=1e-3)


@pytest.mark.parametrize("variant", ["lsh", "transform"])
def test_hashed_scores_are_the_deployed_ones(variant):
    shape = ModelShape(num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=D)
    layer = Hasher(HasherConfig(variant, shape, bits=128, hidden=16), 0).layer(0)
    q, k = torch.randn(1, 4, 3, D, generator=drawn(0)), torch.randn(1, 2, 50, D, generator=drawn(1))
    with torch.no_grad():
        found = Hashed(layer)(q, k)
        assert torch.equal(found.added, layer.scores(q, k))
        whole = layer.scores(q, k, per_query_head=True)
    assert torch.equal(found.single.argmax(-1), whole.argmax(-1))
    for mine, deployed in zip(found.single.flatten(0, 2), whole.flatten(0, 2), strict=True):
        assert np.corrcoef(mine, deployed)[0, 1] == pytest.approx(1)
    if variant == "transform":  # in units of its weights, the same for all rows
        real = layer.query_weight(q, per_query_head=True) @ layer.soft_keys(k).repeat_interleave(2, 1).mT
        assert (found.single - real).abs().max() < 0.1 * real.abs().max()


def test_the_factor_of_a_softmax_is_found():
    logits = 2 * torch.randn(2, 30, 40, generator=drawn(0))
    seen = torch.arange(40) <= torch.arange(10, 40)[:, None]
    for factor in (0.01, 0.7, 50.0):
        scores = logits / factor + torch.randn(2, 30, 1, generator=drawn(1))  # a constant per row is nothing
        assert fit_factor(scores, logits, seen).tolist() == pytest.approx([factor] * 2, rel=1e-3)

    def divergence(scores, factor):
        p, own = (x.masked_fill(~seen, -torch.inf).log_softmax(-1) for x in (logits, scores * factor))
        return (p.exp() * (p - own).masked_fill(~seen, 0)).sum((1, 2))

    noisy = logits + 2 * torch.randn(2, 30, 40, generator=drawn(2))
    best = fit_factor(noisy, logits, seen)[:, None, None]
    assert (best < 1).all()
    for other in (0.9, 0.97, 1.03, 1.1):
        assert (divergence(noisy, best) < divergence(noisy, best * other)).all()


def test_probabilities_of_a_group_add_up():
    single = torch.randn(1, 4, 3, 9, generator=drawn(0))
    seen = torch.arange(9) <= torch.tensor([2, 5, 8])[:, None]
    factors = torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    found = probabilities(single, factors, seen)
    assert torch.allclose(found.sum(-1), torch.full((1, 2, 3), 2.0))
    slow = (single[0, 2, 0, :3] * 2).softmax(-1) + (single[0, 3, 0, :3] * 3).softmax(-1)
    assert torch.allclose(found[0, 1, 0, :3], slow)
    assert (found.masked_select(~seen) == 0).all()
