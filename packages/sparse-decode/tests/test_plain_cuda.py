"""A plain decode step on a GPU as four operators, which run on the CPU here: the same as step by step, or not done."""

import pytest
import torch
from hashtrain import ModelShape
from sparse_decode import QueryHeadHasher, attach
from sparse_decode.attention.attend_inputs import Inputs
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.cache_types import carry_codes
from sparse_decode.hashing import encode_cuda
from sparse_decode.layer.blocks import AttentionArgs, RowRule
from sparse_decode.layer.plan import LayerPlan
from sparse_decode.select import HashSelector
from sparse_decode_doubles import SignHasher, generate, prompts, tiny_model
from test_fused import make_hasher, tensors
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

BUDGETS = [LayerBudget(0.1), LayerBudget(0.1, sink=0, recent=0), LayerBudget(1.0), LayerBudget(0.01, sink=2, recent=2)]
SCALING = 0.25


@pytest.fixture(autouse=True)
def _operators_in_host_memory(monkeypatch):
    monkeypatch.setattr(encode_cuda, "supports", lambda layer, x: x.device.type == "cpu" and x.shape[2] == 1)


class Layer:
    """A layer's plan, and its cache layer."""

    def __init__(self, selector, budget=BUDGETS[0], remainder=False):
        fitted = selector.remainder(0) if remainder else None
        self.plan = LayerPlan(0, selector, budget, RowRule(None), fitted)
        self.held = carry_codes(DynamicLayer(), self.plan.encoder)
        own = self.plan.plain.get("cuda")
        self.plan.plain = {"cpu": own} if own else {}

    def extend(self, k, v):
        n = self.held.get_seq_length()
        self.held.update(k[:, :, n:], v[:, :, n:])

    def at_once(self, q, k=None, v=None, **options):
        k, v = self.held.keys if k is None else k, self.held.values if v is None else v
        return self.plan.step(self.held, Inputs(q, k, v, SCALING, **options))

    def one_by_one(self, q, softcap=None, sinks=None):
        held = self.held
        given = held.keys, held.values, None, held.codes, None, SCALING, softcap, sinks, held.moments
        return self.plan.attend(AttentionArgs(q, *given))[0]


@pytest.mark.sample(9)
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("variant", ["transform", "planes", "lsh", "paper", "linear"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("remainder", [False, True])
def test_the_same_as_step_by_step(per_query_head, variant, budget, remainder):
    hasher = make_hasher(variant)
    first, second = (
        Layer(HashSelector(QueryHeadHasher(hasher) if per_query_head else hasher), budget, remainder) for _ in range(2)
    )
    q, k, v = tensors(torch.float32, 3, 120)
    options, done = {"softcap": 5.0, "sinks": torch.linspace(-1, 1, 6)}, []
    for n in range(80, 120):
        for layer in (first, second):
            layer.extend(k[:, :, :n], v[:, :, :n])
        ours = first.at_once(q, **options)
        done.append(ours is not None)
        ours = first.one_by_one(q, **options) if ours is None else ours
        torch.testing.assert_close(ours, second.one_by_one(q, **options), atol=4e-6, rtol=1e-6)
        assert torch.equal(first.held.codes, second.held.codes)
        for mine, other in zip(first.held.moments._sums or (), second.held.moments._sums or (), strict=True):
            assert torch.equal(mine, other)
    assert sum(done) > 30
    assert not done[0], "no code is missing, or nothing is summed yet"
    assert first.plan.tally.totals() == second.plan.tally.totals()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_generation_with_and_without(family, monkeypatch):
    model, (ids, _) = tiny_model(family), prompts((40, 40))
    hasher, done = make_hasher(shape=ModelShape.of(model.config)), []

    def run(at_once):
        with attach(model, hasher, LayerBudget(0.2, min_tokens=4)) as attachment:
            for plan in attachment._plans.values():
                plan.plain = {"cpu": plan.plain["cuda"]} if at_once else {}
            found = generate(model, ids, past_key_values=DynamicCache(config=model.config), num_beams=3)
            return found, attachment.density()

    own = encode_cuda.step
    monkeypatch.setattr(encode_cuda, "step", lambda *given: done.append(1) or own(*given))
    ours, theirs = run(True), run(False)
    assert len(done) > 10
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1]


def a_step(selector=None, budget=BUDGETS[0], remainder=False, dtype=torch.float32):
    """A layer that can do a step at once, and the queries."""
    layer = Layer(selector or HashSelector(make_hasher()), budget, remainder)
    q, k, v = tensors(dtype, 2, 90)
    for n in (88, 89, 90):
        layer.extend(k[:, :, :n], v[:, :, :n])
        if n < 90:
            layer.one_by_one(q)
    return layer, q


class Other(HashSelector):
    """Does more than apply hash functions, or may do."""


@pytest.mark.parametrize(
    "changed",
    [
        {"selector": HashSelector(SignHasher())},
        {"selector": Other(make_hasher())},
        {"budget": LayerBudget(0.1, dense_below=91)},
    ],
    ids=["another hasher", "a subclass", "short"],
)
def test_layers_that_are_not_plain_go_the_other_way(changed):
    layer, q = a_step(**changed)
    assert layer.at_once(q) is None
    assert a_step()[0].at_once(q) is not None


def test_calls_that_are_not_plain_go_the_other_way_and_change_nothing():
    layer, q = a_step(remainder=True)
    held, codes = layer.held, layer.held._codes.length
    for given in (
        {"k": held.keys.clone()},
        {"v": held.values.clone()},
        {"q": q.half()},
        {"q": q[:, :5]},
    ):
        assert layer.at_once(**({"q": q} | given)) is None
    held.keys.requires_grad_()
    assert layer.at_once(q) is None
    held.keys.requires_grad_(False)
    held.moments.forget()
    assert layer.at_once(q) is None
    assert held._codes.length == codes
    assert layer.plan.tally.totals()[1] == 2 * 2 * 6 * 90 - 2 * 6 * 3
