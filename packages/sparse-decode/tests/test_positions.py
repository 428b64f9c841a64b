"""Visibility, first and last tokens, merged sets: against Python lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode.positions import (
    between,
    count_visible,
    ends_by_sorting,
    first_visible,
    last_visible,
    merge,
    visible_rows,
    visible_span,
    with_ends,
)
from sparse_decode_doubles import as_sets

CPU = torch.device("cpu")
ENDS = st.integers(0, 11)


def lists(indices):
    as_sets(indices, 10_000)
    return [[token for token in row if token >= 0] for row in indices.flatten(0, -2).tolist()]


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4), st.integers(0, 10))
def test_first_and_last_visible_tokens(rows, wanted):
    visible = torch.tensor(rows)[None, None]
    counts = visible[:, 0].sum(-1).clamp(max=wanted)
    seen = [[i for i, bit in enumerate(row) if bit] for row in rows]
    assert lists(first_visible(visible, counts, 9)) == [row[:wanted] for row in seen]
    assert lists(last_visible(visible, counts, 9)) == [
        row[len(row) - wanted if len(row) > wanted else 0 :] for row in seen
    ]


def test_everything_visible_needs_no_mask():
    counts = torch.tensor([[0, 2, 5]])
    assert lists(first_visible(None, counts, 5)) == [[], [0, 1], [0, 1, 2, 3, 4]]
    assert lists(last_visible(None, counts, 5)) == [[], [3, 4], [0, 1, 2, 3, 4]]


SETS = st.lists(st.lists(st.sets(st.integers(0, 11)), min_size=3, max_size=3), min_size=2, max_size=2)


@settings(deadline=None)
@given(SETS, st.lists(st.sets(st.integers(0, 11)), min_size=3, max_size=3))
def test_merging_keeps_each_token_once(selected, extra):
    def padded(sets):
        width = max(map(len, sets))
        return [sorted(s) + [-1] * (width - len(s)) for s in sets]

    wide = torch.tensor(padded([s for head in selected for s in head]), dtype=torch.int64).view(1, 2, 3, -1)
    merged = merge(wide, torch.tensor([padded(extra)], dtype=torch.int64), 12)
    assert lists(merged) == [sorted(s | e) for head in selected for s, e in zip(head, extra, strict=True)]
    assert merged.shape[-1] == max(len(s | e) for head in selected for s, e in zip(head, extra, strict=True))


@pytest.mark.parametrize("n", [6, 10])
def test_no_mask_is_causal_from_the_end(n):
    rows = visible_rows(None, 2, 5, 6, n, CPU)
    assert rows[0, 0].sum(-1).tolist() == [n - 3, n - 2, n - 1]
    assert count_visible(None, 2, 6, n, CPU, 4).tolist() == [list(range(n - 5, n + 1))] * 2


def test_additive_masks_hide_like_boolean_ones():
    shown = torch.rand(3, 1, 6, 9) > 0.4
    additive = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    assert torch.equal(visible_rows(additive, 1, 5, 6, 9, CPU), shown[:, :, 1:5])
    assert torch.equal(count_visible(additive, 3, 6, 9, CPU, 4), shown[:, 0].sum(-1))


def test_masks_with_biases_or_heads_are_refused():
    with pytest.raises(ValueError, match="biases"):
        visible_rows(torch.full((1, 1, 2, 3), -0.5), 0, 2, 2, 3, CPU)
    with pytest.raises(ValueError, match="shared by all heads"):
        visible_rows(torch.ones(1, 4, 2, 3, dtype=torch.bool), 0, 2, 2, 3, CPU)


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=5))
def test_a_span_is_what_a_row_sees_or_none(rows):
    visible = torch.tensor(rows)[:, None, None]
    whole = all("".join("01"[x] for x in row).strip("0").count("0") == 0 for row in rows)
    span = visible_span(visible, 7)
    assert (span is not None) == whole
    if span is not None:
        positions = torch.arange(7)
        first, end = (x[..., None] for x in span)
        assert torch.equal((positions >= first) & (positions < end), visible[:, 0])


def test_without_a_mask_the_span_is_all():
    assert visible_span(None, 7) == (0, 7)


@settings(deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 8)), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=4),
    st.integers(0, 11),
    st.integers(0, 11),
    st.sampled_from(["cpu", "meta's way"]),
)
def test_ends_stand_around_what_is_selected_of_the_others(heads, spans, sink, recent, way):
    width = max(map(len, heads))
    selected = torch.tensor([sorted(row) + [-1] * (width - len(row)) for row in heads], dtype=torch.int64)
    selected = selected[None, :, None].expand(1, -1, len(spans), -1)
    starts, ends = torch.tensor([sorted(span) for span in spans]).T[:, None]
    function = with_ends if way == "cpu" else ends_by_sorting
    merged = function(selected, starts, ends, sink, recent)
    for head, tokens in enumerate(heads):
        for row, (start, end) in enumerate(sorted(span) for span in spans):
            seen = list(range(start, end))
            always = {*seen[:sink], *(seen[-recent:] if recent else [])}
            assert lists(merged[:, head, row]) == [sorted(always | (tokens & set(seen)))]


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4), ENDS, ENDS)
def test_candidates_are_what_a_row_sees_but_its_ends(rows, sink, recent):
    visible = torch.tensor(rows)[:, None, None]
    found = between(visible, sink, recent, 1, 9, CPU)
    for row, kept in zip(rows, found[:, 0, 0].tolist(), strict=True):
        seen = [i for i, bit in enumerate(row) if bit]
        middle = seen[sink : max(sink, len(seen) - recent)]
        assert [i for i, bit in enumerate(kept) if bit] == middle


def test_candidates_without_a_mask():
    assert between(None, 0, 0, 2, 5, CPU) is None
    assert between(None, 1, 2, 2, 5, CPU).tolist() == [[[[False, True, True, False, False]] * 2]]
