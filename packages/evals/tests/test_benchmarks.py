"""Benchmarks of lm-evaluation-harness on local data: their tasks, rows and resumed runs, and what cannot be used."""

import json
import os
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import evals
import numpy as np
import pytest
from evals.methods import DENSE
from evals.results import read_result
from evals.setup import load_model_and_methods
from evals.tables import grids
from evals.tasks import benchmark
from evals.tasks.benchmark_settings import BenchmarkCommand, FewshotCommand, LongbenchCommand, RulerBenchmarkCommand
from hashtrain import models
from rich.console import Console
from transformers import LlamaForCausalLM

FOLDER = Path(evals.__file__).parent / "harness" / "example"
if os.environ.get("CI") != "true":
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: `uv sync --group lm-eval`")


@pytest.fixture(scope="module", autouse=True)
def harness():
    """Import the harness when tests need it: every process that collects these tests would take seconds for it."""
    global SparseLM, as_guest, load, load_tasks, pandas
    import pandas
    from evals.harness import load
    from evals.harness.adapter import SparseLM
    from evals.harness.load import as_guest, load_tasks


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
def changed_model(made, tmp_path):
    """Return a function that copies the model with other settings of its tokenizer, and returns the folder."""

    def copied(**settings):
        shutil.copytree(made.model, tmp_path / "model")
        path = tmp_path / "model" / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return str(tmp_path / "model")

    return copied


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


def test_a_metric_of_the_whole_task_that_is_zero_is_no_mean_of_items(build):
    command, cell = build("fewshot"), {"method": DENSE, "budget": None, "rule": DENSE, "density": 1.0, "task": "cola"}
    ready = load_model_and_methods(command, "fewshot")
    sample = {"items": 4, "cells": [{**cell, "results": {"mcc": [0.0, 0.1]}, "values": {}}]}
    (row,) = benchmark._rows(command, ready, [sample])
    assert (row.value, row.stderr, row.n) == (0.0, 0.1, 4)


def test_a_limit_is_of_items_of_each_length(build):
    command = build("ruler", lengths=(128, 256), limit=2)
    task = SimpleNamespace(eval_docs=[{"max_length": length} for length in (128, 256) for _ in range(5)])
    assert load._of_each_length(task, command) == [0, 1, 5, 6]
    assert load.BenchmarkTask("one", task, "", [0, 5]).items(command) == {"samples": {"one": [0, 5]}}
    assert load._of_each_length(task, build("ruler", lengths=(128,), limit=2)) is None
    with pytest.raises(ValueError, match="--lengths must be at most the 256 tokens"):
        benchmark.run(build("ruler", lengths=(512,)), QUIET)
    asked = build("longbench", chat_template=True)
    assert [asked.has_template(f"longbench_{name}") for name in ("qasper_e", "trec", "lcc_e")] == [True, False, False]


def test_means_over_tasks_are_plain_ones(build, example, tmp_path):
    shutil.copytree(example, tmp_path / "two")
    text = (tmp_path / "two" / "longbench.yaml").read_text().replace("short.jsonl", "shots.jsonl")
    (tmp_path / "two" / "second.yaml").write_text(text.replace("python_short", "second"))
    command = build("longbench", tasks=("python_short", "second"), include_path=(tmp_path / "two",))
    found = benchmark.run(command, QUIET)
    for method in (DENSE, "planes"):
        rows = found.select(metric="score", method=method)
        assert [row.where for row in rows] == ["python_short", "second", "mean of 2 tasks"]
        assert rows[2].value == pytest.approx((rows[0].value + rows[1].value) / 2)
        assert rows[2].stderr == pytest.approx(np.hypot(rows[0].stderr, rows[1].stderr) / 2)
        assert rows[2].n == 8


def test_prompts_get_the_chat_template_and_the_length_asked_for(build, changed_model, tmp_path, monkeypatch):
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    asked = []

    def passed(lm, context, max_length, *given, **options):
        asked.extend(lm.tokenizer.batch_decode(context))
        assert max_length <= 96
        return SparseLM.generate_as_shipped(lm, context, max_length, *given, **options)

    monkeypatch.setattr(SparseLM, "generate_as_shipped", SparseLM._model_generate, raising=False)
    monkeypatch.setattr(SparseLM, "_model_generate", passed)
    model = changed_model(chat_template=template)
    run = build("longbench", model=model, chat_template=True, max_length=96, limit=2, out=tmp_path / "chat-run")
    found = benchmark.run(run, QUIET)
    assert (found.config["chat_template"], found.config["max_length"]) == (True, 96)
    assert asked
    assert all("<user>" in text and text.rstrip().endswith("</user>") for text in asked)
    with pytest.raises(ValueError, match="has no chat template"):
        benchmark.run(build("longbench", chat_template=True), QUIET)
    with pytest.raises(ValueError, match="at most the model's 256 tokens, got 512"):
        benchmark.run(build("longbench", max_length=512), QUIET)


