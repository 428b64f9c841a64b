"""How many tokens are drafted: the choice that makes most tokens per time, and none where that loses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparse_decode import Budget, attach
from sparse_decode.costs.pace import PROBE, Costs, LayerCost, Pace
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model

LAYERS = [LayerCost(512.0, 40.0, 2, 0)] * 4 + [LayerCost(512.0, 512.0, 2, 1 << 60, 1024)] * 2
COSTS = Costs(LAYERS, 3e8)


def speed(costs, n, k, chance):
    """Tokens per time over those of dense steps, of rounds that each draft k tokens."""
    made = sum(chance**i for i in range(k + 1))
    return made * costs.check(n, 1) / (k * costs.draft(n) + costs.check(n, k + 1))


@given(
    st.integers(1, 1 << 24),
    st.integers(1, 15),
    st.lists(st.tuples(st.integers(1, 15), st.integers(0, 15)), max_size=40),
)
def test_what_is_drafted_is_best_and_never_predicted_to_lose(n, most, checks):
    pace = Pace(most, COSTS, stops=True)
    for drafted, accepted in checks:
        pace.learn(drafted, min(drafted, accepted))
    speeds = [speed(COSTS, n, k, pace.chance) for k in range(1, most + 1)]
    drafted = pace.next(n)
    if drafted:
        assert speeds[drafted - 1] == max(speeds) > 1
    else:
        assert max(speeds) <= 1


def test_more_is_drafted_the_more_is_accepted_and_the_longer_the_context():
    def drafted(accepted, n):
        pace = Pace(15, COSTS, stops=True)
        for _ in range(50):
            pace.learn(10, accepted)
        return pace.next(n)

    by_acceptance = [drafted(accepted, 1 << 22) for accepted in (0, 5, 9, 10)]
    by_length = [drafted(10, n) for n in (1 << 10, 1 << 16, 1 << 20, 1 << 22)]
    for counts in (by_acceptance, by_length):
        assert counts == sorted(counts)
        assert counts[0] == 0 < counts[-1]


def test_where_drafts_could_pay_one_token_is_tried_now_and_then():
    pace, n = Pace(8, COSTS, stops=True), 1 << 22
    for _ in range(50):
        pace.learn(8, 0)
    drafted = []
    for _ in range(4 * PROBE):
        drafted.append(pace.next(n))
        if drafted[-1]:
            pace.learn(drafted[-1], 0)
    assert set(drafted) == {0, 1}
    assert drafted.count(1) == 3
    assert not any(Pace(8, COSTS, stops=True).next(100) for _ in range(4 * PROBE)), "where they cannot, none is"


def test_it_never_stops_where_it_was_told_from_which_context_on_to_draft():
    pace = Pace(8, COSTS, stops=False)
    for _ in range(50):
        pace.learn(8, 0)
    assert pace.next(100) == 1
    unknown = Pace(8, None, stops=True)
    assert unknown.next(100) > 1, "nobody knows what steps cost there"


def test_rows_layers_and_lengths_cost():
    assert COSTS.check(1000, 1) == 3e8 + 6 * 512 * 1000
    assert COSTS.check(4096, 1) == 3e8 + 512 * (4 * 4096 + 2 * 1024), "a window ends what a layer sees"
    assert COSTS.check(4096, 1) < COSTS.check(4096, 2) < COSTS.check(4096, 3) < 3 * COSTS.check(4096, 1)
    early = Costs([LayerCost(512.0, 40.0, 2, 5000)], 0.0)
    assert early.draft(4999) == early.check(4999, 1), "below the break-even a draft is a dense step"
    assert early.draft(5000) != early.check(5000, 1)


@pytest.mark.parametrize("budget", [None, Budget(0.1, dense_below="predicted")])
def test_below_the_break_even_nothing_is_drafted(budget):
    model, ids = tiny_model(), prompts((40,))[0]
    dense = generate(model, ids, new_tokens=20)
    with attach(model, SignHasher(), budget, exact=4) as attachment:
        assert (generate(model, ids, new_tokens=20) == dense).all()
        assert attachment.drafts.acceptance == (0, 0, 0), "it did not even ask for drafts"
        assert attachment.drafts.acceptance.rate is None


def test_a_number_as_the_break_even_is_taken_as_it_is():
    model, ids = tiny_model(), prompts((40,))[0]
    with attach(model, SignHasher(), Budget(0.1), exact=4) as attachment:
        generate(model, ids, new_tokens=20)
        assert attachment.drafts.acceptance.drafted > 0
    with attach(model, SignHasher(), Budget(0.1, dense_below=50), exact=4) as attachment:
        generate(model, ids, new_tokens=8)
        assert attachment.drafts.acceptance == (0, 0, 0)
        generate(model, ids, new_tokens=20)
        checks, drafted, _ = attachment.drafts.acceptance
        assert drafted > 0
        assert checks > 9, "none before token 50"
