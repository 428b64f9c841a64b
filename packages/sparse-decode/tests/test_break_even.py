"""Dense below the break-even length, row by row; where that length is given, and where it is predicted."""

import math

import pytest
import torch
from sparse_decode import Budget, OracleSelector, attach
from sparse_decode.attach import attach_rows
from sparse_decode.budget import LayerBudget
from sparse_decode.costs import break_even as module
from sparse_decode_doubles import Auditor, SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache

EDGE = 38
BUDGET = LayerBudget(0.1, min_tokens=2, sink=1, recent=2, dense_below=EDGE)


def test_a_row_is_dense_until_it_sees_enough(monkeypatch):
    model, lengths = tiny_model(), (40, 27, 33)
    ids, mask = prompts(lengths)
    auditor = Auditor(monkeypatch)
    with attach(model, SignHasher(), BUDGET) as attachment:
        together = generate(model, ids, mask, new_tokens=12)
        batched = attachment.counts()
        for visible, selected in auditor.sizes:
            short = (visible < EDGE).expand_as(selected)
            assert torch.equal(selected[short], visible.expand_as(selected)[short])
            assert (selected < 0.4 * visible)[~short].all()
        attachment.reset_density()
        for row, length in enumerate(lengths):
            alone = generate(model, ids[row : row + 1, 40 - length :], new_tokens=12)
            assert torch.equal(alone[0], together[row, 40 - length :])
        assert attachment.counts() == batched


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_call_of_short_rows_is_dense_and_counted(family):
    model, (ids, mask) = tiny_model(family), prompts((20, 9))

    def run():
        cache = DynamicCache(config=model.config)
        model(ids[:, :-3], attention_mask=mask[:, :-3], past_key_values=cache)
        return model(ids[:, -3:-2], attention_mask=mask[:, :-2], past_key_values=cache).logits

    dense = run()
    with attach(model, SignHasher(), BUDGET) as attachment:
        torch.testing.assert_close(run(), dense, atol=1e-4, rtol=1e-4)
        assert attachment.counts() == dict.fromkeys(attachment.layers, (4 * (18 + 7), 4 * (18 + 7)))
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0)


def test_a_budget_by_layer_follows_the_hashers_shares_at_the_same_total():
    model, (ids, mask) = tiny_model(), prompts((100,))
    hasher = SignHasher()
    hasher.layer_shares = (9.0, 0.5, 1.0, 1.5)  # layer 0 is dense: the mean of the others counts
    with attach(model, hasher, LayerBudget(0.1, sink=0, recent=0, by_layer=True), dense_layers=1) as attachment:
        generate(model, ids, mask, new_tokens=3)
        seen = [101, 102]
        assert {layer: read for layer, (read, _) in attachment.counts().items()} == {
            layer: 4 * sum(math.floor(n * 0.1 * share) for n in seen) for layer, share in ((1, 0.5), (2, 1), (3, 1.5))
        }


def test_a_budget_by_layer_needs_shares():
    for selector in (SignHasher(), OracleSelector()):
        with pytest.raises(ValueError, match="needs a hasher with layer_shares, which `hashtrain` measures, got none"):
            attach(tiny_model(), selector, LayerBudget(by_layer=True))
    with pytest.raises(ValueError, match="by_layer must be true or false, got 1"):
        LayerBudget(by_layer=1)


def test_by_default_a_step_is_dense_until_the_bytes_that_it_saves_are_worth_it(monkeypatch):
    """Keys and values of 256 bytes a token, codes of 16 a head; 2 % is read at half the speed."""
    model, (ids, mask) = tiny_model(), prompts((40,))
    monkeypatch.setattr(module, "EARNS", 38 * (256 - 32 - 2 * 0.02 * 256) + 1)
    with attach(model, SignHasher()) as attachment:
        assert attachment.break_even == 39
        generate(model, ids[:, :30], mask[:, :30], new_tokens=9)
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0), "the last step sees 38"
        generate(model, ids[:, :38], mask[:, :38], new_tokens=2)
        assert attachment.counts() == dict.fromkeys(
            attachment.layers, (4 * (sum(range(31, 39)) + 5), 4 * sum(range(31, 40)))
        )


@pytest.mark.parametrize("options", [{"sparse_rows": 5}, {"kv": "host"}, {"budget": Budget()}])
def test_no_break_even_with_a_budget_or_rows_or_where_nothing_is_known_of_bytes(options):
    model = tiny_model()
    with attach_rows(model, SignHasher(), **{"sparse_rows": None, **options}) as attachment:
        assert attachment.break_even is None
        assert attachment._plans[3].budget.dense_below == 0
    with attach(model, OracleSelector()) as attachment:
        assert attachment.break_even is None


def test_a_step_that_saves_no_bytes_is_never_sparse():
    with attach(tiny_model(), SignHasher(), LayerBudget(0.6, dense_below="predicted")) as attachment:
        assert attachment.break_even == module.NEVER
