"""Samples of exact mode have the distribution of the dense model's."""

import itertools

import pytest
import torch
from sparse_decode import Budget, attach
from sparse_decode_doubles import SignHasher, generate, tiny_model
from sparse_decode_exact import attached


def chi_squared(counts, expected):
    """Return how many standard deviations a chi-squared statistic lies above its mean; rare outcomes are pooled."""
    order = sorted(expected, key=expected.get)
    pools, sums = [[]], [0.0]
    for outcome in order:
        if sums[-1] >= 8:
            pools.append([])
            sums.append(0.0)
        pools[-1].append(outcome)
        sums[-1] += expected[outcome]
    total = sum((sum(counts.get(o, 0) for o in pool) - e) ** 2 / e for pool, e in zip(pools, sums, strict=True))
    degrees = len(pools) - 1
    assert degrees > 10
    return (total - degrees) / (2 * degrees) ** 0.5


RUNS, ALARM = 400, 4.5
"""Samples of a text, and standard deviations: with more than 10 degrees chance is beyond them less than once in 1,000
seeds; the seed is fixed."""


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_samples_have_the_dense_distribution(stops):
    """Of whole texts of four tokens, of which two or three are drafted; a criterion may stop them."""
    size = {"vocab_size": 5, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "bos_token_id": None}
    model, how = tiny_model(**size, head_dim=16, pad_token_id=None), {"new_tokens": 4, "do_sample": True}
    ids = torch.randint(0, 5, (1, 24), generator=torch.Generator().manual_seed(3))
    if stops:
        how["stopping_criteria"] = [lambda ids, _, **__: ids[:, -1] < 2]
    how |= {"temperature": 0.1, "top_k": 4}
    expected = distribution(model, ids, stops)

    def drawn():
        torch.manual_seed(2)
        counts = {}
        for _ in range(RUNS):
            text = tuple(generate(model, ids, **how)[0, 24:].tolist())
            counts[text] = counts.get(text, 0) + 1
        return chi_squared(counts, expected)

    with attached(model, 3, budget=Budget(0.05, sink=0, recent=1)) as attachment:
        assert drawn() < ALARM
        assert 0.2 < attachment.drafts.acceptance.rate < 0.95
    if not stops:
        with attach(model, SignHasher(), Budget(0.05, sink=0, recent=1)):
            assert drawn() > 1.5 * ALARM, "drafts have another distribution, or this could not fail"


def distribution(model, ids, stops):
    """Return the expected count of each text of four tokens, by dense logits."""
    texts = torch.tensor(list(itertools.product(range(5), repeat=4)))
    logits = model(torch.cat([ids.expand(len(texts), -1), texts], 1)).logits[:, 23:-1] / 0.1
    logits = logits.masked_fill(logits < logits.topk(4).values[..., -1:], -torch.inf)
    each = logits.double().log_softmax(-1).gather(-1, texts[..., None])[..., 0]
    found = {}
    for text, chance in zip(texts.tolist(), each.cumsum(-1).exp(), strict=True):
        last = next((i for i, token in enumerate(text) if stops and token < 2), 3)
        found[tuple(text[: last + 1])] = RUNS * float(chance[last])
    return {text: count for text, count in found.items() if count}