def test_code_of_a_tokenizer_is_never_run(build, changed_model, tmp_path):
    model = changed_model(auto_map={"AutoTokenizer": ["code.Slow", "code.Fast"]})
    (tmp_path / "model" / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="RULER's generators would run the code that comes with the tokenizer"):
        benchmark.run(build("ruler", model=model, tasks=("niah_single_1",)), QUIET)


def test_without_the_harness_it_says_how_to_install_it(build, monkeypatch):
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"evals\[lm-eval\]"):
        benchmark.run(build("ruler"), QUIET)


OURS = "include: longbench_trec\ntask: mine\ndataset_path: json\n"


def folder_with(path, **files):
    for name, text in files.items():
        (path / f"{name}.yaml").write_text(text)
    return {"include_path": (path,), "limit": 2}


def test_a_local_file_includes_a_shipped_task(tmp_path):
    (tmp_path / "mine.json").write_text((FOLDER / "long.jsonl").read_text())
    data = "dataset_path: json\ndataset_kwargs: {data_files: [mine.json, mine.json]}\ntest_split: train\n"
    given = folder_with(
        tmp_path, a=f"include: longbench_triviaqa\ntask: mine\n{data}", b="include: nobody\ntask: other"
    )
    (found,) = load_tasks(LongbenchCommand(tasks=("mine",), **given))
    assert found.name == "mine"
    assert found.task.config.doc_to_text.startswith("Answer the question based on the given passage.")
    assert len(found.task.instances) == 2
    assert len(found.task.eval_docs) == 2 * (FOLDER / "long.jsonl").read_text().count("\n")
    # Without its own name it replaces the shipped task, also in groups.
    (tmp_path / "a.yaml").write_text(f"include: longbench_triviaqa\n{data}")
    (found,) = load_tasks(LongbenchCommand(tasks=("longbench_triviaqa",), **given))
    assert found.task.config.dataset_path == "json"
    assert found.task.config.dataset_name is None  # not that of the shipped data


LINE = {"input": "Who?", "context": "Ann came.", "answers": ["Ann"], "length": 2, "dataset": "trec", "language": "en"}
LINE |= {"all_classes": ["Ann", "Bob"], "_id": "0a"}


def own_files(folder, *lines):
    """The settings of a run on LongBench's own file of one task."""
    (folder / "trec.jsonl").write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return LongbenchCommand(tasks=("longbench_trec",), include_path=(folder,))


def test_longbenchs_own_files_are_its_tasks(tmp_path):
    (found,) = load_tasks(own_files(tmp_path, LINE, "\n", {**LINE, "input": "And who\u2028else?"}))
    prompts = [x.args[0] for x in found.task.instances]
    assert [prompt.split("Ann came.")[1] for prompt in prompts] == ["\nWho?", "\nAnd who\u2028else?"]
    assert found.task.process_results(found.task.instances[0].doc, ["Ann"])["score"] == 1
    given = folder_with(
        tmp_path, a="include: longbench_trec\ndataset_path: json\ndataset_kwargs: {data_files: {test: x.jsonl}}"
    )
    (tmp_path / "x.jsonl").write_text(json.dumps({**LINE, "input": "Mine?"}))
    (found,) = load_tasks(LongbenchCommand(tasks=("longbench_trec",), **given))
    assert found.task.instances[0].args[0].endswith("Mine?")  # YAML goes before a file of the name


def named_files(folder, files, *lines):
    """The settings of a run on a file x that a YAML names, by itself or behind a good one."""
    (folder / "good.jsonl").write_text(json.dumps(LINE))
    ending, table = re.search(r"x\.(\w+)", files)[1], pandas.DataFrame(lines)
    tables = {"parquet": table.to_parquet, "csv": table.to_csv}
    tables.get(ending, lambda path: table.to_json(path, orient="records", lines=True))(folder / f"x.{ending}")
    data = f"dataset_path: {ending if ending in tables else 'json'}\ndataset_kwargs: {{data_files: {files}}}"
    split = "test" if "test" in files else "train"
    (folder / "a.yaml").write_text(f"include: longbench_trec\ntask: mine\n{data}\ntest_split: {split}")
    return LongbenchCommand(tasks=("mine",), include_path=(folder,))


