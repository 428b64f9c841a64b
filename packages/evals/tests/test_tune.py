"""Rivals tuned on text that is not used for evaluation: the choice, its file, and perplexity with it."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
from evals.methods import load_rival
from evals.results import read_result
from evals.rivals import RIVALS, QuestSelector
from evals.tasks import ppl, tune
from evals.tasks.ppl_settings import PplCommand
from evals.tasks.tune import Setting
from evals.tasks.tune_settings import TuneCommand
from rich.console import Console

QUIET = Console(quiet=True)
GRID = {"pages": (4, 16), "bits": (2, 15), "tables": (100,), "methods": ("quest", "magicpig")}


def see_early(monkeypatch):
    """Let rows of a short context be sparse, which the rivals would leave dense."""
    for name, more in {"quest": {"dense_rows": 0}, "magicpig": {"prefill": 80}}.items():
        monkeypatch.setitem(RIVALS, name, replace(RIVALS[name], build=partial(RIVALS[name].build, **more)))


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


@pytest.fixture
def build(command, made):
    """Commands that evaluate on the two other texts."""
    text = tuple(made.text / f"{i}.txt" for i in (2, 3))
    return lambda **settings: command(PplCommand, **{"text": text, "documents": 2, "rules": ("visible",), **settings})


def test_the_choice_is_the_least_kl_within_the_limit():
    settings = [Setting("quest", {"page": page}) for page in (4, 8, 16)]
    kl = {"quest, page 4": [0.1, 0.1], "quest, page 8": [0.2, 0.4], "quest, page 16": [0.3, 0.5]}
    density = {"quest, page 4": 0.05, "quest, page 8": 0.03, "quest, page 16": 0.04}
    chosen = {limit: tune.choose(settings, "quest", kl, density, limit).parameters for limit in (None, 0.05)}
    assert chosen == {None: {"page": 8}, 0.05: {"page": 4}}
    with pytest.raises(ValueError, match=r"at most 0\.01 of the tokens, the least was 0\.03"):
        tune.choose(settings, "quest", kl, density, 0.01)


def test_the_limit_is_that_of_the_published_setting_that_takes_most():
    settings = [
        Setting("magicpig", {"bits": bits, "tables": tables}) for bits, tables in ((15, 100), (10, 150), (8, 150))
    ]
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


def test_a_tuned_rival_is_measured_beside_its_own(run, build, loaded):
    command, _ = run
    (command.out / "tuned.json").write_text(
        json.dumps(json.loads((command.out / "tuned.json").read_text()) | {"parameters": {"quest": {"page": 4}}})
    )
    asked = build(methods=("planes", "quest"), tuned=command.out, match=("quest-tuned",))
    found = ppl.run(asked, QUIET)
    at = {"rule": "visible", "metric": "kl", "against": None}
    own, tuned = (found.one(method=name, **at) for name in ("quest", "quest-tuned"))
    assert (own.value, own.density) != (tuned.value, tuned.density)
    by_hand = QuestSelector(page=4, dense_rows=0)
    assert 1.0 > tuned.density > 0
    assert vars(load_rival("quest", {"page": 4}, "x").selector) == vars(by_hand)
    assert found.one(method="planes", rule="as quest-tuned", metric="kl", against="quest-tuned")
    report = (asked.out / "report.md").read_text()
    assert "| 10 %, quest-tuned |" in report


def test_contexts_used_for_tuning_are_refused(run, build):
    command, _ = run
    asked = build(methods=("quest",), tuned=command.out, text=command.text)
    with pytest.raises(ValueError, match="is a context that the rivals were tuned on"):
        ppl.run(asked, QUIET)
    assert not asked.out.exists()
