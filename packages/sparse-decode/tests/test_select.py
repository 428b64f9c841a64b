"""The selectors, against the simplest statement of what each selects."""

from dataclasses import replace

import pytest
import torch
from sparse_decode import OracleSelector, RecentSelector, Rows
from sparse_decode.select import best_floats
from sparse_decode_doubles import as_sets

N, ROWS = 50, 6


def drawn():
    """Rows of three sequences behind padding, each of which wants another number of tokens."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-4, 5, (3, 4, ROWS, 16), generator=generator).float()
    k = torch.randint(-4, 5, (3, 2, N, 16), generator=generator).float()
    ends = torch.arange(N - ROWS + 1, N + 1).expand(3, -1)
    starts = torch.tensor([0, 7, 45])[:, None].minimum(ends)
    counts = (torch.rand(3, ROWS, generator=generator) * (ends - starts + 1)).long()
    return Rows(2, q, k, None, torch.stack([starts, ends], -1), counts, 0.25)


@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, None), (None, torch.tensor([0.0, 30, 40, 0]))])
@pytest.mark.parametrize("per_query_head", [False, True])
def test_oracle_takes_the_highest_exact_attention(per_query_head, softcap, sinks):
    selector = OracleSelector(per_query_head)
    rows = replace(drawn(), softcap=softcap, sinks=sinks)
    logits = rows.q.double() @ rows.k.double().repeat_interleave(2, 1).transpose(-1, -2) * rows.scaling
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~rows.visible, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[None, :, None, None].expand(3, -1, ROWS, 1)], -1)
    p = logits.softmax(-1).nan_to_num(0)[..., :N]
    p = p if per_query_head else p.unflatten(1, (2, 2)).sum(2)
    indices = selector.select(rows)
    assert indices.shape[1] == (4 if per_query_head else 2)
    chosen = as_sets(indices, N)
    assert torch.equal(chosen.sum(-1), rows.counts[:, None].expand(chosen.shape[:-1]))
    worst = p.masked_fill(~chosen, torch.inf).amin(-1)
    left = p.masked_fill(chosen | ~rows.visible, -torch.inf).amax(-1)
    assert (worst >= left - 1e-7).all()


def test_recent_takes_the_last_visible_tokens():
    rows = drawn()
    later = rows.visible.flip(-1).cumsum(-1).flip(-1)  # how many of the visible tokens are no earlier
    last = rows.visible & (later <= rows.counts[:, None, :, None])
    chosen = as_sets(RecentSelector().select(rows), N)
    assert torch.equal(chosen, last.expand(chosen.shape))


def test_equal_floats_go_to_the_lowest_index():
    values = torch.randint(0, 4, (40, 30), generator=torch.Generator().manual_seed(0)).float() / 4
    counts = torch.arange(40) % 31
    for row, count, found in zip(values.tolist(), counts.tolist(), best_floats(values, counts).tolist(), strict=True):
        best = sorted(range(30), key=lambda i, row=row: (-row[i], i))[:count]
        assert [t for t in found if t >= 0] == sorted(best)
