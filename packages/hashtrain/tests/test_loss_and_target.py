"""Targets, sampled pairs, surrogates and the ranking loss, against closed forms."""

import math

import hashcore
import pytest
import torch
from hashtrain.config import HasherConfig, ModelShape
from hashtrain.layers import BY_VARIANT
from hashtrain.layers.surrogate import quantised, signs
from hashtrain.training.loss import ranking_loss, reconstruction_loss
from hashtrain.training.target import attention, largest, sample_pairs, top_count
from hashtrain.training.trainer import pair_scores
from hypothesis import given, settings
from hypothesis import strategies as st


def test_loss_of_two_pairs_in_closed_form():
    top, rest, valid = torch.tensor([5.0]), torch.tensor([1.0, 2.0]), torch.tensor([True, True])
    expected = (math.log1p(math.exp(3 - 4)) + math.log1p(math.exp(3 - 3))) / 2
    assert ranking_loss(top, rest, valid).item() == pytest.approx(expected, rel=1e-6)
    scaled = (math.log1p(math.exp(1 - 8)) + math.log1p(math.exp(1 - 6))) / 2
    assert ranking_loss(top, rest, valid, beta=2, alpha=1).item() == pytest.approx(scaled, rel=1e-6)


def test_reconstruction_is_the_share_of_variance_that_no_line_explains():
    scores, logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]]), torch.tensor([[1.0, 2.0, 0.0, -7.0]])
    valid = torch.tensor([[True, True, True, False]])
    corr = torch.corrcoef(torch.stack([scores[0, :3], logits[0, :3]]))[0, 1]
    assert reconstruction_loss(scores, logits, valid).item() == pytest.approx(1 - corr.item() ** 2, rel=1e-5)
    line = 3 - 2 * logits
    assert reconstruction_loss(line, logits, valid).item() == pytest.approx(0, abs=1e-6)


def test_straight_through_sign_goes_forward_as_packed_bits_and_back_with_softsigns_slope():
    x = torch.tensor([-2.0, -0.0, 0.0, 3.0], requires_grad=True)
    y = signs(x)
    y.backward(torch.ones(4))
    padded = torch.nn.functional.pad(x.detach(), (0, 28))
    assert torch.equal(y > 0, hashcore.unpack(hashcore.pack(padded))[:4])
    torch.testing.assert_close(x.grad, 1 / (1 + x.detach().abs()) ** 2)


def test_quantised_has_no_slope_where_it_clips():
    w = torch.tensor([[0.1, -0.3, 1.0]], requires_grad=True)  # the bound is 0.8 of the largest
    quantised(w, 3)[0].sum().backward()
    torch.testing.assert_close(w.grad, torch.tensor([[1.0, 1.0, 0.0]]))


@given(st.integers(0, 10_000), st.integers(1, 1000), st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_top_count_is_the_floor_of_the_fraction_between_its_bounds(visible, thousandths, least):
    expected = min(visible, max(least, visible * thousandths // 1000))
    assert top_count(visible, thousandths / 1000, least) == expected
    assert top_count(torch.tensor([visible]), thousandths / 1000, least).item() == expected


def qkp(rows=9, t=200, heads="kv"):
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 4, rows, 16, generator=generator), torch.randn(1, 2, t, 16, generator=generator)
    positions = torch.randint(30, t, (rows,), generator=generator)
    return q, k, positions, attention(q, k, positions, 0.25, heads)


def test_attention_equals_torchs_and_sums_over_the_group():
    q, k, positions, p = qkp()
    mask = torch.arange(200) <= positions[:, None]
    eye = torch.eye(200).expand(1, 4, 200, 200)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), eye, attn_mask=mask, scale=0.25
    )
    torch.testing.assert_close(p.clamp(min=0), exact.view(1, 2, 2, 9, 200).sum(2), atol=1e-5, rtol=1e-4)
    assert (p[..., ~mask] == -1).all()
    torch.testing.assert_close(qkp(heads="query")[3].clamp(min=0), exact, atol=1e-5, rtol=1e-4)


def test_sampled_pairs_are_inside_and_outside_the_target_set():
    *_, positions, p = qkp()
    pairs = sample_pairs(p.clone(), positions, 0.05, 300, 4000, torch.Generator().manual_seed(0))
    for head in range(2):
        for row, position in enumerate(positions.tolist()):
            always = {0, *range(position - 3, position + 1)}  # tokens that every row reads are never in a pair
            count = max(1, top_count(position + 1, 0.05) - 5)
            order = p[0, head, row].argsort(descending=True).tolist()
            target = {token for token in order if token not in always and token <= position}
            target = set(sorted(target, key=order.index)[:count])
            assert set(pairs.top[0, head, row].tolist()) == target  # 300 draws reach all of at most 10
            rest = set(pairs.rest[pairs.valid[0, head, row]].tolist())
            assert rest == set(range(position + 1)) - target - always  # and 4,000 all of at most 200


@given(st.integers(1, 400), st.integers(1, 20), st.booleans(), st.integers(0, 1 << 30))
def test_the_largest_of_a_row_are_those_of_topk(tokens, count, ties, seed):
    count = min(count, tokens)
    x = torch.randn(2, 3, tokens, generator=torch.Generator().manual_seed(seed))
    x = x.round() if ties else x
    x[0, :, 3:] = -torch.inf  # as where a row sees three tokens
    values, at = largest(x, count)
    assert torch.equal(values, x.topk(count).values)
    assert torch.equal(values, x.gather(-1, at))
    assert all(len(set(row.tolist())) == count for row in at.flatten(0, 1))


@pytest.mark.parametrize("variant", ["planes", "paper"])
def test_pair_scores_are_those_of_all_keys_at_the_sampled_places(variant):
    q, k, positions, p = qkp(heads="query" if variant == "paper" else "kv")
    config = HasherConfig(variant, ModelShape(1, 4, 2, 16), hidden=32)
    layer = BY_VARIANT[variant](config, torch.Generator().manual_seed(0)).requires_grad_(False)
    pairs = sample_pairs(p.clone(), positions, 0.05, 5, 40, torch.Generator().manual_seed(0))
    every = layer.soft_queries(q) @ layer.soft_keys(k.repeat_interleave(p.shape[1] // 2, 1)).transpose(-1, -2)
    top, rest = pair_scores(layer, q, k, pairs)
    torch.testing.assert_close(top, every.gather(-1, pairs.top), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rest, every[..., pairs.rest], atol=1e-3, rtol=1e-4)


@given(
    rows=st.integers(1, 3),
    tops=st.integers(1, 20),
    rests=st.integers(1, 40),
    spread=st.sampled_from([0.0, 1.0, 30.0, 400.0, 5000.0]),
    beta=st.sampled_from([0.125, 1.0, 2.0]),
    seed=st.integers(0, 1 << 30),
)
def test_the_kernel_of_the_loss_equals_autograd_in_float64(rows, tops, rests, spread, beta, seed):
    generator = torch.Generator().manual_seed(seed)
    top = torch.randn(2, rows, tops, generator=generator) * spread + spread
    rest = torch.randn(2, rows, rests, generator=generator) * spread
    valid = torch.rand(2, rows, rests, generator=generator) < 0.8
    found, exact = (
        [x.to(dtype, copy=True).requires_grad_() for x in (top, rest)] for dtype in (torch.float32, torch.float64)
    )
    losses = [ranking_loss(*scores, valid, beta) for scores in (found, exact)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for ours, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), expected.grad, rtol=1e-5, atol=1e-7)
