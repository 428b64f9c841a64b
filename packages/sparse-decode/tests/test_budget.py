"""Budget arithmetic (eq. 7), and what `attach` settles: shares by layer and head, and where steps stay dense."""

import math
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode import Attachment, Budget, HashSelector, OracleSelector, attach, planning
from sparse_decode.budget import LayerBudget, Tally
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from transformers import DynamicCache, StaticCache

FRACTIONS = st.sampled_from(["0.005", "0.01", "0.02", "0.07", "0.1", "0.29", "0.57", "1"])


def by_hand(n, fraction, least, most, ends=0):
    count = max(least, int(Fraction(fraction) * n))
    return min(n, max(ends, count if most is None else min(count, most)))


PARTS = st.lists(st.floats(0.5, 2), min_size=1, max_size=6)


@settings(deadline=None)
@given(
    *(st.lists(st.integers(0, 1 << 21), min_size=1, max_size=8), FRACTIONS, st.integers(1, 50)),
    *(st.none() | st.integers(50, 500), st.integers(0, 80), st.integers(0, 9), st.integers(0, 300)),
)
def test_each_row_counts_its_own_tokens_and_those_always_read(visible, fraction, least, most, sink, recent, below):
    """As a tensor and as numbers; a row with fewer tokens than `below` reads all."""
    budget = LayerBudget(float(fraction), least, most, sink, recent, dense_below=below)
    counts = [n if n < below else by_hand(n, fraction, least, most, sink + recent) for n in visible]
    assert budget.count(torch.tensor(visible)).tolist() == counts
    assert [budget.count_heads(n) for n in visible] == [[count] for count in counts]
    assert all(budget.most(max(visible)) >= count for count in counts)


@settings(deadline=None)
@given(
    *(st.lists(st.integers(0, 1 << 21), min_size=1, max_size=5), PARTS, st.floats(1e-6, 1)),
    *(st.none() | st.integers(50, 500), st.integers(0, 100)),
)
def test_heads_count_as_budgets_of_their_own(visible, shares, fraction, most, below):
    """A head reads its share of the fraction; whatever the number of tokens, as a tensor and as a number."""
    how = {"max_tokens": most, "dense_below": below}
    budget, seen = LayerBudget(fraction, by_head=tuple(shares), **how), torch.tensor(visible)
    alone = [LayerBudget(min(1.0, fraction * share), **how).count(seen) for share in shares]
    assert torch.equal(budget.count(seen), torch.stack(alone))
    for n in visible:
        assert budget.count_heads(n) == budget.count(torch.tensor([n]))[:, 0].tolist()
        assert budget.most(n) >= max(budget.count_heads(n))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("fraction", wrong) for wrong in (0, -0.1, 1.01, float("nan"), "2%")),
        *(("min_tokens", wrong) for wrong in (0, 1.5)),
        *(("max_tokens", wrong) for wrong in (0, 10, 30.0)),  # those below 20 are below the least
        *(("dense_below", wrong) for wrong in (-1, "auto")),
        *(("by_head", wrong) for wrong in (1, True, (1.0, 0.0), ("1",), [1.0])),
        *(("sink", -1), ("recent", True)),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be .*got {re.escape(repr(value))}"):
        LayerBudget(**{"min_tokens": 20, field: value})


def test_counts_of_a_device_and_of_the_host_are_added_up():
    tally, seen = Tally(None), torch.tensor([3, 7])
    for _ in range(600):
        tally.add_step(seen, 4)
    tally.add(1, 2)
    tally.add_step(seen, 2)  # of a layer with fewer heads
    assert tally.totals() == tally.totals() == (600 * 12 + 1 + 6, 600 * 28 + 2 + 14)
    tally.add_step(seen, 4)
    tally.reset()
    assert tally.totals() == (0, 0)


# ---- Once attached ---------------------------------------------------------------------------------------------------

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
    monkeypatch.setattr(planning, "STEP_COST_BYTES", 38 * (256 - 32 - 2 * 0.02 * 256) + 1)
    with attach(model, SignHasher()) as attachment:
        assert attachment.break_even == 39
        generate(model, ids[:, :30], mask[:, :30], new_tokens=9)
        assert attachment.density() == dict.fromkeys(attachment.layers, 1.0), "the last step sees 38"
        generate(model, ids[:, :38], mask[:, :38], new_tokens=2)
        counts = 4 * (sum(range(31, 39)) + 8), 4 * sum(range(31, 40))
        assert attachment.counts() == dict.fromkeys(attachment.layers, counts)


def test_no_break_even_with_a_budget_or_rows_or_where_nothing_is_known_of_bytes():
    for options in ({"sparse_rows": 5}, {"kv": "host"}, {"budget": Budget()}):
        with Attachment(tiny_model(), SignHasher(), **{"sparse_rows": None, **options}) as attachment:
            assert attachment.break_even is None
            assert attachment._layers[3].budget.dense_below == 0
    with attach(tiny_model(), OracleSelector()) as attachment:
        assert attachment.break_even is None
    never = planning.predicted(ModelShape(1, 4, 2, 64), LayerBudget(0.6), torch.float32)
    assert never == planning.NEVER, "it saves no bytes"


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


@pytest.mark.parametrize("layers", [(), (0.5, 1.5)])
@pytest.mark.parametrize("heads", [(), (SHARES,) * 2])
@pytest.mark.parametrize("own", [None, Budget(0.04)])
def test_attach_divides_a_budget_as_far_as_the_hasher_has_shares(layers, heads, own):
    model = tiny_model(num_hidden_layers=2)
    hasher = with_shares(model, layers, heads)
    with attach(model, hasher, own) as attachment:
        found = [layer.budget for layer in attachment._layers.values()]
    fraction = 0.02 if own is None else 0.04
    assert [budget.fraction for budget in found] == [fraction * share for share in layers or (1, 1)]
    assert {budget.by_head for budget in found} == ({heads[0]} if heads else {()})
    if heads:
        with attach(model, HashSelector(hasher, per_query_head=True), own) as attachment:
            assert attachment._layers[1].budget.by_head == (0.5, 0.5, 1.5, 1.5)
    for whole in (LayerBudget(), Budget(1.0)):  # of one layer, and of everything, nothing is divided
        with attach(model, hasher, whole) as attachment:
            assert {layer.budget for layer in attachment._layers.values()} == {LayerBudget.like(whole)}


def test_shares_that_are_missing_or_not_its_own_and_a_remainder_of_another_version_are_refused():
    hasher = SignHasher()
    hasher.remainder = lambda layer: torch.ones(4, 7)
    for selector, how, words in (
        (OracleSelector(), {"by_head": SHARES}, "needs a hasher, got OracleSelector; leave by_head out"),
        (SignHasher(), {"by_head": (1.0, 1.0, 1.0)}, "by_head must have 2 shares in layer 0, got 3"),
        (hasher, {}, r"a remainder must be \[query heads, 6\], got \[4, 7\]"),
    ):
        with pytest.raises(ValueError, match=words):
            attach(tiny_model(), selector, LayerBudget(**how))
