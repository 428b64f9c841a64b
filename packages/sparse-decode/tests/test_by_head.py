"""Budgets by KV head: each head reads as in a budget of its own, on every backend. Tolerance 0."""

import math
from dataclasses import replace

import pytest
import torch
from fake_gpu import beyond_dense
from hashtrain import ModelShape
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sparse_decode import Budget, HashSelector, OracleSelector, QueryHeadHasher, attach
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.cache_types import carry_codes
from sparse_decode.costs import step_bytes
from sparse_decode.cuda import encode as encode_cuda
from sparse_decode.cuda.pages import DeviceStep
from sparse_decode.inputs import Inputs
from sparse_decode.layer.blocks import AttentionArgs, RowRule
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.pages import PagedLayer
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from test_fused import make_hasher, tensors
from test_paged import DIM, HKV, HQ, Batch, selector
from transformers import StaticCache
from transformers.cache_utils import DynamicLayer

SHARES = (0.5, 1.5)
BUDGETS = [
    LayerBudget(0.1, sink=0, recent=0),
    LayerBudget(0.2, sink=3, recent=2),
    LayerBudget(0.8),  # the second head reads all
    LayerBudget(0.02, min_tokens=9, sink=2, recent=2),
    LayerBudget(0.2, max_tokens=20, of="length"),
    LayerBudget(0.1, dense_below=100),
]


def counted(budget, shares, n):
    """Head h reads floor(n f w_h) of the n tokens that it sees, at least `min_tokens` and at most `max_tokens`.

    Then at least those always read; never more than n; all below `dense_below`.
    """
    found = []
    for share in shares:
        count = max(budget.min_tokens, math.floor(n * min(1.0, budget.fraction * share) + 1e-9))
        count = count if budget.max_tokens is None else min(count, budget.max_tokens)
        count = max(count, budget.sink + budget.recent)
        found.append(n if n < budget.dense_below else min(n, count))
    return found


def of_head(budget, head, shares=SHARES):
    return replace(budget, fraction=min(1.0, budget.fraction * shares[head]))


PARTS = st.lists(st.floats(0.5, 2), min_size=1, max_size=6)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=5),
    PARTS,
    st.floats(0.001, 1),
    st.integers(1, 50),
    st.none() | st.integers(50, 500),
    st.integers(0, 9),
    st.integers(0, 100),
    st.sampled_from(["visible", "length"]),
)
def test_counts_are_those_of_the_reference(visible, shares, fraction, least, most, recent, dense_below, of):
    budget = LayerBudget(fraction, least, most, recent=recent, dense_below=dense_below, of=of, by_head=tuple(shares))
    seen = torch.tensor(visible)
    counts = budget.count(seen, seen)
    assert counts.T.tolist() == [counted(budget, shares, n) for n in visible]
    for n in visible:
        assert budget.count_heads(n) == counted(budget, shares, n)
        assert budget.most(n) >= max(budget.count_heads(n))


@settings(deadline=None)
@given(st.integers(1000, 50_000), PARTS, st.floats(0.02, 0.2))
def test_the_heads_of_a_layer_read_its_total(n, shares, fraction):
    shares = [share * len(shares) / sum(shares) for share in shares]
    assume(all(fraction * share < 1 for share in shares))
    total = sum(LayerBudget(fraction, by_head=tuple(shares)).count_heads(n))
    assert abs(total - len(shares) * n * fraction) <= len(shares)


def test_equal_shares_are_a_budget_without():
    budget, seen = LayerBudget(0.07, 3, dense_below=9), torch.arange(3000)
    assert torch.equal(replace(budget, by_head=(1.0, 1.0)).count(seen), budget.count(seen).expand(2, -1))


class Layer:
    """One layer with a cache, attached with a budget."""

    def __init__(self, budget, per_query_head=False, remainder=True, start=None):
        hasher = make_hasher()
        selector = HashSelector(QueryHeadHasher(hasher) if per_query_head else hasher)
        rest = selector.remainder(0) if remainder else None
        self.plan = LayerPlan(0, selector, budget, RowRule(start), rest)
        self.held = carry_codes(DynamicLayer(), self.plan.encoder)

    def fill(self, k, v):
        n = self.held.get_seq_length()
        self.held.update(k[:, :, n:], v[:, :, n:])

    def attend(self, q, mask=None):
        held = self.held
        given = held.keys, held.values, mask, held.codes, None, 0.25, None, None, held.moments
        return self.plan.attend(AttentionArgs(q, *given))[0]

    def step(self, q):
        return self.plan.step(self.held, Inputs(q, self.held.keys, self.held.values, 0.25, None, None))


def heads_of(out, head, sets=2):
    """The query heads of one index set of [B, Q, Hq, D]."""
    return out.unflatten(2, (sets, -1))[:, :, head]


