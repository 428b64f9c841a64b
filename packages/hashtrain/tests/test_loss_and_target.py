"""Targets, sampled pairs, surrogates and losses against closed forms, and `paper-exact` against the paper's formula."""

import math
from dataclasses import replace

import hashcore
import pytest
import torch
from hashtrain import HasherConfig, ModelShape, TrainConfig
from hashtrain.hasher import make_layer
from hashtrain.layers import BY_VARIANT
from hashtrain.layers.surrogate import quantised, signs
from hashtrain.training.loss import ranking_loss, reconstruction_loss
from hashtrain.training.pairs import pair_scores
from hashtrain.training.target import attention, largest, sample_pairs, top_count
from hashtrain.training.trainer import Training
from hashtrain_runs import Given
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_the_ranking_loss_of_16_bit_scores_is_computed_in_float32(kind):
    top, rest = torch.tensor([3.0, 9.0, -6.0]).repeat(64).to(kind), torch.zeros(400, dtype=kind)
    expected = torch.nn.functional.softplus(3 - top.double()).mean().item()
    assert ranking_loss(top, rest, torch.tensor([True])).item() == pytest.approx(expected, rel=1e-5)


def test_reconstruction_is_the_share_of_variance_that_no_line_explains():
    scores, logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]]), torch.tensor([[1.0, 2.0, 0.0, -7.0]])
    valid = torch.tensor([[True, True, True, False]])
    corr = torch.corrcoef(torch.stack([scores[0, :3], logits[0, :3]]))[0, 1]
    assert reconstruction_loss(scores, logits, valid).item() == pytest.approx(1 - corr.item() ** 2, rel=1e-5)
    line = 3 - 2 * logits
    assert reconstruction_loss(line, logits, valid).item() == pytest.approx(0, abs=1e-6)


def test_surrogates_go_forward_as_what_is_deployed_and_back_with_their_slopes():
    x = torch.tensor([-2.0, -0.0, 0.0, 3.0], requires_grad=True)
    y = signs(x)
    y.backward(torch.ones(4))
    padded = torch.nn.functional.pad(x.detach(), (0, 28))
    assert torch.equal(y > 0, hashcore.unpack(hashcore.pack(padded))[:4])
    torch.testing.assert_close(x.grad, 1 / (1 + x.detach().abs()) ** 2)
    w = torch.tensor([[0.1, -0.3, 1.0]], requires_grad=True)  # the bound is 0.8 of the largest
    quantised(w, 3)[0].sum().backward()
    torch.testing.assert_close(w.grad, torch.tensor([[1.0, 1.0, 0.0]]))  # no slope where it clips


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
    pairs = sample_pairs(p.clone(), positions, 0.09, 300, 4000, torch.Generator().manual_seed(0))
    for head in range(2):
        for row, position in enumerate(positions.tolist()):
            always = {*range(4), *range(position - 3, position + 1)}  # tokens that every row reads are never in a pair
            count = max(1, top_count(position + 1, 0.09) - 8)
            order = p[0, head, row].argsort(descending=True).tolist()
            target = {token for token in order if token not in always and token <= position}
            target = set(sorted(target, key=order.index)[:count])
            assert set(pairs.top[0, head, row].tolist()) == target  # 300 draws reach all of at most 10
            rest = set(pairs.rest[pairs.valid[0, head, row]].tolist())
            assert rest == set(range(position + 1)) - target - always  # and 4,000 all of at most 200


def test_tokens_of_a_target_are_drawn_in_proportion_to_their_attention():
    *_, positions, p = qkp()
    pairs = sample_pairs(p.clone(), positions, 0.09, 40_000, 9, torch.Generator().manual_seed(0), by_attention=True)
    same = sample_pairs(p.clone(), positions, 0.09, 40_000, 9, torch.Generator().manual_seed(0))
    assert torch.equal(pairs.rest, same.rest)
    assert torch.equal(pairs.valid, same.valid)
    drawn = torch.zeros_like(p).scatter_add_(-1, pairs.top, torch.ones(pairs.top.shape))
    target = torch.zeros_like(p).scatter_(-1, same.top, 1.0) > 0
    wanted = torch.where(target, p, 0.0)
    wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(drawn / 40_000, wanted, atol=0.012, rtol=0)
    assert target.sum(-1).max() > 5


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


