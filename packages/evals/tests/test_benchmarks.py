"""Runs of the benchmarks of lm-evaluation-harness on local data: their rows, and resumed runs."""

import json
import os
import shutil

import numpy as np
import pytest
from evals import cli
from evals.methods import DENSE
from evals.results import read_result
from evals.tables import grids
from evals.tasks import benchmark, fidelity
from evals.tasks.benchmark_settings import BenchmarkCommand, FewshotCommand, LongbenchCommand, RulerBenchmarkCommand
from evals.tasks.fidelity_settings import FidelityCommand
from evals.text import rouge_l
from hashtrain import models
from rich.console import Console

if os.environ.get("CI") != "true":
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: `uv sync --group lm-eval`")


@pytest.fixture(scope="module", autouse=True)
def harness():
    """Import the harness when tests need it: every process that collects these tests would take seconds for it."""
    global measure, SparseLM, FOLDER
    from evals.harness import measure
    from evals.harness.adapter import SparseLM
    from example_data import FOLDER


QUIET = Console(quiet=True)
RUNS = {
    "fewshot": (FewshotCommand, "python_attributes", ("acc", "acc_norm"), {"shots": 0, "rows": "continuation"}),
    "longbench": (LongbenchCommand, "python_short", ("score", "qa_f1_score"), {}),
    "ruler": (RulerBenchmarkCommand, "python_needle", ("1024",), {"lengths": (256,)}),
}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example, with its short items instead of the long ones: the model accepts 256 tokens."""
    folder = tmp_path_factory.mktemp("example")
    for path in FOLDER.iterdir():
        text = path.read_text().replace("long.jsonl", "short.jsonl").replace("python_long", "python_short")
        (folder / path.name).write_text(text)
    return folder


@pytest.fixture
def build(command, tmp_path, example):
    def benchmark_command(name, **changed) -> BenchmarkCommand:
        kind, task, _, settings = RUNS[name]
        common = {"methods": ("planes",), "budgets": (0.02,), "documents": 1, "limit": 4, "out": tmp_path / name}
        return command(kind, **common | {"tasks": (task,), "include_path": (example,), **settings, **changed})

    return benchmark_command


@pytest.fixture
def two(example, tmp_path):
    """The example with a second task like that of longbench; returns what a command needs to run both."""
    folder = tmp_path / "two"
    shutil.copytree(example, folder)
    text = (folder / "longbench.yaml").read_text().replace("short.jsonl", "shots.jsonl")
    (folder / "second.yaml").write_text(text.replace("python_short", "second"))
    return {"tasks": ("python_short", "second"), "include_path": (folder,)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_whole_and_a_second_one_computes_nothing(build, name, monkeypatch):
    command, metrics = build(name), RUNS[name][2]
    found = benchmark.run(command, QUIET)
    assert {row.metric for row in found.rows} == set(metrics)
    assert [row.method for row in found.select(metric=metrics[0])] == [DENSE, "planes"]
    assert {(row.task, row.n, row.phase) for row in found.rows} == {(name, 4, "decode")}
    (row,) = found.select(metric=metrics[0], method="planes")
    if name == "fewshot":  # 20 of about 150 to 170 tokens, at every row of the continuation
        assert (row.budget, row.rule) == (20, "tokens")
        assert 20 / 180 < row.density < 20 / 140
    else:
        assert (row.budget, row.rule) == (0.02, "visible")
        assert 0.01 < row.density < 0.03
    assert grids(read_result(command.out))
    written = "".join(path.read_text() for path in command.out.rglob("*.json"))
    assert str(command.out.parent) not in written
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(models, "_take_a_step", lambda *given: None)  # which loading does
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    assert benchmark.run(command, QUIET) == found


@pytest.mark.slow
def test_the_harness_runs_a_model_in_bfloat16(build):
    found = benchmark.run(build("fewshot", dtype="bfloat16", methods=("planes",), limit=2), QUIET)
    assert found.config["dtype"] == "bfloat16"
    assert {row.method for row in found.rows} == {"dense", "planes"}


def test_rows_follow_from_the_items(build):
    command = build("longbench", budgets=(1.0,))
    found = benchmark.run(command, QUIET)
    sample = json.loads((command.out / "samples" / "0000.json").read_text())
    dense, whole = sample["cells"]
    assert dense["texts"] == whole["texts"]
    assert len(dense["texts"]) == len(dense["values"]["score"]) == 4
    row = found.one(metric="score", method=DENSE)
    assert row.value == pytest.approx(np.mean(dense["values"]["score"]))
    assert row.stderr == pytest.approx(np.std(dense["values"]["score"], ddof=1) / 2)


def test_every_method_gets_the_same_prompts(build, monkeypatch):
    """With worked examples, which are drawn again for each method."""
    asked = []

    def evaluate(lm, tasks, **settings):
        output = measure.evaluate_as_shipped(lm, tasks, **settings)
        asked.append([x.args for x in tasks["tasks"]["python_attributes"].instances])
        return output

    monkeypatch.setattr(measure, "evaluate_as_shipped", measure.evaluate, raising=False)
    monkeypatch.setattr(measure, "evaluate", evaluate)
    benchmark.run(build("fewshot", shots=1, methods=("recent", "planes"), limit=2), QUIET)
    assert len(asked) == 3
    assert asked[0] == asked[1] == asked[2]
    assert asked[0][0][0].count("class Store") == 2


def test_means_over_tasks_are_plain_ones(build, two):
    found = benchmark.run(build("longbench", **two), QUIET)
    for method in (DENSE, "planes"):
        rows = found.select(metric="score", method=method)
        assert [row.where for row in rows] == ["python_short", "second", "mean of 2 tasks"]
        assert rows[2].value == pytest.approx((rows[0].value + rows[1].value) / 2)
        assert rows[2].stderr == pytest.approx(np.hypot(rows[0].stderr, rows[1].stderr) / 2)
        assert rows[2].n == 8


@pytest.mark.slow
def test_other_data_under_the_same_name_are_refused(build, example, tmp_path):
    benchmark.run(build("ruler"), QUIET)
    other = tmp_path / "other"
    other.mkdir()
    (other / "ruler.yaml").write_text((example / "ruler.yaml").read_text().replace("short.jsonl", "shots.jsonl"))
    (other / "shots.jsonl").write_text((example / "shots.jsonl").read_text())
    with pytest.raises(ValueError, match="of another text"):
        benchmark.run(build("ruler", include_path=(other,)), QUIET)


def test_stored_answers_are_compared_by_task(build, two, tmp_path):
    run = build("longbench", **two, budgets=(0.1, 1.0))
    source = benchmark.run(run, QUIET)
    command = FidelityCommand(from_run=run.out, out=tmp_path / "fidelity")
    found = fidelity.run(command, QUIET)
    assert found.config["task"] == "fidelity"
    assert found.config["compared"] == "longbench"
    samples = [json.loads((run.out / "samples" / f"000{i}.json").read_text()) for i in range(2)]
    means = []
    for sample in samples:
        dense, tenth, _ = (cell["texts"] for cell in sample["cells"])
        means.append(np.mean([rouge_l(a, b) for a, b in zip(dense, tenth, strict=True)]))
        where = sample["cells"][0]["task"]
        row = found.one(metric="rouge_l", where=where, budget=0.1)
        assert row.value == pytest.approx(means[-1])
        assert (row.method, row.n) == ("planes", len(dense))
        assert row.density == source.one(metric="score", where=where, budget=0.1, method="planes").density
        assert found.one(metric="rouge_l", where=where, budget=1.0).value == 1.0
    assert found.one(metric="rouge_l", where="mean of 2 tasks", budget=0.1).value == pytest.approx(np.mean(means))
    assert grids(read_result(command.out))
    assert fidelity.run(command, QUIET) == found


def test_answers_of_a_run_without_text_are_refused(build, tmp_path):
    run = build("fewshot", limit=2)
    benchmark.run(run, QUIET)
    with pytest.raises(ValueError, match="holds no answers: expected a run of longbench, got one of fewshot"):
        fidelity.run(FidelityCommand(from_run=run.out, out=tmp_path / "fidelity"), QUIET)
    assert not (tmp_path / "fidelity").exists()
    with pytest.raises(ValueError, match="no finished run"):
        fidelity.run(FidelityCommand(from_run=tmp_path / "none", out=tmp_path / "fidelity"), QUIET)


def test_prompts_get_the_chat_template_and_the_length_asked_for(build, made, tmp_path, monkeypatch):
    template = tmp_path / "chat"
    shutil.copytree(made.model, template)
    settings = json.loads((template / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    )
    (template / "tokenizer_config.json").write_text(json.dumps(settings))
    asked = []

    def passed(lm, context, max_length, *given, **options):
        asked.append(lm.tokenizer.batch_decode(context))
        assert max_length <= 96
        return SparseLM.generate_as_shipped(lm, context, max_length, *given, **options)

    monkeypatch.setattr(SparseLM, "generate_as_shipped", SparseLM._model_generate, raising=False)
    monkeypatch.setattr(SparseLM, "_model_generate", passed)
    run = build("longbench", model=str(template), chat_template=True, max_length=96, limit=2, out=tmp_path / "chat-run")
    found = benchmark.run(run, QUIET)
    assert found.config["chat_template"] is True
    assert found.config["max_length"] == 96
    prompts = [text for batch in asked for text in batch]
    assert prompts
    assert all("<user>" in text and text.rstrip().endswith("</user>") for text in prompts)
    with pytest.raises(ValueError, match="has no chat template"):
        benchmark.run(build("longbench", chat_template=True), QUIET)
    with pytest.raises(ValueError, match="at most the model's 256 tokens, got 512"):
        benchmark.run(build("longbench", max_length=512), QUIET)


@pytest.mark.slow
def test_as_typed(build, made, example, capsys):
    command = build("ruler")
    flags = {"model": made.model, "hashers": made.hashers, "tasks": "python_needle", "include-path": example}
    flags |= {"methods": "planes", "limit": 2, "dense-layers": 1, "out": command.out}
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert cli.main(["ruler", *arguments]) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [found["method"] for found in last["results"]] == [DENSE, "planes"]


def test_without_the_harness_it_says_how_to_install_it(build, monkeypatch):
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"evals\[lm-eval\]"):
        benchmark.run(build("ruler"), QUIET)
