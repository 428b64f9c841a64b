"""A budget that reads fewer values than keys: it reaches every attention, and is refused where none can."""

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode import Budget, attach
from sparse_decode.attention.attend_inputs import require_values
from sparse_decode.attention.attend_torch import attend_reference
from sparse_decode.costs.traffic import step_bytes
from sparse_decode.layer.blocks import AttentionArgs, RowRule
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.select import HashSelector, RecentSelector
from sparse_decode_doubles import tiny_model
from transformers import StaticCache


class SelfAttending(RecentSelector):
    def attend(self, rows, v, indices):
        pytest.fail("it is refused before it attends")


HALF = Budget(0.5, sink=2, recent=3, values=0.5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_every_sparse_row_reads_the_share(rows, padded):
    selector = HashSelector(Hasher(HasherConfig("lsh", ModelShape(1, 4, 2, 16), bits=64), 0))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16, generator=draw) for heads, n in ((4, rows), (2, 60), (2, 60)))
    mask = torch.ones(2, 1, rows, 60, dtype=torch.bool).tril(60 - rows) if padded else None
    if padded:
        mask[0, :, :, :7] = False
    x = AttentionArgs(q, k, v, mask, selector.encode_keys(0, k), None, 0.25, None, None)
    seen = []
    plan = LayerPlan(0, selector, HALF, RowRule(None, rows))
    whole = LayerPlan(0, selector, Budget(0.5, sink=2, recent=3), RowRule(None, rows))
    for each in (plan, whole):
        for piece in [each._one_row(x)] if rows == 1 else each._blocks(x, *each.seen(x)):
            seen.append(piece.complete(selector.select(piece.rows), exact=False)[0])
    assert torch.equal(*seen), "the share changes what is selected"
    expected = attend_reference(q, k, v, seen[0], 0.25, values=0.5)
    torch.testing.assert_close(plan.attend(x)[0], expected)
    assert not torch.allclose(whole.attend(x)[0], expected)
    assert plan.tally.totals() == whole.tally.totals()


def test_where_no_attention_can_it_is_refused():
    model, chosen = tiny_model(), HashSelector(Hasher(HasherConfig("lsh", ModelShape.of(tiny_model().config))))
    with pytest.raises(ValueError, match=r"needs our own kernels, got 0\.5 and SelfAttending"):
        attach(model, SelfAttending(), HALF)
    with pytest.raises(ValueError, match=r"values below 1 needs the CPU, got 0\.5 on cuda"):
        require_values(0.5, torch.device("cuda"))
    with attach(model, chosen, layer_budgets={3: HALF}):
        pass


@pytest.mark.parametrize("wrong", [0, 1.01, "half"])
def test_a_share_is_a_share(wrong):
    with pytest.raises(ValueError, match="values must be above 0 and at most 1"):
        Budget(values=wrong)


def test_bytes_of_values_that_are_not_read_are_not_counted():
    one, third = (step_bytes(8192, Budget(0.02, values=share), 64) for share in (1, 0.33))
    assert one.keys_and_values == 163 * 256
    assert third.keys_and_values == 163 * 128 + 54 * 128
    assert one.codes == third.codes


@pytest.mark.slow
def test_a_compiled_step_reads_the_share_too():
    torch._dynamo.reset()
    model, ids = tiny_model(), torch.randint(1, 60, (1, 44), generator=torch.Generator().manual_seed(0))
    selector = HashSelector(Hasher(HasherConfig("lsh", ModelShape.of(model.config), bits=64), 0))
    found = []
    for step in (model, torch.compile(model, fullgraph=True, backend="eager")):
        cache = StaticCache(config=model.config, max_cache_len=48)
        with torch.no_grad(), attach(model, selector, HALF, dense_layers=0):
            model(ids[:, :40], past_key_values=cache)
            found.append(torch.cat([step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(40, 44)]))
    torch.testing.assert_close(*found)
