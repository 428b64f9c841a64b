"""Budget arithmetic (eq. 7)."""

import copy
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode import Budget
from sparse_decode.budget import LayerBudget, Tally
from sparse_decode.removed import OF_BUDGET

FRACTIONS = st.sampled_from(["0.005", "0.01", "0.02", "0.07", "0.1", "0.29", "0.57", "1"])


def by_hand(n, fraction, least, most, ends=0):
    count = max(least, int(Fraction(fraction) * n))
    return min(n, max(ends, count if most is None else min(count, most)))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=8),
    FRACTIONS,
    st.integers(1, 50),
    st.none() | st.integers(50, 500),
    st.integers(0, 80),
    st.integers(0, 9),
)
def test_each_row_counts_its_own_tokens_and_those_always_read(visible, fraction, least, most, sink, recent):
    budget = LayerBudget(float(fraction), least, most, sink, recent)
    counts = [by_hand(n, fraction, least, most, sink + recent) for n in visible]
    assert budget.count(torch.tensor(visible)).tolist() == counts
    assert budget.ends(torch.tensor(visible)).tolist() == [min(n, sink + recent) for n in visible]


def test_the_first_token_and_the_last_four_are_always_read_by_default():
    assert (LayerBudget().sink, LayerBudget().recent) == (1, 4)
    assert LayerBudget().count_heads(3) == [3]
    assert LayerBudget().count_heads(100) == [5]  # more than 2 %
    assert LayerBudget().count_heads(1000) == [20]  # counted within the fraction


@settings(deadline=None)
@given(
    st.integers(0, 1 << 21),
    st.floats(1e-6, 1),
    st.integers(1, 50),
    st.none() | st.integers(50, 500),
    st.integers(0, 100),
    st.sampled_from(["visible", "length"]),
)
def test_a_number_is_counted_as_a_tensor(visible, fraction, least, most, dense_below, of):
    budget = LayerBudget(fraction, least, most, dense_below=dense_below, of=of)
    assert budget.count_heads(visible) == [int(budget.count(torch.tensor(visible), torch.tensor(visible)))]


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
    ],
)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be .*got {value!r}"):
        LayerBudget(**{field: value})


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(0, 300))
def test_rows_below_the_break_even_select_all_they_see(visible, edge):
    seen = torch.tensor(visible)
    expected = torch.where(seen < edge, seen, LayerBudget(0.1).count(seen))
    assert torch.equal(LayerBudget(0.1, dense_below=edge).count(seen), expected)


def test_a_budget_that_is_to_be_predicted_counts_only_once_attached():
    with pytest.raises(ValueError, match="only once attached"):
        LayerBudget(dense_below="predicted").count(torch.tensor([3]))


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
