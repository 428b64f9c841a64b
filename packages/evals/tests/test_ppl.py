"""The perplexity task: each measurement against a number computed differently, and the paper's protocol by flags."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from evals.attending import attending
from evals.methods import SPARSE_NAMES, load_methods
from evals.rivals.magicpig import MagicPigSelector
from evals.rivals.quest import QuestSelector
from evals.settings import Always
from evals.tasks import ppl, settings
from evals.tasks.ppl import Cell, budget_of, measure, scored_logits
from evals.tasks.settings import PplCommand
from hashtrain import Hasher
from hashtrain.data.capture import capturing
from hashtrain.run.recipes import EXACT
from hashtrain.training.target import top_count
from hashtrain.usage import UsageError
from rich.console import Console
from sparse_decode import Budget, attach, dense
from sparse_decode.cpu.bfloat_lanes import supported
from torch.nn import functional as F

FIRST_DENSE = Always(1, 0, 0)  # and nothing is always read
TENTH = Budget(0.1, sink=0, recent=0)
SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def score(loaded, *cells, dense_layers=1):
    return measure(loaded.model, loaded.ids, list(cells), loaded.methods, Always(dense_layers, 0, 0))


@pytest.mark.parametrize(("most", "scored"), [(4096, 64), (16, 16)])
def test_dense_loss_is_that_of_the_second_half_of_as_many_rows_as_can_be_kept(loaded, most, scored, monkeypatch):
    monkeypatch.setattr(settings, "MOST_SCORED", most)
    expected = F.cross_entropy(loaded.model(loaded.ids[None]).logits[0, -scored - 1 : -1], loaded.ids[-scored:])
    found = score(loaded)
    assert found["dense"]["nll"] == pytest.approx(expected.item(), rel=1e-5)


def test_whole_budget_equals_dense(loaded):
    found = score(loaded, *(Cell(name, rule, 1.0) for name in SPARSE_NAMES for rule in ("visible", "fixed")))
    assert len(found["cells"]) == 2 * len(SPARSE_NAMES)
    for cell in found["cells"]:
        assert cell["density"] == 1, cell
        assert abs(cell["kl"]) < 1e-6, cell
        assert cell["nll"] == pytest.approx(found["dense"]["nll"], abs=1e-5), cell


def test_density_is_counted_by_hand(loaded):
    cells = (Cell("lsh", rule, budget) for rule, budget in (("visible", 0.05), ("fixed", 0.05), ("fixed", 0.25)))
    visible, least, fixed = score(loaded, *cells)["cells"]
    seen = range(1, 129)
    assert visible["density"] == pytest.approx(sum(max(1, n // 20) for n in seen) / sum(seen))
    # 5 % of 128 is 6, so the paper's minimum of 20 applies.
    assert least["density"] == pytest.approx(sum(min(n, 20) for n in seen) / sum(seen))
    assert fixed["density"] == pytest.approx(sum(min(n, 32) for n in seen) / sum(seen))


SMALL = {"quest-heads": QuestSelector(per_query_head=True, page=4), "magicpig": MagicPigSelector(3, 3, sink=1, local=2)}
"""Rivals that select few of so few tokens; where every row is sparse they would leave all of these dense."""


@pytest.mark.parametrize("name", ["planes+remainder", *SMALL])
def test_scored_rows_equal_decoding_token_by_token_after_a_dense_prefill(loaded, name):
    """Float32 sums in another order differ by 2e-5 here; a sparse prompt changes logits by 1e-2 or more.

    Steps read the remainder's covariance in 8 bits, whole passes exactly: a divergence of at most 5e-3 nats of a row.
    """
    method, ids, scored = loaded.methods[name], loaded.ids, 24
    method = replace(method, selector=SMALL.get(name, method.selector))
    prompt, how = len(ids) - scored - 1, {"dense_layers": 1, "remainder": method.remainder}
    selector, steps = method.selector_after(prompt), []
    with torch.inference_mode(), attach(loaded.model, selector, TENTH, **how) as attachment:
        cache = loaded.model(ids[None, :prompt], use_cache=True).past_key_values
        assert attachment.counts() == {}  # the prompt is dense
        for i in range(prompt, len(ids) - 1):
            steps.append(loaded.model(ids[None, i : i + 1], past_key_values=cache).logits[0, -1].log_softmax(-1))
    with torch.inference_mode():
        with attending(loaded.model, method, TENTH, FIRST_DENSE, prompt) as attended:
            found = scored_logits(loaded.model, ids, scored)
        with attending(loaded.model, method, TENTH, FIRST_DENSE, None):
            everywhere = scored_logits(loaded.model, ids, scored)
    assert len(steps) == scored
    found, everywhere = (logits.log_softmax(-1) for logits in (found, everywhere))
    if method.remainder:
        divergence = [(found.exp() * (found - other)).sum(-1).max() for other in (torch.stack(steps), everywhere)]
        assert divergence[0] < 1e-2
        assert divergence[1] > 5 * divergence[0]
    else:
        torch.testing.assert_close(found, torch.stack(steps), atol=1e-4, rtol=0)
    assert (everywhere - found).abs().max() > 1e-2
    assert attended.density < 0.25


def test_of_a_context_with_a_dense_prompt_the_scored_rows_are_sparse_and_counted(loaded):
    cells = [Cell("lsh", "visible", 0.05)]
    whole = measure(loaded.model, loaded.ids, cells, loaded.methods, FIRST_DENSE)
    served = measure(loaded.model, loaded.ids, cells, loaded.methods, FIRST_DENSE, phase="decode")
    seen = range(64, 129)  # the row that predicts the first of 64 scored tokens sees 64; the last one predicts nothing
    assert served["cells"][0]["density"] == pytest.approx(sum(n // 20 for n in seen) / sum(seen))
    assert served["dense"]["nll"] == pytest.approx(whole["dense"]["nll"], rel=1e-6)
    assert 1e-4 < served["cells"][0]["kl"] < whole["cells"][0]["kl"]


def test_matched_methods_share_dense_layers_and_a_loss_that_is_no_number_is_named(loaded, monkeypatch):
    given = []
    monkeypatch.setattr(loaded.methods["lsh"].selector, "dense_layers", (1,), raising=False)
    monkeypatch.setattr(ppl, "attending", lambda *how: given.append(how[3].dense) or attending(*how))
    score(loaded, Cell("recent", "visible", 0.1), Cell("lsh", "as recent", 0.1), dense_layers=0)
    assert given == [{1}, {1}]
    monkeypatch.setattr(ppl, "token_losses", lambda logits, targets: logits[:, 0] * torch.nan)
    with pytest.raises(ValueError, match=r"the model in torch.float32 gives a loss of nan"):
        score(loaded)


def test_a_hasher_without_a_remainder_is_refused(made, loaded, tmp_path):
    hasher = Hasher(loaded.methods["lsh"].selector.hasher.config)
    hasher.save_pretrained(tmp_path / "lsh")
    assert load_methods(["lsh"], tmp_path, loaded.model.config)
    with pytest.raises(ValueError, match="has no remainder"):
        load_methods(["lsh+remainder"], tmp_path, loaded.model.config)


def test_methods_of_several_trainings_are_compared_in_one_run(made, loaded):
    names = ["hashers/transform+remainder", "hashers/lsh", "oracle"]
    found = {method.name: method for method in load_methods(names, made.root, loaded.model.config)}
    assert list(found) == ["oracle", *names[:2]]
    for name in names[:2]:
        same = loaded.methods[name.removeprefix("hashers/")]
        assert (found[name].identity, found[name].remainder) == (same.identity, same.remainder)
    for wrong in ("hashers/oracle", "hashers/transfrom", "other/transform"):
        with pytest.raises(ValueError, match=wrong):
            load_methods([wrong], made.root, loaded.model.config)


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
        assert (method.for_heads(None).heads == "query_head") == (name in exact), name
        if method.selector is not None and method.query_head_selector is not None:
            query = method.for_heads("query")
            assert query.identity != method.identity
            assert query.selector is method.query_head_selector
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
    ppl.run(command, Console(quiet=True))
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
    for fraction, length, more, count in ((0.02, 8192, 68, 163 + 68), (0.02, 8192, 0, 163), (0.02, 300, 0, 20)):
        visible = torch.arange(1, length + 1)  # of every row
        budget = replace(budget_of("fixed", fraction, length, more), sink=2, recent=3)
        assert torch.equal(budget.count(visible), visible.clamp(max=count))
        assert [budget.count_heads(n)[0] for n in (1, count, length)] == [1, count, count]
    for other in ({"rules": ("visible",)}, {"rules": ("fixed",), "phase": "decode"}):
        with pytest.raises(UsageError, match="--ends beside needs a budget that is the same for every row"):
            ppl_command(ends="beside", **other)


def test_sliding_layers_are_as_they_were_behind_every_method():
    """And layers that are dense for all methods are in a sparse prompt, too."""
    kinds = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, **kinds)).eval()
    cells = [Cell("oracle", "visible", 1.0), Cell("recent", "visible", 0.1), Cell("oracle", "visible", 1.0)]
    methods = {method.name: method for method in load_methods(["oracle", "recent"], None, None)}
    found = measure(model, torch.arange(2, 50), cells, methods, Always(0, 0, 0), phase="decode", scored=9)["cells"]
    assert found[0]["kl"] == found[2]["kl"] < 1e-6 < found[1]["kl"]


def test_the_layers_that_stay_dense_do_in_a_sparse_prompt(loaded, monkeypatch):
    given, prompt = [], Always(1, 0, 0, prompt="sparse")
    monkeypatch.setattr(ppl, "attach", lambda model, **how: given.append(how) or attach(model))
    measure(loaded.model, loaded.ids, [], loaded.methods, prompt, phase="decode", scored=9)
    assert given[-1] == {"prompt": "sparse", "dense_layers": {0}}


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