@settings(deadline=None, max_examples=60)
@given(
    *(st.integers(1, 3), st.integers(1, 200), st.integers(1, 40)),
    *(st.sampled_from([0.0, 1.0, 30.0, 400.0, 5000.0]), st.sampled_from([0.125, 1.0, 2.0]), st.integers(0, 1 << 30)),
)
def test_the_loss_and_its_gradient_are_those_of_softplus(rows, tops, rests, spread, beta, seed):
    generator = torch.Generator().manual_seed(seed)
    top = torch.randn(2, rows, tops, generator=generator) * spread + spread
    rest = torch.randn(2, rows, rests, generator=generator) * spread
    valid = torch.rand(2, rows, rests, generator=generator) < 0.8
    exact = [x.double().requires_grad_() for x in (top, rest)]
    terms = torch.nn.functional.softplus(3 - beta * (exact[0][..., :, None] - exact[1][..., None, :]))
    wanted = (terms * valid[..., None, :]).sum() / max(1, tops * int(valid.sum()))
    wanted.backward()
    for dtype, off in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        found = [x.to(dtype, copy=True).requires_grad_() for x in (top, rest)]
        loss = ranking_loss(*found, valid, beta)
        loss.backward()
        size = max(1.0, beta * spread)  # scores as large as that are rounded
        assert loss.item() == pytest.approx(wanted.item(), rel=off * size, abs=off)
        for ours, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.grad.double(), expected.grad, rtol=10 * off * size, atol=off * size)


SHAPE = ModelShape(1, 4, 2, 16)
T, FRACTION = 100, 0.05
PAPER = TrainConfig(fraction=FRACTION, of="length", sink=0, recent=0, min_position=0, steps=1, max_top=4, max_rest=30)


def drawn():
    """Random queries and keys, far enough apart for different scores."""
    draw = torch.Generator().manual_seed(1)
    q = 2 * torch.randn(1, 4, T, 16, generator=draw)
    return Given(q, torch.randn(1, 2, T, 16, generator=draw), 0.25)


def layer_of():
    config = HasherConfig("paper", SHAPE, bits=32, hidden=128, init="gaussian")
    layer = make_layer(config, 0, seed=3)
    for parameter in layer.parameters():
        parameter.data *= 100  # so that codes differ, as after the first steps of training
    return layer


def papers_loss(mlp, q, k, positions, top, rest, gamma, alpha, beta):
    """The paper's section 3.3 for one head, independent of our code: the loss of the pairs (top[r], rest).

    mlp: W1 [D, 128], b1 [128], W2 [128, bits]; q [R, D]; k [T, D]; top: token numbers [R][A]; rest: [C].
    """
    w1, b1, w2 = mlp

    def code(x):
        z = x @ w1 + b1
        y = (z * torch.sigmoid(z)) @ w2
        return gamma * y / (1 + gamma * y.abs())

    k_of_row = math.floor(T * FRACTION)  # of the full length, for every row
    losses = []
    for r, position in enumerate(positions.tolist()):
        order = (q[r] @ k[: position + 1].T).argsort(descending=True).tolist()
        target = set(order[:k_of_row])
        estimated = code(q[r]) @ code(k).T
        assert set(top[r]) <= target
        pairs = [(i, j) for i in top[r] for j in rest if j <= position and j not in target]
        losses += [-torch.sigmoid(beta * (estimated[i] - estimated[j]) - alpha).log() for i, j in pairs]
    return losses


@pytest.mark.parametrize(("alpha", "beta"), [(3.0, 1.0), (0.5, 0.25)])
def test_a_training_step_is_the_papers_formula(alpha, beta):
    layer, config = layer_of(), replace(PAPER, alpha=alpha, beta=beta)
    training = Training(layer, 0, drawn(), config)
    pairs_of, used = training._pairs, []
    training._pairs = lambda *args: used.append(pairs_of(*args)) or used[-1]
    (q, k, scaling), at = training.data.read(0, 0), torch.tensor([0, 2, 9, 40, 77, 99])
    got = training._gradients(q[:, :, at], k, at, scaling)
    gradients = [p.grad.clone() for p in (layer.w1, layer.b1, layer.w2)]
    (pairs,) = used
    losses = []
    for head in range(4):
        mlp = layer.w1[head], layer.b1[head, 0], layer.w2[head]
        told = pairs.top[0, head].tolist(), pairs.rest.tolist()
        losses += papers_loss(mlp, q[0, head, at], k[0, head // 2], at, *told, 64.0, alpha, beta)
    wanted = torch.stack(losses).mean()
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(wanted, [layer.w1, layer.b1, layer.w2])
    assert max(g.abs().max().item() for g in expected) > 1e-3, "an empty comparison"
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rows_that_see_no_more_than_the_target_have_no_pair():
    at = torch.tensor([0, 3, 4, 5, 60])
    q, k, scaling = drawn().read(0, 0)
    p = attention(q[:, :, at], k, at, scaling, "query")
    pairs = sample_pairs(p.clone(), at, FRACTION, 50, 500, torch.Generator().manual_seed(0), "length", (0, 0))
    assert pairs.valid.flatten(0, 1).any(-1).any(0).tolist() == [False, False, False, True, True]
    assert (pairs.top <= at[:, None]).all()  # only visible tokens


def test_the_gaussian_start_is_normal():
    layer = make_layer(HasherConfig("paper", ModelShape(1, 8, 8, 64), hidden=128, init="gaussian"), 0)
    for tensor in (layer.w1, layer.b1, layer.w2):
        assert tensor.std().item() == pytest.approx(1e-3, rel=0.06)
        assert tensor.mean().abs().item() < 2e-4
