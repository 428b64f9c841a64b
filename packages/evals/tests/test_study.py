"""Reports, comparisons and suggested budgets."""

import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from evals import cli
from evals.base_commands import IouCommand, PplCommand
from evals.compare import compare
from evals.documents import load_documents
from evals.grid import Grid, to_markdown
from evals.metrics import Estimate
from evals.page import Section, section_of, to_html, write_page
from evals.result import read_result
from evals.study import SuggestCommand
from evals.tasks import iou, ppl, suggest
from evals_output import last_line
from hashtrain.usage import UsageError
from rich.console import Console
from sparse_decode import Budget
from sparse_decode.attach import attach_rows
from transformers import AutoTokenizer

QUIET = Console(quiet=True)
ALL, NONE = (None, None), (None, None)


@pytest.fixture(scope="module")
def runs(made, tmp_path_factory):
    """Two runs of one protocol, one of another, one of another task."""
    root = tmp_path_factory.mktemp("runs")
    common = {"model": str(made.model), "hashers": made.hashers, "text": (made.text,), "context": 128}
    common |= {"dense_layers": 1, "sink": 0, "recent": 0, "documents": 3}
    made_by = {
        "first": PplCommand(
            **common, methods=("lsh", "planes"), budgets=(0.1, 0.2), rules=("visible",), out=root / "first"
        ),
        "second": PplCommand(**common, methods=("planes",), budgets=(0.2,), rules=("visible",), out=root / "second"),
        "other": PplCommand(**common, methods=("lsh",), budgets=(0.1,), rules=("visible",), seed=1, out=root / "other"),
        "served": PplCommand(
            **common, methods=("lsh",), budgets=(0.1,), rules=("visible",), phase="decode", out=root / "served"
        ),
    }
    for command in made_by.values():
        ppl.run(command, QUIET)
    iou.run(IouCommand(**common, methods=("lsh",), budgets=(0.1,), rows=4, out=root / "iou"), QUIET)
    return root


# Pages


class Reader(HTMLParser):
    """Collects what a browser would load, and unclosed tags."""

    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.cells = [], [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_a_page_is_whole_and_loads_nothing(runs, tmp_path):
    write_page(tmp_path, "A <title>", [section_of(runs / "first"), section_of(runs / "iou", "Overlap & more", ["So."])])
    reader = Reader()
    reader.feed((tmp_path / "report.html").read_text())
    assert reader.open == []
    assert all(x.startswith(("#", "data:image/png;base64,")) for x in reader.loads)
    assert sum(x.startswith("data:") for x in reader.loads) == 2
    assert "10 %, lsh" in reader.cells
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# A <title>\n")
    assert "## Overlap & more\n\nSo.\n" in text
    assert "| 10 %, lsh |" in text


def test_text_is_escaped_in_html():
    from evals.page import Section

    grid = Grid("<i>", ["a"], [[["<script>"]]])
    text = to_html("t", [Section("<b>", ("&",), (grid,), None, "")])
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


# Comparisons


def kl(folder, method, budget):
    samples = [json.loads(path.read_text()) for path in sorted((folder / "samples").glob("*.json"))]
    return np.array([c["kl"] for s in samples for c in s["cells"] if (c["method"], c["budget"]) == (method, budget)])


def test_runs_are_compared_in_what_they_share(runs):
    entries, grid = compare(runs / "first", runs / "second", ALL, NONE)
    assert {tuple(entry["a"]) for entry in entries} == {("planes", 0.2)}
    assert [entry["mean"] for entry in entries] == pytest.approx([0, 0], abs=1e-7)
    assert len(grid.sections[0]) == 1


def test_runs_of_other_versions_are_compared_with_a_note(runs, tmp_path, capsys):
    assert compare(runs / "first", runs / "second", ALL, NONE)[1].note == ""
    shutil.copytree(runs / "second", tmp_path / "former")
    for name, key in (("config", "versions"), ("environment", "torch")):
        path = tmp_path / "former" / f"{name}.json"
        held = json.loads(path.read_text())
        former = {"versions": held[key].replace("evals 1", "evals 0"), "torch": "0.1"} if key in held else {}
        path.write_text(json.dumps({**held, key: former[key]}))
    _, grid = compare(runs / "first", tmp_path / "former", ALL, NONE)
    now = read_result(runs / "first").environment
    sentence = f"the two runs were made by different versions: torch {now['torch']} and 0.1, evals {now['evals']} and 0"
    for text in (grid.note, to_markdown(grid), to_html("", [Section("", (), (grid,), None, "")])):
        assert sentence in text
    assert cli.main(["compare", str(runs / "first"), str(tmp_path / "former")]) == 0
    assert "different versions" in capsys.readouterr().err


def test_two_methods_at_two_budgets_are_compared_document_by_document(runs):
    entries, _ = compare(runs / "first", runs / "first", ("planes", "lsh"), (0.1, 0.2))
    (found,) = [entry for entry in entries if entry["metric"] == "kl"]
    gaps = kl(runs / "first", "planes", 0.1) - kl(runs / "first", "lsh", 0.2)
    assert found["mean"] == pytest.approx(gaps.mean())
    assert gaps.min() <= found["low"] <= found["high"] <= gaps.max()
    assert len(gaps) == 3


def test_other_protocols_are_refused(runs):
    with pytest.raises(ValueError, match="different protocols: seed is 0 and 1"):
        compare(runs / "first", runs / "other", ALL, NONE)
    with pytest.raises(ValueError, match="different protocols: phase is everywhere and decode"):
        compare(runs / "first", runs / "served", ALL, NONE)
    with pytest.raises(ValueError, match="different protocols"):
        compare(runs / "first", runs / "iou", ALL, NONE)


def test_other_documents_are_refused(runs, tmp_path):
    shutil.copytree(runs / "second", tmp_path / "moved")
    path = tmp_path / "moved" / "samples" / "0001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokens": "0"}))
    with pytest.raises(ValueError, match="same documents"):
        compare(runs / "second", tmp_path / "moved", ALL, NONE)


