"""What is measured on captured rows: quality, costs and shares of layers and heads, the remainder (eq. 15, 16)."""

import math

import hashcore
import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.data.capture import capture, output_projections
from hashtrain.evaluation import calibration, cost
from hashtrain.evaluation.calibration import FRACTIONS, calibrate
from hashtrain.evaluation.cost import FALLS, LEAST_SHARE, MOST_SHARE, Steps, divide, layer_costs, layer_shares
from hashtrain.evaluation.metrics import best_searched, quality, quality_of_scores, reading
from hashtrain.evaluation.remainder import Evidence, estimated_share, linear_values, log_weight, measure
from hashtrain.layers import BY_VARIANT
from hashtrain.training.target import always_read, attention, top_count
from hashtrain_runs import Given
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import LlamaForCausalLM

TOLERANCE = 1e-4


def test_quality_of_hand_computed_selections():
    """Unused slots do not count."""
    p = torch.tensor([[[[0.5, 0.3, 0.1, 0.1, -1.0], [0.5, 0.3, 0.2, -1.0, -1.0], [0.1, 0.9, -1.0, -1.0, -1.0]]]])
    found = quality(p, torch.tensor([[[[0, 2], [0, 1], [1, -1]]]]), torch.tensor([2, 2, 1]))
    for values, first in zip(found, (1 / 3, 0.5, 0.6 / 0.8), strict=True):
        torch.testing.assert_close(values, torch.tensor([[[first, 1.0, 1.0]]]))


def test_quality_is_measured_on_the_selection_that_is_deployed():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 6, 64, generator=generator), torch.randn(1, 2, 100, 64, generator=generator)
    positions = torch.tensor([70, 75, 80, 85, 90, 99])
    layer = BY_VARIANT["lsh"](HasherConfig("lsh", ModelShape(1, 4, 2, 64)), torch.Generator().manual_seed(1))
    p = attention(q, k, positions, 0.125)
    found = quality_of_scores(layer.scores(q, k), p, positions, 0.2)
    signs = lambda x: (x > 0).float() * 2 - 1  # noqa: E731
    keys = signs(k @ layer.rotation)
    scores = (signs(q.view(1, 2, 2, 6, 64) @ layer.rotation[:, None]).sum(2)) @ keys.transpose(-1, -2)
    for head in range(2):
        for row, position in enumerate(positions.tolist()):
            count, others = top_count(position + 1, 0.2) - 8, range(4, position - 3)  # the others are always read
            seen, exact = scores[0, head, row], p[0, head, row]
            chosen = set(sorted(others, key=lambda i: (-seen[i].item(), i))[:count])
            target = set(sorted(others, key=lambda i: -exact[i].item())[:count])
            most = exact.topk(count + 8).values.sum()
            held = exact[[*range(4), *range(position - 3, position + 1), *chosen]].sum()
            torch.testing.assert_close(found.mass[0, head, row], held / most)
            torch.testing.assert_close(found.iou[0, head, row].item(), len(chosen & target) / len(chosen | target))


@pytest.fixture(scope="module")
def tiny(tiny_config):
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(num_hidden_layers=3)).eval()


@pytest.fixture(scope="module")
def steps(tiny):
    ids = torch.randint(97, (160,), generator=torch.Generator().manual_seed(1))
    return Steps(tiny, ids, torch.tensor([60, 99, 100, 159]))


def lsh(tiny):
    return Hasher(HasherConfig("lsh", ModelShape.of(tiny.config)))


