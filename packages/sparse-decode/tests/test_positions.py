"""Visibility, spans, and the tokens around a selection: against Python lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_decode.positions import count_visible, ends_by_sorting, see, visible_rows, visible_span, with_ends
from sparse_decode.select import Rows
from sparse_decode_doubles import as_sets

CPU = torch.device("cpu")
ENDS = st.integers(0, 11)


def lists(indices):
    as_sets(indices, 10_000)
    return [[token for token in row if token >= 0] for row in indices.flatten(0, -2).tolist()]


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
def test_a_span_is_what_a_row_sees_and_holes_are_refused(rows):
    visible = torch.tensor(rows)[:, None, None]
    if any("".join("01"[x] for x in row).strip("0").count("0") for row in rows):
        with pytest.raises(ValueError, match=r"consecutive tokens .* with holes; pad on the left only"):
            visible_span(visible)
        return
    positions = torch.arange(7)
    first, end = (x[..., None] for x in visible_span(visible))
    assert torch.equal((positions >= first) & (positions < end), visible[:, 0])


def test_on_a_device_holes_are_an_error_of_the_device(monkeypatch):
    monkeypatch.setattr("sparse_decode.positions.readable", lambda x: False)
    visible_span(torch.tensor([True, True, False])[None, None, None])
    with pytest.raises(RuntimeError, match=r"consecutive tokens .* with holes"):
        visible_span(torch.tensor([True, False, True])[None, None, None])


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
@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=4), ENDS, ENDS, ENDS)
def test_a_step_reads_the_ends_of_what_it_sees_and_selects_between_them(spans, sink, recent, more):
    spans = [sorted(span) for span in spans]
    shown = torch.tensor([[start <= token < end for token in range(9)] for start, end in spans])[:, None, None]
    found = see(shown, lambda seen: (seen.clamp(max=sink + recent + more), seen > 0), sink, recent)
    q, k = torch.zeros(len(spans), 1, 1, 2), torch.zeros(len(spans), 1, 9, 2)
    rows = Rows(0, q, k, None, shown, found.chosen, 1.0, sink=sink, recent=recent, known_span=found.span)
    among = rows.candidates().expand(len(spans), 1, 1, 9)
    for row, (start, end) in enumerate(spans):
        seen = list(range(start, end))
        middle = seen[sink : max(sink, len(seen) - recent)]
        assert sorted(x for x in found.ends[row].tolist() if x >= 0) == [x for x in seen if x not in middle]
        assert among[row, 0, 0].nonzero().flatten().tolist() == middle
        assert found.chosen[row].item() == min(more, max(0, len(seen) - sink - recent))