TEXTS = "expected a list of one or more texts in `answers`, got "
NO_ANSWERS = ({"answers": []}, TEXTS + r"\[\]"), ({"answers": "Ann"}, TEXTS + '"Ann"')
NAMED = "{test: x.json}", "{test: [good.jsonl, x.jsonl]}", "x.jsonl", "[good.jsonl, x.json]"


@pytest.mark.parametrize(
    ("wrong", "words", "files"),
    [
        ({"answers": None}, "expected the fields answers, context, question, answers is missing", None),
        ({"context": " \n"}, "expected a text in `context`, got none", None),
        ({"answers": [""]}, TEXTS, None),
        ({"length": "two"}, "`length` is a str, in the lines before a number", None),
        ('{"input": \n', "Expecting value", None),
        ('["Ann"]\n', "expected a JSON object, got list", None),
        *((*given, files) for given in NO_ANSWERS for files in (None, *NAMED)),
        ({"answers": []}, f"row 2: {TEXTS}", "{test: x.parquet}"),
        ({"answers": "Ann"}, f"row 1: {TEXTS}", "x.csv"),
    ],
)
def test_a_line_that_is_no_use_is_named_with_its_number(tmp_path, wrong, words, files, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    good = LINE | {"question": "Who?"}
    lines = good, wrong if isinstance(wrong, str) else good | wrong
    command = named_files(tmp_path, files, *lines) if files else own_files(tmp_path, *lines)
    place = "" if words.startswith("row") else r"line 2 of .*(trec\.jsonl|x\.jsonl?): "
    with pytest.raises(ValueError, match=f"{place}{words}") as raised:
        load_tasks(command)
    assert "\n" not in str(raised.value)


def test_data_that_cannot_be_scored_is_named_before_the_model_runs(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"trec\.jsonl has no lines: expected a JSON object with answers, context"):
        load_tasks(own_files(tmp_path, "\n"))
    with pytest.raises(ValueError, match=r"longbench_trec cannot use its data \(TypeError: .*\); check its fields"):
        load_tasks(own_files(tmp_path, LINE | {"all_classes": None}))
    with pytest.raises(ValueError, match=r"data set Xnhyacinth/LongBench trec .* --include-path"):
        load_tasks(LongbenchCommand(tasks=("longbench_trec",)))
    broken = f"{OURS}dataset_kwargs: {{data_files: {{test: no.jsonl}}}}"
    with pytest.raises(ValueError, match="cannot load the data of mine, data set json"):
        load_tasks(LongbenchCommand(tasks=("mine",), **folder_with(tmp_path, a=broken)))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(ValueError, match=r"cannot load the data of mine, data set csv .*'question' is undefined"):
        load_tasks(named_files(tmp_path, "x.csv", LINE))


@pytest.fixture
def few_shipped(tmp_path, monkeypatch):
    """A harness that ships two folders of tasks, because reading all of them takes many seconds."""
    for folder in ("arc", "longbench"):
        shutil.copytree(load._SHIPPED / folder, tmp_path / "shipped" / folder)
    monkeypatch.setattr(load, "_SHIPPED", tmp_path / "shipped")


@pytest.mark.parametrize(
    "text",
    [
        *("", "- a", "task: [", "task: {a: 1}", "include: 3\ntask: mine"),
        *(OURS + more for more in ("doc_to_text: '{{'", "doc_to_text: 3", "dataset_kwargs: 3")),
        *(f"{OURS}dataset_kwargs: {{data_files: {x}}}" for x in ("3", "{test: a.yaml}")),
    ],
)
def test_yaml_that_is_no_task_is_one_sentence(few_shipped, tmp_path, text):
    (tmp_path / "own").mkdir()
    with pytest.raises(ValueError, match=r"a\.yaml|mine|cannot read the tasks") as raised:
        load_tasks(LongbenchCommand(tasks=("mine",), **folder_with(tmp_path / "own", a=text)))
    assert "\n" not in str(raised.value)


def test_unknown_names_are_named(few_shipped, tmp_path):
    with pytest.raises(ValueError, match="unknown to lm-evaluation-harness and --include-path: --tasks nobody"):
        load_tasks(LongbenchCommand(tasks=("nobody", "longbench")))
    given = folder_with(tmp_path, a="include: nobody\ntask: mine\ndataset_path: json")
    with pytest.raises(ValueError, match=r"`include: nobody` in .*a\.yaml"):
        load_tasks(LongbenchCommand(tasks=("mine",), **given))


def test_third_party_code_leaves_stdout_and_random_numbers_alone(capsys):
    with as_guest(3):
        print("guest")
        drawn = random.random(), np.random.random()
    with as_guest(3):
        assert (random.random(), np.random.random()) == drawn
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "guest\n")