def test_dense_steps_are_the_rows_of_a_whole_pass(tiny, steps):
    with torch.inference_mode():
        whole = tiny(steps.ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(steps.dense, whole[steps.positions], atol=TOLERANCE, rtol=0)


def test_steps_do_not_see_each_other(tiny, steps):
    alone = Steps(tiny, steps.ids, steps.positions[1:2])
    torch.testing.assert_close(alone.dense[0], steps.dense[1], atol=TOLERANCE, rtol=0)
    found, single = (s.log_probs(lsh(tiny), range(3), 0.1) for s in (steps, alone))
    torch.testing.assert_close(single[0], found[1], atol=TOLERANCE, rtol=0)


def test_a_whole_budget_costs_nothing_and_less_costs_something(tiny, steps):
    assert steps.cost(lsh(tiny), range(3), 1.0).abs().max() < TOLERANCE
    assert steps.cost(lsh(tiny), (), 0.1).abs().max() < TOLERANCE
    assert steps.cost(lsh(tiny), range(3), 0.05).min() > 10 * TOLERANCE


def test_the_costliest_layers_stay_dense_but_few():
    class Given:
        def cost(self, hasher, layers, fraction):
            return torch.tensor([float(len(layers)) if len(layers) > 1 else cost.DENSE_ABOVE * (layers[0] + 0.5)])

    hasher = torch.nn.Module()
    hasher.remainder = lambda layer: None
    for layers, dense in ((30, [27, 28, 29]), (9, [])):  # of the 29 above the bound
        hasher.config = HasherConfig("lsh", ModelShape(layers, 4, 2, 32))
        found = layer_costs([Given()], hasher, 0.02, lambda doing, count: None)
        assert (found["all"], found["dense"]) == (layers - len(dense), dense)
        found = layer_costs([Given()], hasher, 0.02, lambda doing, count: None, range(2))
        assert (found["all"], found["dense"]) == (layers - 2, [0, 1])


def test_a_remainder_that_makes_a_layer_worse_is_taken_off(tiny):
    """Costs are invented: the remainder of layer 0 makes it worse, the others help."""

    class Given:
        def cost(self, hasher, layers, fraction):
            whole = [hasher.remainder(layer) is not None for layer in layers]
            return torch.tensor([sum((0.3 if n == 0 else -0.1) * on for n, on in zip(layers, whole, strict=True)) + 1])

    hasher = lsh(tiny)
    for layer in range(3):
        hasher.layer(layer).remainder[:] = layer + 1.0
    found = layer_costs([Given()], hasher, 0.02, lambda doing, count: None)
    assert found["bare"] == [0]
    assert hasher.remainder(0) is None
    assert [hasher.remainder(layer).unique().tolist() for layer in (1, 2)] == [[2.0], [3.0]]
    assert found["layers"] == pytest.approx([1.0, 0.9, 0.9])
    assert found["all"] == pytest.approx(0.8)


def test_shares_follow_costs_and_leave_dense_layers_out():
    shares = layer_shares([0.0, 0.001, 0.008, 0.1, 0.001], dense=[3])
    assert (shares[3], sum(shares)) == (1.0, pytest.approx(5, abs=0.01))
    assert shares[0] < shares[1] == shares[4] < shares[2]
    assert shares[2] / shares[1] == pytest.approx(8 ** (1 / (1 + FALLS)), rel=0.01)
    assert layer_shares([0.0, 0.0, 0.0]) == (1.0, 1.0, 1.0)


FALLING = st.tuples(st.floats(1e-9, 10), st.floats(0.1, 4))


@given(st.lists(FALLING, min_size=1, max_size=8))
def test_a_total_is_divided_so_that_no_part_gains_from_another(parts):
    costs, falls = torch.tensor(parts, dtype=torch.float64).T
    shares = divide(costs, falls)
    assert shares.mean().item() == pytest.approx(1, abs=1e-6)
    assert LEAST_SHARE <= shares.min() <= shares.max() <= MOST_SHARE
    gains = costs * falls * shares ** -(falls + 1)  # of a little more
    for n, share in enumerate(shares.tolist()):
        others = [gains[m] for m, other in enumerate(shares.tolist()) if m != n and other > LEAST_SHARE + 1e-9]
        if share < MOST_SHARE - 1e-9:  # nobody can give, and lose less than this one gains
            assert all(gains[n] <= gain * 1.001 for gain in others)


def test_a_power_law_is_found_in_its_own_values():
    x = torch.tensor(FRACTIONS, dtype=torch.float64) / 0.03
    costs, falls = cost.power_laws(torch.stack([3 * x**-1.5, 0.01 * x**-0.5]), 0.03)
    torch.testing.assert_close(costs, torch.tensor([3, 0.01], dtype=torch.float64))
    torch.testing.assert_close(falls, torch.tensor([1.5, 0.5], dtype=torch.float64))
    costs, falls = cost.power_laws(torch.tensor([[0.0] * 4, [1.0] * 4, [0.0] * 4]), 0.02)
    assert torch.stack([costs, falls]).isfinite().all()
    assert (falls > 0).all()
    assert divide(*cost.power_laws(torch.zeros(2, 4), 0.02)).tolist() == pytest.approx([1, 1])


def test_an_error_is_of_the_layers_output_when_one_head_alone_is_sparse(tiny, tmp_path, monkeypatch):
    """Against masked attention, row by row; with the remainder, it is less in the sum over all rows."""
    hasher, ids = lsh(tiny).layer(1), torch.randint(97, (200,), generator=torch.Generator().manual_seed(0))
    rows = torch.randint(64, 200, (32,), generator=torch.Generator().manual_seed(1))  # all are late
    monkeypatch.setattr(calibration, "_LEAST_ROWS", 32)
    monkeypatch.setattr(calibration, "_draw", lambda *_: rows)
    data = capture(tiny, [ids], tmp_path, dtype=torch.float32)
    found = calibrate(hasher, 1, data, 3, output_projections(tiny)["1"])
    (q, k, _), v = data.read(0, 1), data.values(0, 1)
    project = tiny.model.layers[1].self_attn.o_proj

    def attend(mask):  # bool [4, R, N]
        return F.scaled_dot_product_attention(q[0, :, rows], *(x[0].repeat_interleave(2, 0) for x in (k, v)), mask)

    dense = attend((torch.arange(200) <= rows[:, None]).expand(4, -1, -1))
    for at, fraction in enumerate(FRACTIONS):
        tokens = best_searched(hasher.scores(q[:, :, rows], k)[0], rows, fraction)
        read = reading(tokens, always_read(rows, 200)).repeat_interleave(2, 0)
        for head in range(2):
            one = dense.clone()
            one[2 * head : 2 * head + 2] = attend(read)[2 * head : 2 * head + 2]
            gap = project(one.transpose(0, 1).flatten(1)) - project(dense.transpose(0, 1).flatten(1))
            assert found[0, head, at].item() == pytest.approx(gap.square().sum().item(), rel=1e-3)
    assert (found[1].sum(0) < found[0].sum(0)).all()
    assert sum(cost.head_shares(found[1], 0.02)) == pytest.approx(2, abs=0.002)


def test_a_config_keeps_shares_and_refuses_others(tmp_path):
    shape = ModelShape(2, 4, 2, 32, per_layer=((4, 2, 32), (4, 1, 32)))
    config = HasherConfig("lsh", shape, head_shares=[[0.5, 1.5], [1]], layer_shares=[0.5, 1.5])
    Hasher(config).save_pretrained(tmp_path)
    found = Hasher.from_pretrained(tmp_path).config
    assert (found.head_shares, found.layer_shares) == (((0.5, 1.5), (1,)), (0.5, 1.5))
    assert HasherConfig("lsh", shape).head_shares == HasherConfig("lsh", shape).layer_shares == ()
    for wrong in ([[1, 1]], [[1, 1], [1, 1]], [[1, 0], [1]], [[1, "1"], [1]], [1, 1], 3, [[1, float("nan")], [1]]):
        with pytest.raises(ValueError, match=r"each KV head of each layer, \[2, 1\], or none"):
            HasherConfig("lsh", shape, head_shares=wrong)
    for wrong in ([1.0], [1.0, 0.0], [1.0, float("nan")], ["1", 1], 3, [True, 1]):
        with pytest.raises(ValueError, match="layer_shares must list 2 numbers above 0, or none"):
            HasherConfig("lsh", shape, layer_shares=wrong)


SHAPE = ModelShape(2, 4, 2, 32)


def lsh_layer(bits=128):
    return BY_VARIANT["lsh"](HasherConfig("lsh", SHAPE, bits=bits), torch.Generator().manual_seed(0))


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 4, 5, 32, generator=generator), torch.randn(1, 2, 60, 32, generator=generator)
    return q, k, torch.tensor([9, 20, 30, 45, 59])


