"""The measurements of the perplexity task, each against a number computed differently."""

from dataclasses import replace

import pytest
import torch
from evals.methods import REMAINDER, SPARSE_NAMES, load_methods
from evals.rivals import MagicPigSelector, QuestSelector
from evals.settings import Always
from evals.tasks.ppl import Cell, measure, prompt_of, sparse_rows
from hashtrain import Hasher
from sparse_decode import Budget, attach
from torch.nn import functional as F

FIRST_DENSE = Always(1, 0, 0)  # and nothing is always read

TENTH = Budget(0.1, sink=0, recent=0)

PHASES = ("everywhere", "decode")


def score(loaded, *cells, dense_layers=1):
    return measure(loaded.model, loaded.ids, list(cells), loaded.methods, Always(dense_layers, 0, 0))


def logits(rows):
    """Compute the logits of all rows at once."""
    return rows.at(slice(None))


def test_dense_loss_is_that_of_the_second_half(loaded):
    expected = F.cross_entropy(loaded.model(loaded.ids[None]).logits[0, 63:127], loaded.ids[64:])
    found = score(loaded)
    assert found["scored"] == 64
    assert found["dense"]["nll"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("rule", ["visible", "fixed"])
@pytest.mark.parametrize("name", SPARSE_NAMES)
def test_whole_budget_equals_dense(loaded, name, rule):
    found = score(loaded, Cell(name, rule, 1.0))
    (cell,) = found["cells"]
    assert cell["density"] == 1
    assert abs(cell["kl"]) < 1e-6
    assert cell["nll"] == pytest.approx(found["dense"]["nll"], abs=1e-5)


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


@pytest.mark.parametrize("name", ["lsh", "planes+remainder", *SMALL])
def test_scored_rows_equal_decoding_token_by_token_after_a_dense_prefill(loaded, name):
    """Float32 sums in another order differ by 2e-5 here; a sparse prompt changes logits by 1e-2 or more.

    Steps read the remainder's covariance in 8 bits, whole passes exactly: a divergence of at most 6e-4 nats of a row.
    """
    method, ids, scored = loaded.methods[name], loaded.ids, 24
    method = replace(method, selector=SMALL.get(name, method.selector))
    prompt, how = prompt_of("decode", len(ids), scored), {"dense_layers": 1, "remainder": method.remainder}
    selector, steps = method.selector_after(prompt), []
    with torch.inference_mode(), attach(loaded.model, selector, TENTH, **how) as attachment:
        cache = loaded.model(ids[None, :prompt], use_cache=True).past_key_values
        assert attachment.counts() == {}  # the prompt is dense
        for i in range(prompt, len(ids) - 1):
            steps.append(loaded.model(ids[None, i : i + 1], past_key_values=cache).logits[0, -1].log_softmax(-1))
    with torch.inference_mode():
        found, attended = sparse_rows(loaded.model, ids, scored, method, TENTH, FIRST_DENSE, prompt)
        everywhere, _ = sparse_rows(loaded.model, ids, scored, method, TENTH, FIRST_DENSE, None)
    assert len(steps) == scored
    found, everywhere = logits(found).log_softmax(-1), logits(everywhere).log_softmax(-1)
    if method.remainder:
        divergence = [(found.exp() * (found - other)).sum(-1).max() for other in (torch.stack(steps), everywhere)]
        assert divergence[0] < 2e-3
        assert divergence[1] > 0.1
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


def test_the_remainder_brings_every_hasher_closer_to_dense(loaded):
    names = ("lsh", "paper", "planes")
    cells = [Cell(name + more, "visible", 0.1) for name in names for more in ("", REMAINDER)]
    found = {cell["method"]: cell for cell in score(loaded, *cells)["cells"]}
    for name in names:
        assert found[name + REMAINDER]["kl"] < 0.8 * found[name]["kl"]
        assert found[name + REMAINDER]["density"] == found[name]["density"]


def test_a_hasher_without_a_remainder_is_refused(made, loaded, tmp_path):
    hasher = Hasher(loaded.methods["lsh"].selector.hasher.config)
    hasher.save_pretrained(tmp_path / "lsh")
    assert load_methods(["lsh"], tmp_path, loaded.model.config)
    with pytest.raises(ValueError, match="has no remainder"):
        load_methods(["lsh+remainder"], tmp_path, loaded.model.config)
