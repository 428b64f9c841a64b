"""Runs of perplexity and of tuning: their rows, what is resumed or refused, and rivals tuned on other text."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from evals.methods import load_rival
from evals.results import read_result
from evals.rivals.quest import QuestSelector
from evals.rivals.table import RIVALS
from evals.tasks import ppl, tune
from evals.tasks.settings import PplCommand, TuneCommand
from evals.tasks.tune import Setting
from hashtrain import models
from rich.console import Console
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
    assert theirs.density is not None
    assert theirs.density > 0.2  # at least 20 tokens
    assert ours.density == pytest.approx(theirs.density, abs=0.01)
    difference = result.one(method="planes", rule="as recent", against="recent", metric="kl")
    assert difference.value == pytest.approx(ours.value - theirs.value)
    report = (command.out / "report.md").read_text()
    assert "| 10 %, as recent, planes |" in report
    assert "| 10 %, fixed, recent |" in report
    assert "| 10 %, as recent, planes - recent |" in report


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
    assert min(gaps) <= pair.low <= pair.high <= max(gaps)
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


GRID = {"pages": (4, 16), "bits": (2, 15), "tables": (100,), "methods": ("quest", "magicpig")}


def see_early(monkeypatch):
    """Let rows of a short context be sparse, which the rivals would leave dense."""
    for name, more in {"quest": {"dense_rows": 0}, "magicpig": {"prefill": 80}}.items():
        monkeypatch.setitem(RIVALS, name, RIVALS[name]._replace(settings={**RIVALS[name].settings, **more}))


@pytest.fixture(scope="module")
def finished(made, tmp_path_factory):
    """A tuning on two of the four texts: its command and its result."""
    common = {"model": str(made.model), "hashers": made.hashers, "budgets": (0.1,), "context": 128, "dense_layers": 1}
    common |= {"sink": 0, "recent": 0}
    texts = tuple(made.text / f"{i}.txt" for i in (0, 1))
    asked = TuneCommand(**common, **GRID, text=texts, documents=2, out=tmp_path_factory.mktemp("tune") / "run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        see_early(monkeypatch)
        return asked, tune.run(asked, QUIET)


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """The same in a folder that a test may change."""
    command, result = finished
    shutil.copytree(command.out, tmp_path / "tune")
    see_early(monkeypatch)
    return replace(command, out=tmp_path / "tune"), result


def test_the_choice_is_the_least_kl_within_the_limit_or_that_of_the_published_setting_that_takes_most():
    settings = [Setting("quest", {"page": page}) for page in (4, 8, 16)]
    kl = {"quest, page 4": [0.1, 0.1], "quest, page 8": [0.2, 0.4], "quest, page 16": [0.3, 0.5]}
    density = {"quest, page 4": 0.05, "quest, page 8": 0.03, "quest, page 16": 0.04}
    chosen = {limit: tune.choose(settings, "quest", kl, density, limit).parameters for limit in (None, 0.05)}
    assert chosen == {None: {"page": 8}, 0.05: {"page": 4}}
    with pytest.raises(ValueError, match=r"at most 0\.01 of the tokens, the least was 0\.03"):
        tune.choose(settings, "quest", kl, density, 0.01)
    forms = (15, 100), (10, 150), (8, 150)
    settings = [Setting("magicpig", {"bits": bits, "tables": tables}) for bits, tables in forms]
    kl = {setting.label: [1.0 - i / 10] for i, setting in enumerate(settings)}
    density = {setting.label: 0.1 + i / 10 for i, setting in enumerate(settings)}
    assert tune.choose(settings, "magicpig", kl, density, None) == settings[1]


def test_the_file_holds_the_choice_and_the_grid_its_evidence(run, monkeypatch):
    command, result = run
    stored = json.loads((command.out / "tuned.json").read_text())
    for name in command.methods:
        kl = {row.method: row for row in result.select(where=name, metric="kl")}
        published = [row.method for row in result.select(where=name, metric="published") if row.value]
        assert (len(kl), len(published)) == {"quest": (2, 1), "magicpig": (3, 2)}[name]
        (chosen,) = (row.method for row in result.select(where=name, metric="chosen") if row.value)
        able = [row for row in kl.values() if row.density <= max(kl[label].density for label in published)]
        assert chosen == min(able, key=lambda row: row.value).method
        assert chosen == Setting(name, stored["parameters"][name]).label
    assert len({row.value for row in result.select(metric="kl")}) == 5
    monkeypatch.setattr(ppl, "measure", None)
    assert tune.run(command, QUIET) == result
    assert read_result(command.out) == result


def test_a_tuned_rival_is_measured_beside_its_own_on_other_contexts(run, command, made):
    tuned, _ = run
    path = tuned.out / "tuned.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parameters": {"quest": {"page": 4}}}))
    common = {"documents": 2, "rules": ("visible",), "tuned": tuned.out}
    again = command(PplCommand, **common, methods=("quest",), text=tuned.text)
    with pytest.raises(ValueError, match="is a context that the rivals were tuned on"):
        ppl.run(again, QUIET)
    assert not again.out.exists()
    text = tuple(made.text / f"{i}.txt" for i in (2, 3))
    asked = command(PplCommand, **common, methods=("planes", "quest"), text=text, match=("quest-tuned",))
    found = ppl.run(asked, QUIET)
    at = {"rule": "visible", "metric": "kl", "against": None}
    own, other = (found.one(method=name, **at) for name in ("quest", "quest-tuned"))
    assert (own.value, own.density) != (other.value, other.density)
    assert 1.0 > other.density > 0
    assert vars(load_rival("quest", {"page": 4}, "x").selector) == vars(QuestSelector(page=4, dense_rows=0))
    assert found.one(method="planes", rule="as quest-tuned", metric="kl", against="quest-tuned")
    assert "| 10 %, quest-tuned |" in (asked.out / "report.md").read_text()