def test_measure_agrees_with_sums_written_out(rows):
    q, k, positions = rows
    found, exact, *_ = next(measure(lsh_layer(), q, k, positions, 0.3, [0.2]))
    planes, weights = lsh_layer().encode_queries(q)
    codes = lsh_layer().encode_keys(k)
    for head in range(4):
        for row, position in enumerate(positions.tolist()):
            seen = position + 1
            count = max(8, top_count(seen, 0.2))
            scores = hashcore.score(planes[0, head // 2, row], codes[0, head // 2, :seen], weights=weights)
            searched = hashcore.topk(scores, count - 8, sink=4, recent=4)[1].tolist()
            chosen = [*range(4), *searched, *range(position - 3, position + 1)]
            logits = (k[0, head // 2, :seen] @ q[0, head, row]) * 0.3
            rest = torch.ones(seen, dtype=torch.bool)
            rest[chosen] = False
            at = head // 2, head % 2, row
            torch.testing.assert_close(found.mean[at], logits[chosen].mean())
            torch.testing.assert_close(found.lse[at], logits[chosen].logsumexp(0))
            torch.testing.assert_close(found.mean_key[at], logits.mean(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(exact[at], logits[rest].logsumexp(0))
            assert (found.visible[row], found.selected[head // 2, 0, row]) == (seen, count)


def test_a_token_left_out_weighs_at_most_the_mean_selected_one():
    e = Evidence(*map(torch.tensor, ([0.0], [3.0], [0.0], 100, 4)))
    assert log_weight(torch.tensor([1e3, 0, 0, 0, 0]), e).item() == pytest.approx(3.0 - math.log(4) + math.log(96))
    assert log_weight(torch.tensor([-1e3, 0, 0, 0, 0]), e).item() == pytest.approx(-1e3 + math.log(96))


def test_calibration_beats_no_remainder_and_is_unbiased_on_its_rows(data):
    hasher = lsh_layer()
    assert not hasher.calibrated
    calibrate(hasher, 1, data)
    assert hasher.calibrated
    q, k, scaling = data.read(0, 1)
    positions = torch.arange(128, 512)
    for e, exact, *_ in measure(hasher, q[:, :, positions], k, positions, scaling, (0.01, 0.02)):
        share = torch.sigmoid(exact - e.lse)
        error = estimated_share(hasher, e) - share
        assert share.mean() > 0.3
        assert error.square().mean().sqrt() < 0.2 * share.mean()
        assert abs(error.mean()) < 0.05 * share.mean()


def test_short_lengths_count_in_calibration_too_and_few_contexts_have_many_rows():
    """Of 1,024 tokens, with every eighth query stored, a third of the rows are before the quarter, not a fifth."""
    asked, draw = [], torch.Generator().manual_seed(0)

    class Few(Given):
        def stride(self, context):
            return 8

        def queries(self, context, layer, rows=None):
            asked.append((context, rows))
            return super().queries(context, layer, rows)

    q, k = (torch.randn(3, heads, 1024, 32, generator=draw) for heads in (4, 2))
    calibrate(lsh_layer(), 0, Few(q, k, 0.1, k))
    rows = torch.cat([rows for _, rows in asked])
    assert {context for context, _ in asked} == {0, 1, 2}
    assert len(rows) == 480
    assert not (rows % 8).any()
    assert 64 <= rows.min() < 100
    assert 900 < rows.max() < 1024
    assert 0.28 < (rows < 256).float().mean() < 0.39


def test_linear_values_are_the_mean_and_the_covariance_written_out(rows):
    q, k, positions = rows
    v = torch.randn(1, 2, 60, 24, generator=torch.Generator().manual_seed(4))
    slopes = torch.tensor([0.0, 0.3, -0.2, 1.5])
    found = torch.add(*linear_values(q, k, v, positions, slopes)).flatten(1, 2)
    for head in range(4):
        for row, position in enumerate(positions.tolist()):
            keys, values = (x[0, head // 2, : position + 1].double() for x in (k, v))
            covariance = (values - values.mean(0)).T @ (keys - keys.mean(0)) / (position + 1)
            expected = values.mean(0) + slopes[head] * covariance @ q[0, head, row].double()
            torch.testing.assert_close(found[0, head, row].double(), expected, atol=1e-5, rtol=1e-5)


def test_the_slope_is_that_of_normal_keys_and_linear_values():
    """Values are linear in the keys, so the remainder is the mean plus the full covariance."""
    hasher, draw = lsh_layer(), torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 4096, 32, generator=draw) for heads in (4, 2))
    calibrate(hasher, 0, Given(q, k, 0.1, k @ torch.randn(32, 32, generator=draw)))
    # A selection removes the best tokens, so the others lean slightly less towards the query.
    assert ((hasher.remainder[:, -1] > 0.6) & (hasher.remainder[:, -1] < 1.0)).all()


@pytest.mark.parametrize("least", [-4.0, -12.0, -math.inf])
def test_estimated_shares_sum_to_the_exact_ones(least):
    """Also where some rows leave nothing out, and no statistic tells which."""
    logits = torch.full((2, 2, 60), least)
    logits[..., ::6] = 1.0
    count = torch.tensor
    e = Evidence(torch.zeros(2, 2, 60), torch.full((2, 2, 60), 3.0), torch.zeros(2, 2, 60), count(1000), count(20))
    share = torch.sigmoid(log_weight(calibration.fit_weight([(e, e.lse + logits)]).view(2, 2, 1, 5), e) - e.lse)
    torch.testing.assert_close(share.sum(-1).float(), torch.sigmoid(logits).sum(-1), rtol=0.02, atol=0)
