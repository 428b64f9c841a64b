"""Runs of perplexity: their rows, and what is resumed or refused."""

import json
import math
import shutil

import pytest
from evals.results import read_result
from evals.rivals.magicpig import MagicPigSelector
from evals.tasks import ppl
from hashtrain import models
from rich.console import Console
from sparse_decode import RecentSelector
from transformers import LlamaModel

QUIET = Console(quiet=True)


@pytest.fixture
def forwards(monkeypatch):
    """Counts forward passes of the model's layers: [count]."""
    count, original = [0], LlamaModel.forward

    def counted(self, *arguments, **keywords):
        count[0] += 1
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(models, "_take_a_step", lambda *given: None)  # which loading does
    monkeypatch.setattr(LlamaModel, "forward", counted)
    return count


def test_ours_take_what_a_rival_took_on_the_same_context(ppl_command):
    """A window of 10 % acts as a rival: it is measured first, and ours get its density, not 2 %."""
    command = ppl_command(methods=("recent", "planes"), budgets=(0.1,), rules=("fixed",), match=("recent",))
    result = ppl.run(command, QUIET)
    theirs, ours = (
        result.one(method=m, rule=rule, metric="kl", against=None)
        for m, rule in (("recent", "fixed"), ("planes", "as recent"))
    )
    assert theirs.density > 0.2  # at least 20 tokens
    assert ours.density == pytest.approx(theirs.density, abs=0.01)
    difference = result.one(method="planes", rule="as recent", against="recent", metric="kl")
    assert difference.value == pytest.approx(ours.value - theirs.value)


def test_rows_that_a_rival_leaves_dense_do_not_count_in_what_ours_take():
    """Of ten tokens, the first four rows see all, and each later one reads two."""
    density = (1 + 2 + 3 + 4 + 6 * 2) / 55
    assert ppl.beyond_dense_rows(density, MagicPigSelector(prefill=4, sink=0, local=0), 10) == pytest.approx(12 / 45)
    assert ppl.beyond_dense_rows(density, RecentSelector(), 10) == density


def test_rows_follow_from_the_samples(ppl_command):
    command = ppl_command(methods=("lsh", "planes"), rules=("visible",), seed=5)
    found = ppl.run(command, QUIET)
    samples = [json.loads((command.out / "samples" / f"{i:04d}.json").read_text()) for i in range(3)]
    dense = [sample["dense"]["nll"] for sample in samples]
    lsh, planes = ([sample["cells"][i] for sample in samples] for i in (0, 1))
    at = {"rule": "visible", "budget": 0.1, "against": None}
    nll = [cell["nll"] for cell in planes]
    mean = sum(nll) / 3
    assert found.one(method="planes", metric="perplexity", **at).value == pytest.approx(math.exp(mean))
    ratio = found.one(method="planes", metric="perplexity_ratio", **at)
    assert ratio.value == pytest.approx(math.exp(mean - sum(dense) / 3))
    assert ratio.low <= ratio.value <= ratio.high
    kl = found.one(method="lsh", metric="kl", **at)
    assert kl.value == pytest.approx(sum(cell["kl"] for cell in lsh) / 3)
    assert (kl.n, kl.seed, kl.bits, kl.variant) == (3, 5, 64, "lsh")
    assert kl.density == pytest.approx(sum(cell["density"] for cell in lsh) / 3)
    pair = found.one(method="planes", against="lsh", metric="kl", budget=0.1, rule="visible")
    gaps = [a["kl"] - b["kl"] for a, b in zip(planes, lsh, strict=True)]
    assert pair.value == pytest.approx(sum(gaps) / 3)
    assert read_result(command.out) == found


def test_a_finished_run_recomputes_nothing_and_grows_and_a_stopped_one_goes_on(ppl_command, forwards, monkeypatch):
    settings, whole = {"methods": ("lsh", "oracle"), "rules": ("visible",)}, ppl.measure
    command = ppl_command(documents=2, **settings)

    def stop(model, ids, *rest):
        if forwards[0] == 3:
            raise KeyboardInterrupt
        return whole(model, ids, *rest)

    monkeypatch.setattr(ppl, "measure", stop)
    with pytest.raises(KeyboardInterrupt):
        ppl.run(command, QUIET)
    assert [path.name for path in (command.out / "samples").iterdir()] == ["0000.json"]
    with pytest.raises(ValueError, match="no finished run"):
        read_result(command.out)
    monkeypatch.setattr(ppl, "measure", whole)
    first = ppl.run(command, QUIET)
    assert forwards[0] == 2 * (1 + 2)
    assert ppl.run(command, QUIET) == first
    assert forwards[0] == 6
    assert ppl.run(ppl_command(documents=3, **settings), QUIET).rows[0].n == 3
    assert forwards[0] == 9


def test_other_settings_retrained_hashers_and_other_folders_are_refused(ppl_command, made, tmp_path):
    hashers = tmp_path / "hashers"
    shutil.copytree(made.hashers, hashers)
    command = {"hashers": hashers, "methods": ("lsh",), "rules": ("visible",), "documents": 1}
    ppl.run(ppl_command(**command), QUIET)
    for changed in ({"context": 64}, {"budgets": (0.2,)}, {"seed": 1}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="other settings"):
            ppl.run(ppl_command(**{**command, **changed}), QUIET)
    shutil.rmtree(hashers / "lsh")
    shutil.copytree(made.hashers / "planes", hashers / "lsh")
    with pytest.raises(ValueError, match="method_identities"):
        ppl.run(ppl_command(**command), QUIET)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not empty"):
        ppl.run(ppl_command(out=tmp_path / "other"), QUIET)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]
