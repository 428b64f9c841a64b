"""The paper's protocol by flags: heads, scored tokens, dense layers, and ends beside a budget."""

import copy

import pytest
import torch
from evals.settings import Always
from evals.tasks import ppl
from evals.tasks.ppl import Cell, budget_of, measure
from evals.tasks.ppl_settings import PplCommand
from hashtrain.data.capture import capturing
from hashtrain.run.recipes import EXACT
from hashtrain.training.target import top_count
from hashtrain.usage import UsageError
from rich.console import Console
from sparse_decode import dense
from sparse_decode.cpu.bfloat_lanes import supported

QUIET = Console(quiet=True)


def by_hand(loaded, hasher, fraction, dense):
    """Return logits with every row sparse, each query head reading its own best tokens, by a mask and a softmax."""

    def attend(layer, q, k, v, scaling):
        t, group = k.shape[2], q.shape[1] // k.shape[1]
        at = torch.arange(t)
        logits = (q @ k.repeat_interleave(group, 1).mT) * scaling
        hidden = at > at[:, None]
        if layer not in dense:
            scores = hasher.layer(layer).scores(q, k, per_query_head=True).double() - at / 1e6  # ties: the lowest
            order = scores.masked_fill(hidden, -1e9).argsort(-1, descending=True).argsort(-1)
            hidden = hidden | (order >= top_count(at + 1, fraction)[:, None])
        return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)).transpose(1, 2)

    with torch.inference_mode(), capturing(loaded.model, attend):
        return loaded.model(loaded.ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("name", ["paper-exact", "lsh", "planes"])
def test_a_selection_per_query_head_is_each_heads_own(loaded, name):
    method = loaded.methods[name].for_heads("query")
    always = Always(0, 0, 0, dense_at=(1,))
    found = measure(loaded.model, loaded.ids, [Cell(name, "visible", 0.1)], {name: method}, always)
    logits = by_hand(loaded, loaded.methods[name].selector.hasher, 0.1, {1})
    nll = torch.nn.functional.cross_entropy(logits[63:-1], loaded.ids[64:]).item()
    assert found["cells"][0]["nll"] == pytest.approx(nll, abs=2e-4)
    kv = measure(loaded.model, loaded.ids, [Cell(name, "visible", 0.1)], loaded.methods, always)
    assert abs(kv["cells"][0]["nll"] - nll) > 1e-3


def test_methods_use_their_default_heads_unless_given(loaded):
    exact = {candidate.name for candidate in EXACT}
    for name, method in loaded.methods.items():
        own, kv = method.for_heads(None), method.for_heads("query")
        assert (own.heads == "query_head") == (name in exact), name
        if method.selector is None or method.query_head_selector is None:
            assert kv is method
            continue
        assert kv.identity != method.identity
        assert kv.selector is method.query_head_selector
        assert method.for_heads("kv") is method
    with pytest.raises(ValueError, match="magicpig selects only per query head, got --heads kv"):
        loaded.methods["magicpig"].for_heads("kv")


def test_every_token_but_the_first_is_scored(loaded, ppl_command):
    command = ppl_command(methods=("lsh",), documents=1, rules=("fixed",), score="all")
    assert command.last == 127
    found = measure(loaded.model, loaded.ids, [Cell("lsh", "fixed", 0.1)], loaded.methods, command.always, scored=127)
    with torch.inference_mode():
        logits = loaded.model(loaded.ids[None]).logits[0, :-1]
    dense = torch.nn.functional.cross_entropy(logits, loaded.ids[1:]).item()
    assert found["dense"]["nll"] == pytest.approx(dense, abs=1e-5)
    ppl.run(command, QUIET)
    for other in ({"phase": "decode"}, {"scored": 8}):
        with pytest.raises(UsageError, match="--score all scores every token and excludes"):
            ppl_command(score="all", **other)


def test_ends_beside_a_budget_are_read_on_top_of_it(loaded, ppl_command):
    always = Always(0, 2, 5, beside=True)
    cells = [Cell("lsh", "fixed", 0.25)]
    beside, within = (
        measure(loaded.model, loaded.ids, cells, loaded.methods, always._replace(beside=which))["cells"][0]["density"]
        for which in (True, False)
    )
    seen = range(1, 129)
    assert within == pytest.approx(sum(min(n, 32) for n in seen) / sum(seen))
    assert beside == pytest.approx(sum(min(n, 39) for n in seen) / sum(seen))
    assert budget_of("fixed", 0.02, 68, 8192).count(torch.tensor([8192]), torch.tensor([8192])).item() == 163 + 68
    for other in ({"rules": ("visible",)}, {"rules": ("fixed",), "phase": "decode"}):
        with pytest.raises(UsageError, match="--ends beside needs a budget that is the same for every row"):
            ppl_command(ends="beside", **other)


@pytest.mark.skipif(not supported(), reason="sparse prompts need AVX512_BF16")
def test_sparse_prompts_are_measured_against_exact_ones(loaded, command, monkeypatch):
    monkeypatch.setattr(dense, "SPARSE_FROM", 512)
    model, ids = copy.deepcopy(loaded.model).bfloat16(), loaded.ids.repeat(7)
    cell, kl = Cell("oracle", "visible", 1.0), dict[str, float]()
    for prompt in ("exact", "sparse"):
        always = Always(prompt=prompt)
        found = measure(model, ids, [cell], loaded.methods, always, phase="decode", scored=99)
        kl[prompt] = found["cells"][0]["kl"]
    assert kl["exact"] < 1e-3 < 1e-2 < kl["sparse"]
    with pytest.raises(UsageError, match="--prompt sparse needs rows before the evaluated ones; in ppl, add"):
        command(PplCommand, prompt="sparse")
