"""The remainder: its fit, its bound, and attention with it (docs/algorithm.md, eq. 15 and 16)."""

import math

import pytest
import torch
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.evaluation.remainder import (
    Evidence,
    calibrate,
    estimated_share,
    fit_weight,
    linear_values,
    log_weight,
    measure,
)
from hashtrain.layers import BY_VARIANT
from hashtrain.training.target import top_count
from hashtrain_runs import Whole

SHAPE = ModelShape(2, 4, 2, 32)


def lsh(bits=128):
    return BY_VARIANT["lsh"](HasherConfig("lsh", SHAPE, bits=bits), torch.Generator().manual_seed(0))


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 4, 5, 32, generator=generator), torch.randn(1, 2, 60, 32, generator=generator)
    return q, k, torch.tensor([9, 20, 30, 45, 59])


def evidence(mean=0.0, lse=3.0, mean_key=0.0, visible=100, selected=4):
    return Evidence(*(torch.tensor([float(x)]) for x in (mean, lse, mean_key)), *map(torch.tensor, (visible, selected)))


def test_measure_agrees_with_sums_written_out(rows):
    q, k, positions = rows
    found, exact, *_ = next(measure(lsh(), q, k, positions, 0.3, [0.2]))
    planes, weights = lsh().encode_queries(q)
    codes = lsh().encode_keys(k)
    import hashcore

    for head in range(4):
        for row, position in enumerate(positions.tolist()):
            seen = position + 1
            count = max(5, top_count(seen, 0.2))
            scores = hashcore.score(planes[0, head // 2, row], codes[0, head // 2, :seen], weights=weights)
            searched = hashcore.topk(scores, count - 5, sink=1, recent=4)[1].tolist()
            chosen = [0, *searched, *range(position - 3, position + 1)]
            logits = (k[0, head // 2, :seen] @ q[0, head, row]) * 0.3
            rest = torch.ones(seen, dtype=torch.bool)
            rest[chosen] = False
            at = head // 2, head % 2, row
            torch.testing.assert_close(found.mean[at], logits[chosen].mean())
            torch.testing.assert_close(found.lse[at], logits[chosen].logsumexp(0))
            torch.testing.assert_close(found.mean_key[at], logits.mean(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(exact[at], logits[rest].logsumexp(0))
            assert (found.visible[row], found.selected[head // 2, 0, row]) == (seen, count)


def test_a_token_left_out_weighs_at_most_the_mean_selected_one():
    e = evidence(visible=100, selected=4, lse=3.0)
    assert log_weight(torch.tensor([1e3, 0, 0, 0, 0]), e).item() == pytest.approx(3.0 - math.log(4) + math.log(96))
    assert log_weight(torch.tensor([-1e3, 0, 0, 0, 0]), e).item() == pytest.approx(-1e3 + math.log(96))


def test_calibration_beats_no_remainder_and_is_unbiased_on_its_rows(data):
    hasher = lsh()
    assert not hasher.calibrated
    calibrate(hasher, 1, data)
    assert hasher.calibrated
    q, k, scaling = data.read(0, 1)
    positions = torch.arange(128, 512)
    for e, exact, *_ in measure(hasher, q[:, :, positions], k, positions, scaling, (0.01, 0.02)):
        share = torch.sigmoid(exact - e.lse)
        error = estimated_share(hasher, e) - share
        assert share.mean() > 0.3
        assert error.square().mean().sqrt() < 0.2 * share.mean()
        assert abs(error.mean()) < 0.05 * share.mean()


def test_linear_values_are_the_mean_and_the_covariance_written_out(rows):
    q, k, positions = rows
    v = torch.randn(1, 2, 60, 24, generator=torch.Generator().manual_seed(4))
    slopes = torch.tensor([0.0, 0.3, -0.2, 1.5])
    found = torch.add(*linear_values(q, k, v, positions, slopes)).flatten(1, 2)
    for head in range(4):
        for row, position in enumerate(positions.tolist()):
            keys, values = (x[0, head // 2, : position + 1].double() for x in (k, v))
            covariance = (values - values.mean(0)).T @ (keys - keys.mean(0)) / (position + 1)
            expected = values.mean(0) + slopes[head] * covariance @ q[0, head, row].double()
            torch.testing.assert_close(found[0, head, row].double(), expected, atol=1e-5, rtol=1e-5)


class Linear(Whole):
    """Normal keys, and values linear in them, so the remainder is the mean plus the full covariance."""

    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.q, self.k = (torch.randn(1, heads, 4096, 32, generator=draw) for heads in (4, 2))
        self.v = self.k @ torch.randn(32, 32, generator=draw)

    def __len__(self):
        return 1

    def read(self, context, layer):
        return self.q, self.k, 0.1

    def values(self, context, layer):
        return self.v


def test_the_slope_is_that_of_normal_keys_and_linear_values():
    hasher = lsh()
    calibrate(hasher, 0, Linear())
    # A selection removes the best tokens, so the others lean slightly less towards the query.
    assert ((hasher.remainder[:, -1] > 0.6) & (hasher.remainder[:, -1] < 1.0)).all()


@pytest.mark.parametrize("least", [-4.0, -12.0, -math.inf])
def test_estimated_shares_sum_to_the_exact_ones(least):
    """Also where some rows leave nothing out, and no statistic tells which."""
    logits = torch.full((2, 2, 60), least)
    logits[..., ::6] = 1.0
    count = torch.tensor
    e = Evidence(torch.zeros(2, 2, 60), torch.full((2, 2, 60), 3.0), torch.zeros(2, 2, 60), count(1000), count(20))
    share = torch.sigmoid(log_weight(fit_weight([(e, e.lse + logits)]).view(2, 2, 1, 5), e) - e.lse)
    torch.testing.assert_close(share.sum(-1).float(), torch.sigmoid(logits).sum(-1), rtol=0.02, atol=0)
