"""What a selection leaves out by a rank-1 prior, against its definition."""

from dataclasses import replace

import pytest
import torch
from evals.methods import load_methods
from evals.rank_one import _visible, prior_values
from sparse_decode import Rows
from transformers import AutoConfig


@pytest.fixture(scope="module")
def case():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, 32, generator=draw) for heads, n in ((4, 3), (2, 50), (2, 50)))
    positions = torch.tensor([29, 30, 49])
    visible = (torch.arange(50) <= positions[:, None])[None, None]
    counts = torch.tensor([[9, 9, 12]])
    return Rows(0, q, k, None, visible, counts, 0.3), v, positions


def test_values_are_means_under_the_weights_of_the_mean_query(case):
    rows, v, positions = case
    indices = torch.tensor([[[[0, 3, 29, -1], [1, 2, 30, -1], [5, 48, 49, 6]]]]).expand(1, 2, -1, -1)
    found = prior_values(rows, v, indices, positions)
    for head in range(4):
        logits = rows.k[0, head // 2] @ rows.q[0, head].mean(0) * 0.3
        for row, position in enumerate(positions.tolist()):
            left = [j for j in range(position + 1) if j not in indices[0, 0, row].tolist()]
            expected = logits[left].softmax(0) @ v[0, head // 2, left]
            torch.testing.assert_close(found[0, head, row], expected, rtol=1e-5, atol=1e-5)


def test_one_row_by_its_own_query_misses_dense_only_by_the_weight(case, made):
    """With all tokens read, by nothing."""
    config = AutoConfig.from_pretrained(made.model)
    ours, other = load_methods(["transform+remainder", "transform+rank-one"], made.hashers, config)
    rows, v, _ = case
    codes = other.selector.encode_keys(0, rows.k)
    rows = Rows(0, rows.q[:, :, 2:], rows.k, codes, rows.visible[:, :, 2:], torch.tensor([[12]]), 32**-0.5)
    indices = other.selector.select(rows)
    assert (indices >= 0).sum(-1).eq(12).all()
    assert {0, 46, 47, 48, 49} <= {*indices[0, 0, 0].tolist()}
    keys, values = (x.repeat_interleave(2, 1) for x in (rows.k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(rows.q, keys, values).transpose(1, 2)
    found = other.selector.attend(rows, v, indices)
    assert 0 < (found - dense).norm() / dense.norm() < 0.5  # its weight was fitted on other keys
    every = torch.arange(50).expand(1, 2, 1, -1)
    torch.testing.assert_close(other.selector.attend(rows, v, every), dense, rtol=1e-4, atol=1e-5)
    assert ours.identity == other.identity
    assert not other.remainder, "the selector adds what is left out itself"


def test_texts_with_padding_are_refused(case):
    rows, *_ = case
    visible = rows.visible.clone()
    visible[..., 0] = False
    with pytest.raises(ValueError, match="one text at a time"):
        _visible(replace(rows, visible=visible))
