"""Every number against one worked out by hand."""

import math

import numpy as np
import pytest
import torch
from evals.metrics import bootstrap, mean_kl, perplexity, token_losses

EXACT = 1e-6  # float32 logarithms


def log(*rows):
    return torch.tensor(rows).log()


def test_token_losses_are_minus_log_of_the_target():
    found = token_losses(log([0.5, 0.25, 0.25], [0.125, 0.125, 0.75]), torch.tensor([1, 0]))
    assert found.tolist() == pytest.approx([math.log(4), math.log(8)], abs=EXACT)


def test_perplexity_weights_documents_by_tokens():
    # One token of loss ln 2 and three of ln 4: (2 x 4^3)^(1/4) = 2^(7/4).
    assert perplexity([math.log(2), math.log(4)], [1, 3]) == pytest.approx(2**1.75)


def test_kl_of_two_coins():
    # 1/2 ln(1/2 / 1/4) + 1/2 ln(1/2 / 3/4) = 1/2 ln 2 + 1/2 ln 2/3.
    half, quarter = log([0.5, 0.5]), log([0.25, 0.75])
    assert mean_kl(half, quarter) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=EXACT)
    # In the other direction it differs: 1/4 ln 1/2 + 3/4 ln 3/2.
    assert mean_kl(quarter, half) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=EXACT)


def test_kl_of_an_impossible_token_is_zero_not_nan():
    assert mean_kl(log([1.0, 0.0]), log([0.5, 0.5])) == pytest.approx(math.log(2), abs=EXACT)


def test_bootstrap_of_a_constant_difference_is_that_constant():
    samples = np.full((20, 2), [[0.1, -0.3]])
    for found, value in zip(bootstrap(samples, seed=0), (0.1, -0.3), strict=True):
        assert (found.low, found.high) == (value, value)
        assert found.mean == pytest.approx(value)


def test_bootstrap_interval_is_about_two_standard_errors():
    values = np.random.default_rng(4).normal(3.0, 1.0, size=(400, 1))
    (found,) = bootstrap(values, seed=0)
    error = values.std() / 20
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.2 * error)


def test_bootstrap_repeats_with_its_seed_and_keeps_columns_together():
    samples = np.random.default_rng(0).normal(size=(9, 1))
    a, b = bootstrap(np.hstack([samples, samples + 5]), seed=1)
    assert [edge + 5 for edge in a] == pytest.approx(list(b))
    assert bootstrap(samples, seed=1) == bootstrap(samples, seed=1) != bootstrap(samples, seed=2)


def test_bootstrap_of_one_document_has_no_interval():
    (found,) = bootstrap([[2.0]], seed=0)
    assert tuple(found) == (2.0, None, None)
