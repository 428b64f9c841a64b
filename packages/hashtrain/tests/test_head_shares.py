"""Budgets by KV head: what a head costs, how a total is divided, and where the shares are kept."""

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.data.capture import capture, output_projections
from hashtrain.evaluation.cost import LEAST_SHARE, MOST_SHARE, divide, head_shares, power_laws
from hashtrain.evaluation.metrics import best_searched, reading
from hashtrain.evaluation.remainder import FRACTIONS, calibrate
from hashtrain.training.target import always_read
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
    x = torch.tensor(FRACTIONS, dtype=torch.float64) / 0.03
    costs, falls = power_laws(torch.stack([3 * x**-1.5, 0.01 * x**-0.5]), 0.03)
    torch.testing.assert_close(costs, torch.tensor([3, 0.01], dtype=torch.float64))
    torch.testing.assert_close(falls, torch.tensor([1.5, 0.5], dtype=torch.float64))
    costs, falls = power_laws(torch.tensor([[0.0] * 4, [1.0] * 4, [0.0] * 4]), 0.02)
    assert torch.stack([costs, falls]).isfinite().all()
    assert (falls > 0).all()
    assert divide(*power_laws(torch.zeros(2, 4), 0.02)).tolist() == pytest.approx([1, 1])


def test_an_error_is_of_the_layers_output_when_one_head_alone_is_sparse(model, tmp_path):
    """Against masked attention, row by row; with the remainder, it is less in the sum over all rows."""
    hasher, ids = lsh(model).layer(1), torch.randint(97, (200,), generator=torch.Generator().manual_seed(0))
    data = capture(model, [ids], tmp_path, dtype=torch.float32)
    found = calibrate(hasher, 1, data, 3, output_projections(model)["1"])
    rows = torch.randint(64, 200, (32,), generator=torch.Generator().manual_seed(3 * 1_000_003 + 1))  # all are late
    (q, k, _), v = data.read(0, 1), data.values(0, 1)
    project = model.model.layers[1].self_attn.o_proj

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
    assert sum(head_shares(found[1], 0.02)) == pytest.approx(2, abs=0.002)


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