def assert_each_head_is_as_alone(budget, run, shares=SHARES, **how):
    """`run` returns what a layer gives; the tally counts the heads that read."""
    by_head = Layer(replace(budget, by_head=shares), **how)
    found, selected = run(by_head), 0
    for head in range(len(shares)):
        alone = Layer(of_head(budget, head, shares), **how)
        assert torch.equal(heads_of(found, head, len(shares)), heads_of(run(alone), head, len(shares)))
        selected += alone.plan.tally.totals()[0]
    assert by_head.plan.tally.totals() == (selected // len(shares), alone.plan.tally.totals()[1])


def stepping(kind, at_once, monkeypatch=None):
    q, k, v = tensors(kind, 2, 170)

    def run(layer):
        for n in (160, 161):
            layer.fill(k[:, :, :n], v[:, :, :n])
            layer.attend(q)
        layer.plan.tally.reset()
        layer.fill(k[:, :, :162], v[:, :, :162])
        out = layer.step(q) if at_once else layer.attend(q)
        assert out is not None
        return out

    return run


PLAIN = [budget for budget in BUDGETS if budget.dense_below == 0]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", PLAIN)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_plain_step(at_once, budget, kind):
    assert_each_head_is_as_alone(budget, stepping(kind, at_once))


@pytest.mark.parametrize("budget", [PLAIN[0], PLAIN[2]])
def test_a_plain_step_of_a_gpu_in_operators(budget, monkeypatch):
    monkeypatch.setattr(encode_cuda, "supports", lambda layer, x: x.device.type == "cpu" and x.shape[2] == 1)
    run = stepping(torch.float32, at_once=True)

    def by_operators(layer):
        layer.plan.plain = {"cpu": layer.plan.plain["cuda"]}
        return run(layer)

    assert_each_head_is_as_alone(budget, by_operators)


def padded(n):
    mask = torch.ones(2, 1, 1, n, dtype=torch.bool)
    mask[0, ..., :60] = False
    return mask


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_step_with_a_mask(budget):
    q, k, v = tensors(torch.float32, 2, 170)

    def run(layer):
        layer.fill(k, v)
        return layer.attend(q, padded(170))

    assert_each_head_is_as_alone(budget, run)


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_row_sparse(budget):
    _, k, v = tensors(torch.float32, 2, 170)
    q = torch.randn(2, 6, 50, 16, generator=torch.Generator().manual_seed(5))

    def run(layer):
        layer.fill(k, v)
        return layer.attend(q)

    assert_each_head_is_as_alone(budget, run, start=130)


def test_a_selection_by_query_head():
    shares = (0.5,) * 3 + (1.5,) * 3
    assert_each_head_is_as_alone(
        PLAIN[0], stepping(torch.float32, at_once=False), shares, per_query_head=True, remainder=False
    )


@pytest.mark.parametrize("budget", BUDGETS)
def test_pages(budget):
    if budget.of == "length":
        budget = replace(budget, of="visible")
    outs, counts = [], []
    for own in (replace(budget, by_head=SHARES), of_head(budget, 0), of_head(budget, 1)):
        layer, batch = PagedLayer(1, selector(), DIM**-0.5), Batch([5, 99, 130, 700], 16, torch.float32)
        batch.fill(layer)
        outs.append(layer.decode(batch.q, batch.pages, batch.step(own)).view(4, HKV, HQ // HKV, -1))
        counts.append(layer.selected)
    found, *alone = outs
    assert torch.equal(found, torch.stack([out[:, head] for head, out in enumerate(alone)], 1))
    assert counts[0] == sum(counts[1:]) // 2


def with_shares(hasher, shares=SHARES):
    hasher.config = replace(hasher.config, head_shares=(shares,) * hasher.config.shape.num_layers)
    return hasher


def for_model(model):
    return with_shares(make_hasher("planes", ModelShape.of(model.config), calibrated=False))


def test_generation_counts_what_the_reference_counts():
    model, (ids, mask) = tiny_model(), prompts((100, 60))
    budget = LayerBudget(0.1, by_head=True)
    with attach(model, for_model(model), budget) as attachment:
        plain = generate(model, ids, mask, new_tokens=3)
        seen = [101, 102, 61, 62]
        read = 2 * sum(sum(counted(LayerBudget(0.1), SHARES, n)) for n in seen)  # two query heads a KV head
        assert attachment.counts() == {layer: (read, 4 * sum(seen)) for layer in range(4)}
        attachment.reset_density()
        cache = StaticCache(config=model.config, max_cache_len=110)
        assert torch.equal(generate(model, ids, mask, new_tokens=3, past_key_values=cache), plain)
        assert attachment.counts() == {layer: (read, 4 * sum(seen)) for layer in range(4)}


def test_shares_by_layer_and_by_head_multiply():
    model = tiny_model()
    hasher = for_model(model)
    hasher.config = replace(hasher.config, layer_shares=(0.5, 1.0, 1.0, 1.5))
    with attach(model, hasher, LayerBudget(0.2, by_layer=True, by_head=True)) as attachment:
        budgets = {layer: plan.budget for layer, plan in attachment._plans.items()}
    assert budgets[0] == LayerBudget(0.1, by_head=SHARES)
    assert budgets[3] == LayerBudget(0.2 * 1.5, by_head=SHARES)
    with attach(model, HashSelector(QueryHeadHasher(hasher)), LayerBudget(0.2, by_head=True)) as attachment:
        assert attachment._plans[1].budget.by_head == (0.5, 0.5, 1.5, 1.5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["plain", "padded", "static", "host", "beam"])
def test_a_step_of_a_gpu_waits_for_nothing(kind):
    even = beyond_dense("llama", "transform", kind=kind)
    found = beyond_dense("llama", "transform", LayerBudget(0.1, by_head=SHARES), kind=kind)
    assert found.copies == even.copies
    assert found.launches <= even.launches + (1 if kind in ("plain", "host", "beam") else 40)


def test_what_is_refused():
    model = tiny_model()
    for hasher in (SignHasher(), make_hasher("planes", ModelShape.of(model.config))):
        with pytest.raises(ValueError, match="needs a hasher with head_shares, which `hashtrain` measures, got none"):
            attach(model, hasher, LayerBudget(by_head=True))
    with pytest.raises(ValueError, match="needs a hasher, got OracleSelector; leave by_head out"):
        attach(model, OracleSelector(), LayerBudget(by_head=SHARES))
    with pytest.raises(ValueError, match="by_head must have 2 shares in layer 0, got 3"):
        attach(model, SignHasher(), LayerBudget(by_head=(1.0, 1.0, 1.0)))
    for wrong in (1, (), (1.0, 0.0), ("1",), [1.0]):
        with pytest.raises(ValueError, match="by_head must be true, false or a tuple of numbers above 0"):
            LayerBudget(by_head=wrong)
    with pytest.raises(ValueError, match="by head counts only once attached"):
        LayerBudget(by_head=True).count(torch.tensor([3]))
    with pytest.raises(ValueError, match="by head counts only once attached"):
        LayerBudget(by_head=True).count_heads(3)
    with pytest.raises(ValueError, match="pages on CUDA read as many tokens in each head"):
        DeviceStep.of(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1), LayerBudget(by_head=SHARES), 16, 32)


def test_bytes_are_the_mean_over_heads():
    shares, plain = (0.5, 1.5), LayerBudget(0.1)
    found = step_bytes(10_000, replace(plain, by_head=shares), 64)
    alone = [step_bytes(10_000, of_head(plain, head, shares), 64) for head in (0, 1)]
    assert found.share == pytest.approx(sum(x.share for x in alone) / 2)


@pytest.mark.parametrize(("layers", "heads"), [((), ()), ((0.5, 1.5), ()), ((), ((0.5, 1.5),) * 2)])
@pytest.mark.parametrize("own", [None, Budget(0.04)])
def test_attach_divides_a_budget_as_far_as_the_hasher_has_shares(layers, heads, own):
    model = tiny_model(num_hidden_layers=2)
    hasher = make_hasher(shape=ModelShape.of(model.config))
    hasher.config = replace(hasher.config, layer_shares=layers, head_shares=heads)
    with attach(model, hasher, own) as attachment:
        found = [plan.budget for plan in attachment._plans.values()]
    fraction = 0.02 if own is None else 0.04
    assert [budget.fraction for budget in found] == [fraction * share for share in layers or (1, 1)]
    assert {budget.by_head for budget in found} == ({heads[0]} if heads else {False})
    with attach(model, hasher, LayerBudget()) as attachment:
        assert {plan.budget for plan in attachment._plans.values()} == {LayerBudget()}


@pytest.mark.parametrize("ends", [(0, 0), (1, 4)])
def test_other_hashers_on_a_device_select_among_all_tokens_without_a_mask(monkeypatch, ends):
    """The host does not read a device's numbers: there, counts by head go to the operator."""
    model, ids = tiny_model(), prompts((60,))[0]
    budget = LayerBudget(0.2, sink=ends[0], recent=ends[1], by_head=SHARES)
    found = []
    for readable in (True, False):
        monkeypatch.setattr("sparse_decode.select.readable", lambda x, readable=readable: readable)
        with attach(model, SignHasher(), budget, remainder=False), torch.no_grad():
            cache = model(ids[:, :-1]).past_key_values
            found.append(model(ids[:, -1:], past_key_values=cache).logits)
    assert torch.equal(*found)


def test_predictions_use_the_mean_share():
    assert LayerBudget(0.2, by_head=(1.0, 2.0)).mean_fraction == pytest.approx(0.3)
    assert LayerBudget(0.8, by_head=(0.5, 1.5)).mean_fraction == pytest.approx(0.7)  # no head reads more than all
    assert LayerBudget(0.2, by_head=True).mean_fraction == 0.2
