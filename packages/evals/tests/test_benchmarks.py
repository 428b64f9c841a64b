"""Runs of the benchmarks of lm-evaluation-harness on local data: their rows, and resumed runs."""

import json
import os
import shutil
from pathlib import Path

import evals
import numpy as np
import pytest
from evals.methods import DENSE
from evals.results import read_result
from evals.tables import grids
from evals.tasks import benchmark
from evals.tasks.benchmark_settings import BenchmarkCommand, FewshotCommand, LongbenchCommand, RulerBenchmarkCommand
from hashtrain import models
from rich.console import Console

FOLDER = Path(evals.__file__).parent / "harness" / "example"
if os.environ.get("CI") != "true":
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: `uv sync --group lm-eval`")


@pytest.fixture(scope="module", autouse=True)
def harness():
    """Import the harness when tests need it: every process that collects these tests would take seconds for it."""
    global measure, SparseLM
    from evals.harness import measure
    from evals.harness.adapter import SparseLM


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


def test_means_over_tasks_are_plain_ones(build, two):
    found = benchmark.run(build("longbench", **two), QUIET)
    for method in (DENSE, "planes"):
        rows = found.select(metric="score", method=method)
        assert [row.where for row in rows] == ["python_short", "second", "mean of 2 tasks"]
        assert rows[2].value == pytest.approx((rows[0].value + rows[1].value) / 2)
        assert rows[2].stderr == pytest.approx(np.hypot(rows[0].stderr, rows[1].stderr) / 2)
        assert rows[2].n == 8


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


def test_code_of_a_tokenizer_is_never_run(build, made, tmp_path):
    shutil.copytree(made.model, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["code.Slow", "code.Fast"]}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "model" / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="RULER's generators would run the code that comes with the tokenizer"):
        benchmark.run(build("ruler", model=str(tmp_path / "model"), tasks=("niah_single_1",)), QUIET)


def test_without_the_harness_it_says_how_to_install_it(build, monkeypatch):
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"evals\[lm-eval\]"):
        benchmark.run(build("ruler"), QUIET)
