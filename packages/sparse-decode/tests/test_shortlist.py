"""A budget with a shortlist reaches every search of a hash selector, and changes what is selected as eq. 20 says."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hashcore import reference
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, HashSelector, Rows, attach
from sparse_decode.costs.traffic import step_bytes
from sparse_decode_doubles import SignHasher, tiny_model

N = 2300


def selected(hasher, rows, seen, times):
    """What the reference selects in each row [B, Hkv, Q] of the tokens `seen` [B, Q, (first, end)]."""
    planes, weights = hasher.encode_queries(rows.layer, rows.q)
    keys = rows.codes[:, :, None].expand(*planes.shape[:3], -1, -1)
    counts = rows.counts[:, None].expand(planes.shape[:3]).numpy()
    starts, lengths = (x[:, None].expand(planes.shape[:3]).numpy() for x in seen)
    options = dict(starts=starts, lengths=lengths, sink=rows.sink, recent=rows.recent, order="index")
    return reference.search(planes.numpy(), keys.numpy(), counts, weights, shortlist=times, **options)[1]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", ["step", "rows", "padded"])
def test_a_selector_searches_with_the_shortlist_of_its_rows(kind, times):
    generator, hasher = torch.Generator().manual_seed(times), SignHasher()
    q, k = (torch.randn(2, heads, rows, 16, generator=generator) for heads, rows in ((4, 3), (2, N)))
    q = q[:, :, :1] if kind == "step" else q
    rows = q.shape[2]
    ends = torch.arange(N - rows + 1, N + 1).expand(2, -1)
    starts = torch.tensor([[0], [100 * (kind == "padded")]]).expand(-1, rows)
    token = torch.arange(N)
    visible = ((token >= starts[..., None]) & (token < ends[..., None]))[:, None]
    counts = torch.full((2, rows), 40) - (0 if kind == "step" else torch.arange(rows))
    count = 40 if kind == "step" else None
    codes = HashSelector(hasher).encode_keys(2, k)
    shown = None if kind == "step" else visible
    exact = Rows(2, q, k, codes, shown, counts, 0.25, uniform_count=count, sink=1, recent=4)
    given = replace(exact, shortlist=times)
    found = HashSelector(hasher).select(given)
    np.testing.assert_array_equal(found.numpy(), selected(hasher, given, (starts, ends), times))
    assert not torch.equal(found, HashSelector(hasher).select(exact))  # else the shortlist would not matter


def test_attach_passes_the_shortlist_of_its_budget_on():
    model, lists = tiny_model(), []

    class Listening(HashSelector):
        def select(self, rows):
            lists.append(rows.shortlist)
            return super().select(rows)

    hasher = Hasher(HasherConfig("lsh", ModelShape.of(model.config)), seed=0)
    for shortlist in (None, 5):
        with attach(model, Listening(hasher), Budget(0.5, shortlist=shortlist), dense_layers=0), torch.no_grad():
            model.generate(torch.arange(40)[None], max_new_tokens=3, do_sample=False)
        assert lists
        assert {*lists} == {shortlist}
        lists.clear()


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "6"])
def test_a_shortlist_is_a_count(wrong):
    with pytest.raises(ValueError, match="shortlist must be None or an integer of 1 or more"):
        Budget(shortlist=wrong)


def test_bytes_of_a_step_are_counted():
    """8,192 tokens, heads of 64 numbers of 2 bytes, so 256 bytes of keys and values a token; codes of 16 bytes."""
    vectors, rounded = 2 * 8 * 64, 64 * 64 + 4 * 64  # of each step; those of every 16th: read and written in full
    state = vectors + rounded + 8.5 * 256 + (2 * vectors + 2 * 4 * 64 * 64 + rounded + 16 * 256) / 16
    dense = 8192 * 256
    found = step_bytes(8192, Budget(0.02), 64)
    assert found == (8192 * 16, 163 * 256, state, dense)
    assert found.share == pytest.approx(0.0625 + 163 / 8192 + state / dense)
    assert step_bytes(8192, Budget(0.02, shortlist=6), 64).codes == 8192 * 4 + 6 * 163 * 16
    assert step_bytes(8192, Budget(0.5, shortlist=6), 64).codes == 8192 * 4 + 8192 * 16  # no list is longer than all
    assert step_bytes(8192, Budget(0.02, shortlist=6), 64, bits=0, remainder=False)[:3] == (0, 163 * 256, 0)
