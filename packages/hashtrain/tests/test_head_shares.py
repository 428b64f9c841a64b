"""Budgets by KV head: what a head costs, how a total is divided, and where the shares are kept."""

import json

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.data.capture import capture, capturing
from hashtrain.evaluation import cost, remainder
from hashtrain.evaluation.cost import FACTORS, LEAST_SHARE, MOST_SHARE, divide, fitted, head_errors, head_shares
from hashtrain.evaluation.metrics import reading
from hashtrain.evaluation.remainder import tokens_read
from hypothesis import given
from hypothesis import strategies as st
from test_cost import lsh, model
from torch.nn import functional as F

__all__ = ["model"]
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
    x = torch.tensor(FACTORS, dtype=torch.float64)
    costs, falls = fitted(torch.stack([3 * x**-1.5, 0.01 * x**-0.5]))
    torch.testing.assert_close(costs, torch.tensor([3, 0.01], dtype=torch.float64))
    torch.testing.assert_close(falls, torch.tensor([1.5, 0.5], dtype=torch.float64))
    costs, falls = fitted(torch.tensor([[0.0] * 7, [1.0] * 7, [0.0] * 7]))  # what costs nothing, or does not fall
    assert torch.stack([costs, falls]).isfinite().all()
    assert (falls > 0).all()
    assert divide(*fitted(torch.zeros(2, 7))).tolist() == pytest.approx([1, 1])


def contexts(count=2):
    return [torch.randint(97, (200,), generator=torch.Generator().manual_seed(n)) for n in range(count)]


def stored(model, folder, count=2):
    return capture(model, contexts(count), folder, dtype=torch.float32)


@pytest.mark.parametrize("calibrated", [False, True])
def test_an_error_is_of_the_layers_output_when_one_head_alone_is_sparse(model, calibrated, tmp_path, monkeypatch):
    """Against masked attention, row by row; without the remainder, whose own tests compare it with decoding."""
    monkeypatch.setattr(cost, "HEAD_ROWS", 20)
    hasher, ids = lsh(model), contexts(1)[0]
    if calibrated:
        monkeypatch.setattr(remainder, "add_remainder", lambda out, lse, value, weight: out)
        hasher.layer(1).remainder[:] = 0.1
    found = head_errors(model, hasher, stored(model, tmp_path, 1), 0.1, 3)
    rows, held = torch.randint(50, 200, (20,), generator=torch.Generator().manual_seed(3)), {}
    with torch.no_grad(), capturing(model, lambda layer, q, k, v, scaling: held.update({layer: (q, k, v, scaling)})):
        model(ids[None], use_cache=False)
    q, k, v, _ = held[1]
    project = model.model.layers[1].self_attn.o_proj
    visible = torch.arange(200) <= rows[:, None]

    def attend(mask):  # bool [4, R, N]
        return F.scaled_dot_product_attention(q[0, :, rows], *(x[0].repeat_interleave(2, 0) for x in (k, v)), mask)

    dense = attend(visible.expand(4, -1, -1))
    for at, factor in enumerate(FACTORS):
        tokens = tokens_read(hasher.layer(1).scores(q[:, :, rows], k)[0], rows, 0.1 * factor)
        read = reading(tokens, torch.zeros(1, 200, dtype=torch.bool)).repeat_interleave(2, 0)
        for head in range(2):
            one = dense.clone()
            one[2 * head : 2 * head + 2] = attend(read)[2 * head : 2 * head + 2]
            gap = project(one.transpose(0, 1).flatten(1)) - project(dense.transpose(0, 1).flatten(1))
            assert found[1][head, at].item() == pytest.approx(gap.square().sum().item(), rel=1e-3)


def test_shares_are_of_each_layers_heads(model, tmp_path):
    data = stored(model, tmp_path)
    found = head_shares(model, lsh(model), data, 0.1)
    assert [len(own) for own in found] == [2, 2, 2]
    assert all(sum(own) == pytest.approx(2, abs=0.002) for own in found)
    assert found == head_shares(model, lsh(model), data, 0.1)
    assert found != head_shares(model, lsh(model), data, 0.1, seed=1)


def test_a_config_keeps_shares_by_head_and_refuses_others(tmp_path):
    shape = ModelShape(2, 4, 2, 32, per_layer=((4, 2, 32), (4, 1, 32)))
    config = HasherConfig("lsh", shape, head_shares=[[0.5, 1.5], [1]])
    assert config.head_shares == ((0.5, 1.5), (1,))
    Hasher(config).save_pretrained(tmp_path)
    assert Hasher.from_pretrained(tmp_path).head_shares == config.head_shares
    assert HasherConfig("lsh", shape).head_shares == Hasher(HasherConfig("lsh", shape)).head_shares == ()
    for wrong in ([[1, 1]], [[1, 1], [1, 1]], [[1, 0], [1]], [[1, "1"], [1]], [1, 1], 3, [[1, float("nan")], [1]]):
        with pytest.raises(ValueError, match=r"each KV head of each layer, \[2, 1\], or none"):
            HasherConfig("lsh", shape, head_shares=wrong)


def test_a_hasher_from_before_loads_without_shares(tmp_path):
    Hasher(HasherConfig("lsh", ModelShape(2, 4, 2, 32))).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["head_shares"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert Hasher.from_pretrained(tmp_path).head_shares == ()
