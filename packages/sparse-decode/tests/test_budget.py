"""Budget arithmetic (eq. 7)."""

import copy
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sparse_decode import Budget
from sparse_decode.budget import LayerBudget, Tally
from sparse_decode.removed import OF_BUDGET

FRACTIONS = st.sampled_from(["0.005", "0.01", "0.02", "0.07", "0.1", "0.29", "0.57", "1"])


def by_hand(n, fraction, least, most, ends=0):
    count = max(least, int(Fraction(fraction) * n))
    return min(n, max(ends, count if most is None else min(count, most)))


PARTS = st.lists(st.floats(0.5, 2), min_size=1, max_size=6)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 1 << 21), min_size=1, max_size=8),
    FRACTIONS,
    st.integers(1, 50),
    st.none() | st.integers(50, 500),
    st.integers(0, 80),
    st.integers(0, 9),
    st.integers(0, 300),
)
def test_each_row_counts_its_own_tokens_and_those_always_read(visible, fraction, least, most, sink, recent, below):
    """As a tensor and as numbers; a row with fewer tokens than `below` reads all."""
    budget = LayerBudget(float(fraction), least, most, sink, recent, dense_below=below)
    counts = [n if n < below else by_hand(n, fraction, least, most, sink + recent) for n in visible]
    assert budget.count(torch.tensor(visible)).tolist() == counts
    assert [budget.count_heads(n) for n in visible] == [[count] for count in counts]
    assert all(budget.most(max(visible)) >= count for count in counts)
    assert budget.ends(torch.tensor(visible)).tolist() == [min(n, sink + recent) for n in visible]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 1 << 21), min_size=1, max_size=5),
    PARTS,
    st.floats(1e-6, 1),
    st.none() | st.integers(50, 500),
    st.integers(0, 100),
    st.sampled_from(["visible", "length"]),
)
def test_heads_count_as_budgets_of_their_own(visible, shares, fraction, most, below, of):
    """A head reads its share of the fraction; whatever the number of tokens, as a tensor and as a number."""
    how = {"max_tokens": most, "dense_below": below, "of": of}
    budget, seen = LayerBudget(fraction, by_head=tuple(shares), **how), torch.tensor(visible)
    alone = [LayerBudget(min(1.0, fraction * share), **how).count(seen, seen) for share in shares]
    assert torch.equal(budget.count(seen, seen), torch.stack(alone))
    for n in visible:
        assert budget.count_heads(n) == budget.count(torch.tensor([n]), torch.tensor([n]))[:, 0].tolist()
        assert budget.most(n) >= max(budget.count_heads(n))


@settings(deadline=None)
@given(st.integers(1000, 50_000), PARTS, st.floats(0.02, 0.2))
def test_the_heads_of_a_layer_read_its_total(n, shares, fraction):
    shares = [share * len(shares) / sum(shares) for share in shares]
    assume(all(fraction * share < 1 for share in shares))
    total = sum(LayerBudget(fraction, by_head=tuple(shares)).count_heads(n))
    assert abs(total - len(shares) * n * fraction) <= len(shares)


def test_predictions_use_the_mean_over_heads():
    assert LayerBudget(0.2, by_head=(1.0, 2.0)).mean_fraction == pytest.approx(0.3)
    assert LayerBudget(0.8, by_head=(0.5, 1.5)).mean_fraction == pytest.approx(0.7)  # no head reads more than all


def test_the_first_token_and_the_last_four_are_always_read_by_default():
    assert (LayerBudget().sink, LayerBudget().recent) == (1, 4)
    assert LayerBudget().count_heads(3) == [3]
    assert LayerBudget().count_heads(100) == [5]  # more than 2 %
    assert LayerBudget().count_heads(1000) == [20]  # counted within the fraction


@settings(deadline=None)
@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=8), FRACTIONS, st.integers(1, 50))
def test_the_papers_rule_takes_the_fraction_of_the_length_for_every_row(visible, fraction, least):
    budget = LayerBudget(float(fraction), least, sink=0, recent=0, of="length")
    counts = budget.count(torch.tensor([visible]), torch.tensor([[max(visible)]]))
    assert counts.tolist() == [[min(n, by_hand(max(visible), fraction, least, None)) for n in visible]]


def test_the_papers_rule_needs_the_length():
    with pytest.raises(ValueError, match="needs the length"):
        LayerBudget(of="length").count(torch.tensor([3]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fraction", 0),
        ("fraction", -0.1),
        ("fraction", 1.01),
        ("fraction", float("nan")),
        ("fraction", "2%"),
        ("min_tokens", 0),
        ("min_tokens", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("sink", -1),
        ("recent", True),
        ("of", "document"),
        ("dense_below", -1),
        ("dense_below", "auto"),
        *(("by_head", wrong) for wrong in (1, True, (1.0, 0.0), ("1",), [1.0])),
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be .*got {re.escape(repr(value))}"):
        LayerBudget(**{field: value})


@pytest.mark.parametrize("name", [*OF_BUDGET])
def test_fields_of_earlier_versions_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^Budget no longer takes {name}: .+; "):
        Budget(**{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'share'"):
        Budget(share=1)


def test_a_budget_can_be_copied():
    budget = Budget(0.1, sink=2)
    assert copy.deepcopy(budget) == copy.copy(budget) == replace(budget) == budget


def test_max_tokens_below_min_tokens_is_refused():
    with pytest.raises(ValueError, match="max_tokens must be"):
        LayerBudget(min_tokens=20, max_tokens=10)


def test_counts_of_many_steps_are_added_up_in_between():
    tally, seen = Tally(None), torch.tensor([3, 7])
    for step in range(1, 601):
        tally.add_step(seen, 4)
        assert len(tally._later) == step % 256  # memory does not grow with the number of steps
    tally.add(1, 2)
    tally.add_step(seen, 2)  # of a layer with fewer heads
    assert tally.totals() == tally.totals() == (600 * 12 + 1 + 6, 600 * 28 + 2 + 14)
    tally.add_step(seen, 4)
    tally.reset()
    assert tally.totals() == (0, 0)
