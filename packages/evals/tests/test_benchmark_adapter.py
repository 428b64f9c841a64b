"""The adapter to lm-evaluation-harness against the harness's own model: scores, texts, selections and truncation."""

import os

import numpy as np
import pytest
import torch
from evals.methods import DENSE, load_methods
from evals.settings import Always
from hashtrain.demo import demo_model_path
from sparse_decode import Attachment, Budget
from sparse_decode.budget import LayerBudget
from transformers import AutoTokenizer

if os.environ.get("CI") != "true":
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: `uv sync --group lm-eval`")

TENTH = Budget(0.1, sink=0, recent=0)


@pytest.fixture(scope="module", autouse=True)
def harness():
    """Import the harness when tests need it: every process that collects these tests would take seconds for it."""
    global SparseLM, budget_of, Instance, HFLM
    from evals.harness.adapter import SparseLM
    from evals.harness.measure import budget_of
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture
def sparse(loaded, tokenizer):
    """Build the adapter; dense attention by default."""

    def build(method=DENSE, budget=TENTH, **settings):
        methods = {**loaded.methods, DENSE: load_methods([DENSE], None, None)[0]}
        return SparseLM(loaded.model, tokenizer, methods[method], budget, **{"always": Always(1, 0, 0), **settings})

    return build


@pytest.fixture
def own(loaded, tokenizer):
    """The harness's own model."""
    return lambda **settings: HFLM(pretrained=loaded.model, tokenizer=tokenizer, backend="causal", **settings)


def scoring():
    """Contexts and continuations of many lengths; some share a context, some a pass."""
    pairs = [(f"value_{i} = {i}\n" * (2 + i % 3), f"return value_{j}") for i in range(5) for j in (i, 77)]
    pairs += [("for name in names:\n    ", last) for last in ("print", "return", "pass")]
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def writing():
    prompts = ["def f(x):\n    return", "import os\n" * 8, "class A:\n    def b(self):", "import re\n" * 8]
    given = {"until": ["\n\n\n"], "max_gen_toks": 8, "do_sample": False}
    return [Instance("generate_until", {}, (prompt, given), i) for i, prompt in enumerate(prompts)]


def scores(lm, requests=None):
    return np.array([value for value, _ in lm.loglikelihood(requests or scoring(), disable_tqdm=True)])


def texts(lm):
    return lm.generate_until(writing(), disable_tqdm=True)


@pytest.mark.parametrize("rows", [pytest.param("all", marks=pytest.mark.slow), "continuation"])
def test_dense_is_the_harness_own_model(sparse, own, rows):
    lm = sparse(sparse_rows=rows)
    expected = own(batch_size=4).loglikelihood(scoring(), disable_tqdm=True)
    found = lm.loglikelihood(scoring(), disable_tqdm=True)
    assert np.abs(np.subtract(*([value for value, _ in answers] for answers in (found, expected)))).max() < 1e-4
    assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in expected]
    assert texts(lm) == texts(own(batch_size=1))
    assert lm.attended.density == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", ["all", "continuation"])
def test_whole_budgets_are_dense_and_batches_change_nothing(sparse, rows):
    dense = sparse()
    for name in ("oracle", "planes"):
        whole = sparse(name, Budget(1.0), sparse_rows=rows)
        assert np.abs(scores(whole) - scores(dense)).max() < 1e-4
        assert texts(whole) == texts(dense)
        assert whole.attended.density == 1
    one, many = (sparse("planes", sparse_rows=rows, batch_size=size) for size in (1, 8))
    assert np.abs(scores(one) - scores(many)).max() < 1e-4
    assert one.attended.density == many.attended.density
    assert texts(one) == texts(many)


def test_rows_of_the_continuation_are_the_attachments(sparse, loaded, tokenizer):
    """Compares both kinds of rows with one pass of an attachment that knows where the continuation begins."""

    (request,) = [Instance("loglikelihood", {}, ("value = 1\n" * 6 + "print", "(value)"), 0)]
    context, both = (tokenizer(text).input_ids for text in (request.args[0], "".join(request.args)))
    found = {}
    for rows, start in (("all", 0), ("continuation", len(context) - 1)):
        settings = {"dense_layers": 1, "sparse_rows": start, "remainder": False}
        with Attachment(loaded.model, loaded.methods["planes"].selector, TENTH, **settings) as attachment:
            logits = loaded.model(torch.tensor([both[:-1]])).logits[0].log_softmax(-1)
            counts = attachment.counts().values()
        targets = torch.tensor(both[len(context) :])
        expected = logits[len(context) - 1 :].gather(-1, targets[:, None]).sum().item()
        lm = sparse("planes", sparse_rows=rows)
        found[rows] = scores(lm, [request])[0]
        assert found[rows] == pytest.approx(expected, abs=1e-4)
        assert (lm.attended.selected, lm.attended.visible) == tuple(map(sum, zip(*counts, strict=True)))
    assert abs(found["all"] - found["continuation"]) > 1e-3


def test_what_is_too_long_is_cut_where_the_harness_cuts_it_and_a_prompt_loses_its_middle(sparse, own, tokenizer):
    requests = [Instance("loglikelihood", {}, ("value = 1\n" * 200 + "print", "(value)"), 0)]
    expected = own().loglikelihood(requests, disable_tqdm=True)[0][0]
    whole, some = (sparse("planes", budget, sparse_rows="continuation") for budget in (Budget(1.0), TENTH))
    assert scores(whole, requests)[0] == pytest.approx(expected, abs=1e-4)
    scores(some, requests)
    # 256 tokens see each other; the rows of the continuation are the last ones, in two sparse layers of four heads.
    rows = len(sparse().tok_encode("(value)"))
    assert some.attended.visible == 2 * 4 * sum(range(256 - rows + 1, 257))
    text = "".join(f"value_{i} = {i}\n" for i in range(40))
    ids = tokenizer(text).input_ids

    def cut(side, length):
        return sparse(truncation_side=side).tok_batch_encode([text], left_truncate_len=length)[0][0].tolist()

    assert [cut("left", 50), cut("middle", 50), cut("middle", len(ids))] == [ids[-50:], ids[:25] + ids[-25:], ids]


def test_a_fixed_budget_is_that_many_tokens():
    visible = torch.tensor([5, 20, 5000])
    assert LayerBudget.like(budget_of("tokens", 20.0)).count(visible).tolist() == [5, 20, 20]
    assert LayerBudget.like(budget_of("visible", 0.1)).count(visible).tolist() == [5, 8, 500]
