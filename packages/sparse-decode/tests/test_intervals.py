"""Intervals in place of masks: what rows see is what transformers' masks show."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparse_decode.intervals import (
    Memo,
    Numbers,
    causal,
    intervals_of,
    is_interval,
    mask_of_eager,
    mask_of_sdpa,
    visible,
)
from transformers import masking_utils as masks
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function


def padding(lengths, n):
    return torch.arange(n) >= n - torch.tensor(lengths)[:, None]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(1, 12), st.integers(0, 5), st.booleans())
def test_the_tokens_are_those_of_torchs_mask(lengths, rows, room, static):
    """Left-padded batches, chunks behind a cache, and rooms of static caches that are not full."""
    n = 12
    seen = padding(lengths, n)
    shown = torch.cat([seen, torch.zeros(len(lengths), room, dtype=torch.bool)], 1)
    offset = torch.tensor(n - rows) if static else n - rows
    how = {"batch_size": len(lengths), "q_length": rows, "kv_length": n + room, "q_offset": offset, "device": "cpu"}
    ours = mask_of_sdpa(attention_mask=shown, **how)
    expected = sdpa_mask(attention_mask=shown, allow_is_causal_skip=False, **how)
    if ours is None:
        assert seen.all()
        assert not static
        return
    assert is_interval(ours)
    assert ours.shape == (len(lengths), 1, rows, 2)
    assert torch.equal(visible(ours[:, 0], n + room), expected)
    assert torch.equal(
        intervals_of(expected, rows, n + room)[..., 1], ours[:, 0, :, 1].where(expected.any(-1)[:, 0], 0)
    )


@pytest.mark.parametrize("hidden", [[0, 3], [11], [4, 5]])
def test_holes_stay_a_mask_and_are_refused_in_steps(hidden):
    """Padding on the right, too: the prompt is dense as before, and the first step says what is wrong."""
    shown = torch.ones(1, 12, dtype=torch.bool)
    shown[0, hidden] = False
    how = {"batch_size": 1, "kv_length": 12, "device": "cpu", "attention_mask": shown}
    prompt = mask_of_sdpa(q_length=12, q_offset=0, **how)
    assert torch.equal(prompt, sdpa_mask(q_length=12, q_offset=0, **how))
    step = mask_of_sdpa(q_length=1, q_offset=11, **how)
    if hidden == [11]:
        assert intervals_of(step, 1, 12).tolist() == [[[0, 11]]]
        return
    with pytest.raises(ValueError, match="must see consecutive tokens for sparse attention, got one with holes"):
        intervals_of(step, 1, 12)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=2), st.integers(1, 9), st.integers(1, 14), st.integers(0, 4))
def test_a_sliding_window_is_an_interval(lengths, rows, window, dropped):
    """Left-padded or not, in chunks, and behind a cache that has dropped its first tokens."""
    n = 12 - dropped
    rows = min(rows, n)
    how = {"batch_size": len(lengths), "q_length": rows, "kv_length": n, "q_offset": 12 - rows, "kv_offset": dropped}
    how |= {"device": "cpu", "attention_mask": padding(lengths, 12), "local_size": window}
    how["mask_function"] = sliding_window_causal_mask_function(window)
    ours = mask_of_sdpa(**how)
    expected = sdpa_mask(allow_is_causal_skip=False, **how)
    shown = visible(causal(len(lengths), rows, n, torch.device("cpu")) if ours is None else ours[:, 0], n)
    assert torch.equal(shown, expected)


def test_masks_of_other_kinds_stay_masks():
    """A prefix that sees itself, a window on both sides, chunks in a room that is longer, and all tokens.

    Transformers says None for some, which our attention would take for rows of a causal text.
    """
    how = {"batch_size": 1, "q_length": 6, "kv_length": 9, "device": "cpu"}
    prefix = masks.or_masks(sliding_window_causal_mask_function(3), lambda b, h, q, kv: (q < 4) & (kv < 4))
    both = masks.sliding_window_bidirectional_mask_function(3)
    chunks = masks.chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.int64))
    every = masks.bidirectional_mask_function
    for shown in (prefix, masks.and_masks(masks.causal_mask_function, prefix), both, chunks, every):
        whole = sdpa_mask(mask_function=shown, allow_is_causal_skip=False, **how)
        skips = {"allow_is_causal_skip": True, "allow_is_bidirectional_skip": True, "local_size": 16}
        assert torch.equal(mask_of_sdpa(mask_function=shown, **skips, **how), whole)
        assert mask_of_eager(mask_function=shown, dtype=torch.float32, **how).dtype == torch.float32


def test_masks_that_attention_cannot_use_are_refused():
    shown = torch.ones(1, 1, 3, 8, dtype=torch.bool)
    numbers = torch.zeros(1, 1, 3, 8).masked_fill(~shown.tril(5), torch.finfo(torch.float32).min)
    assert torch.equal(intervals_of(numbers, 3, 8), intervals_of(shown.tril(5), 3, 8))
    with pytest.raises(ValueError, match="must hide or show tokens, got one with biases"):
        intervals_of(numbers + 0.5, 3, 8)
    with pytest.raises(ValueError, match="must be shared by all heads"):
        intervals_of(shown.expand(1, 2, 3, 8), 3, 8)
    for narrow in (shown[..., :7], torch.tensor([[[[0, 9]] * 3]])):
        with pytest.raises(ValueError, match="must be for 3 rows and 8 keys"):
            intervals_of(narrow, 3, 8)
    assert torch.equal(intervals_of(shown[:, :, :1], 3, 8), torch.tensor([0, 8]).expand(1, 3, 2))


def test_what_layers_share_is_found_once_a_step_even_if_its_numbers_change():
    """A step begins anew at the same layer or an earlier one; another key or mask is another result."""
    memo, mask, found = Memo(), torch.tensor([[[0, 9]]]), []

    def of(layer, key="a", given=mask):
        return memo.of(given, layer, key, lambda: found.append(given.sum().item()) or len(found))

    assert [of(0), of(1), of(2, "b"), of(3)] == [1, 1, 2, 1]
    mask += 1
    assert [of(0), of(3)] == [3, 3]
    assert [of(4, given=mask.clone()), of(5)] == [4, 5]
    assert found == [9, 9, 11, 11, 11]


def test_counts_that_a_capture_made_are_not_kept(monkeypatch):
    """They exist only when it is replayed. What was kept stays, for captures that read it."""
    numbers, q = Numbers(), torch.zeros(2, 4, 1, 8)
    for captured, kept, most in ((True, 0, 5), (False, 1, 5), (False, 1, 900), (True, 1, 9000), (False, 2, 9000)):
        monkeypatch.setattr("sparse_decode.intervals.in_graph", lambda _, captured=captured: captured)
        assert numbers.of([3, most], q).tolist() == [[[3], [most]]] * 2
        assert len(numbers._all) == kept
