"""What `attach` settles of a budget: shares by layer and by head, and the length below which steps are dense."""

import math
from dataclasses import replace

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, HashSelector, OracleSelector, QueryHeadHasher, attach, costs
from sparse_decode.attach import attach_rows
from sparse_decode.budget import LayerBudget
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache, StaticCache

SHARES = (0.5, 1.5)


def with_shares(model, layers=(), heads=(SHARES,)):
    hasher = Hasher(HasherConfig("planes", ModelShape.of(model.config), bits=64), 0)
    heads = tuple(heads) * (model.config.num_hidden_layers if len(heads) == 1 else 1)
    hasher.config = replace(hasher.config, layer_shares=layers, head_shares=heads)
    return hasher


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_call_of_short_rows_is_dense_and_counted(family):
    model, (ids, mask) = tiny_model(family), prompts((20, 9))

    def run():
        cache = DynamicCache(config=model.config)
        model(ids[:, :-3], attention_mask=mask[:, :-3], past_key_values=cache)
        return model(ids[:, -3:-2], attention_mask=mask[:, :-2], past_key_values=cache).logits

    dense = run()
    with attach(model, SignHasher(), LayerBudget(0.1, sink=1, recent=2, dense_below=38)) as attachment:
        torch.testing.assert_close(run(), dense, atol=1e-4, rtol=1e-4)
        assert attachment.counts() == dict.fromkeys(attachment.layers, (4 * (18 + 7), 4 * (18 + 7)))
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0)


def test_by_default_a_step_is_dense_until_the_bytes_that_it_saves_are_worth_it(monkeypatch):
    """Keys and values of 256 bytes a token, codes of 16 a head; 2 % is read at half the speed."""
    model, (ids, mask) = tiny_model(), prompts((40,))
    monkeypatch.setattr(costs, "EARNS", 38 * (256 - 32 - 2 * 0.02 * 256) + 1)
    with attach(model, SignHasher()) as attachment:
        assert attachment.break_even == 39
        generate(model, ids[:, :30], mask[:, :30], new_tokens=9)
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0), "the last step sees 38"
        generate(model, ids[:, :38], mask[:, :38], new_tokens=2)
        counts = 4 * (sum(range(31, 39)) + 5), 4 * sum(range(31, 40))
        assert attachment.counts() == dict.fromkeys(attachment.layers, counts)


@pytest.mark.parametrize("options", [{"sparse_rows": 5}, {"kv": "host"}, {"budget": Budget()}])
def test_no_break_even_with_a_budget_or_rows_or_where_nothing_is_known_of_bytes(options):
    model = tiny_model()
    with attach_rows(model, SignHasher(), **{"sparse_rows": None, **options}) as attachment:
        assert attachment.break_even is None
        assert attachment._plans[3].budget.dense_below == 0
    with attach(model, OracleSelector()) as attachment:
        assert attachment.break_even is None


def test_a_step_that_saves_no_bytes_is_never_sparse():
    assert costs.predicted(ModelShape(1, 4, 2, 64), LayerBudget(0.6), torch.float32) == costs.NEVER


def test_a_budget_by_layer_follows_the_hashers_shares_at_the_same_total():
    model, (ids, mask) = tiny_model(), prompts((100,))
    hasher = SignHasher()
    hasher.layer_shares = (9.0, 0.5, 1.0, 1.5)  # layer 0 is dense: the mean of the others counts
    with attach(model, hasher, Budget(0.1, sink=0, recent=0), dense_layers=1) as attachment:
        generate(model, ids, mask, new_tokens=3)
        read = {layer: read for layer, (read, _) in attachment.counts().items()}
    shares = ((1, 0.5), (2, 1), (3, 1.5))
    assert read == {layer: 4 * sum(math.floor(n * 0.1 * share) for n in (101, 102)) for layer, share in shares}


def test_a_budget_by_head_is_counted_in_every_kind_of_step():
    model, (ids, mask) = tiny_model(), prompts((100, 60))
    seen, counts = [101, 102, 61, 62], [LayerBudget(0.1 * share).count_heads for share in SHARES]
    read = 2 * sum(count(n)[0] for count in counts for n in seen)  # two query heads a KV head
    expected = {layer: (read, 4 * sum(seen)) for layer in range(4)}
    with attach(model, with_shares(model), Budget(0.1)) as attachment:
        plain = generate(model, ids, mask, new_tokens=3)
        assert attachment.counts() == expected
        attachment.reset_density()
        cache = StaticCache(config=model.config, max_cache_len=110)
        assert torch.equal(generate(model, ids, mask, new_tokens=3, past_key_values=cache), plain)
        assert attachment.counts() == expected


def test_shares_by_layer_and_by_head_multiply():
    model = tiny_model()
    hasher = with_shares(model, (0.5, 1.0, 1.0, 1.5))
    with attach(model, hasher, Budget(0.2)) as attachment:
        budgets = {layer: own.budget for layer, own in attachment._plans.items()}
    assert budgets[0] == LayerBudget(0.1, by_head=SHARES)
    assert budgets[3] == LayerBudget(0.2 * 1.5, by_head=SHARES)
    with attach(model, HashSelector(QueryHeadHasher(with_shares(model))), Budget(0.2)) as attachment:
        assert attachment._plans[1].budget.by_head == (0.5, 0.5, 1.5, 1.5)


@pytest.mark.parametrize(("layers", "heads"), [((), ()), ((0.5, 1.5), ()), ((), ((0.5, 1.5),) * 2)])
@pytest.mark.parametrize("own", [None, Budget(0.04)])
def test_attach_divides_a_budget_as_far_as_the_hasher_has_shares(layers, heads, own):
    model = tiny_model(num_hidden_layers=2)
    hasher = with_shares(model, layers, heads)
    with attach(model, hasher, own) as attachment:
        found = [plan.budget for plan in attachment._plans.values()]
    fraction = 0.02 if own is None else 0.04
    assert [budget.fraction for budget in found] == [fraction * share for share in layers or (1, 1)]
    assert {budget.by_head for budget in found} == ({heads[0]} if heads else {()})
    with attach(model, hasher, LayerBudget()) as attachment:
        assert {plan.budget for plan in attachment._plans.values()} == {LayerBudget()}


REFUSED = [
    (OracleSelector, {"by_head": SHARES}, "needs a hasher, got OracleSelector; leave by_head out"),
    (SignHasher, {"by_head": (1.0, 1.0, 1.0)}, "by_head must have 2 shares in layer 0, got 3"),
]


@pytest.mark.parametrize(("make", "options", "words"), REFUSED)
def test_shares_that_are_missing_or_not_its_own_are_refused(make, options, words):
    with pytest.raises(ValueError, match=words):
        attach(tiny_model(), make(), LayerBudget(**options))