def test_nothing_in_common_is_refused(runs):
    with pytest.raises(ValueError, match="pairs with"):
        compare(runs / "first", runs / "second", ("lsh", None), NONE)


# Suggested budgets


@pytest.mark.parametrize("first", range(12))
def test_bisection_finds_the_first_that_meets(first):
    tried = []

    def meets(index):
        tried.append(index)
        return index >= first

    assert suggest.smallest(meets, 12) == first
    assert first in tried
    assert len(tried) <= 5


def test_a_target_needs_the_whole_interval():
    command = SuggestCommand(kl=0.5)
    assert suggest.satisfied(Estimate(0.4, 0.3, 0.5), command)
    assert not suggest.satisfied(Estimate(0.4, 0.3, 0.51), command)
    assert suggest.satisfied(Estimate(0.4, None, None), command)
    assert not suggest.satisfied(Estimate(0.95, 0.89, 0.97), SuggestCommand(mass=0.9))


@pytest.mark.parametrize("target", ["kl", "mass"])
def test_the_suggestion_meets_the_target_and_the_budget_before_it_does_not(command, target, monkeypatch):
    monkeypatch.setattr(suggest, "GRID", (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0))
    value = {"kl": 0.2, "mass": 0.9}[target]
    asked = command(SuggestCommand, methods=("planes",), budgets=(1.0,), rows=8, **{target: value})
    found = suggest.run(asked, QUIET)
    (best,) = found.select(where="suggested")
    others = found.select(where="tried")
    good = [suggest.satisfied(Estimate(row.value, row.low, row.high), asked) for row in others]
    assert suggest.satisfied(Estimate(best.value, best.low, best.high), asked)
    assert all(ok == (row.budget > best.budget) for row, ok in zip(others, good, strict=True))
    assert suggest.GRID[suggest.GRID.index(best.budget) - 1] in [row.budget for row in others]
    monkeypatch.setattr(suggest, "_value", None)
    assert suggest.run(asked, QUIET) == found


def test_after_a_dense_prompt_the_divergence_covers_only_the_scored_rows(command, made, loaded):
    """By hand: one forward pass with rows from 63 on sparse; token 64 is the first scored one."""
    asked = command(SuggestCommand, methods=("lsh",), budgets=(1.0,), kl=0.05, phase="decode", documents=1)
    found = suggest.run(asked, QUIET)
    assert {row.phase for row in found.rows} == {"decode"}
    assert "--phase" not in (asked.out / "report.md").read_text()
    (tokens,) = (d.ids for d in load_documents(asked.text, AutoTokenizer.from_pretrained(made.model), 128, 1, 0))
    row = next(row for row in found.rows if row.budget < 1)
    with torch.inference_mode():
        dense = loaded.model(tokens[None]).logits[0, 63:-1].log_softmax(-1)
        selector, budget = loaded.methods["lsh"].selector, Budget(row.budget, min_tokens=1, sink=0, recent=0)
        with attach_rows(loaded.model, selector, budget, dense_layers=1, sparse_rows=63, remainder=False):
            sparse = loaded.model(tokens[None]).logits[0, 63:-1].log_softmax(-1)
    expected = (dense.exp() * (dense - sparse)).sum(-1).mean().item()
    assert row.value == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="phase was decode, now everywhere"):
        suggest.run(replace(asked, phase="everywhere"), QUIET)


def test_a_suggestion_is_for_the_recommended_hasher_and_the_mass_has_no_phase():
    assert SuggestCommand(kl=0.1).methods == ("transform+remainder",)
    assert SuggestCommand(mass=0.9).methods == ("transform",)
    with pytest.raises(UsageError, match="takes no --phase, got decode"):
        SuggestCommand(mass=0.9, phase="decode")


@pytest.mark.parametrize("given", [{}, {"kl": 0.1, "mass": 0.9}, {"kl": 0.0}, {"mass": 1.5}], ids=str)
def test_targets_that_cannot_be_used(given):
    with pytest.raises(UsageError, match="got"):
        SuggestCommand(**given)


def test_a_suggestion_takes_one_method():
    with pytest.raises(UsageError, match="takes one of"):
        SuggestCommand(kl=0.1, methods=("lsh", "planes"))


# Whole commands


def test_report_and_compare_as_typed(runs, tmp_path, capsys):
    assert cli.main(["report", str(runs / "first"), str(runs / "iou"), "--out", str(tmp_path)]) == 0
    assert len(last_line(capsys)["sections"]) == 2
    assert cli.main(["compare", str(runs / "first"), str(runs / "second")]) == 0
    assert last_line(capsys)["differences"][0]["mean"] == pytest.approx(0, abs=1e-7)
    assert cli.main(["compare", str(runs / "first"), str(runs / "other")]) == 2
    assert "different protocols" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    assert "no finished run" in capsys.readouterr().err
