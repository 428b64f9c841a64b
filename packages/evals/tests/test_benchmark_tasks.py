"""Tasks of lm-evaluation-harness and their data: local files, shipped ones, groups, and errors."""

import json
import os
import random
import shutil
from pathlib import Path

import evals
import numpy as np
import pytest
from evals.tasks.benchmark_settings import LongbenchCommand

FOLDER = Path(evals.__file__).parent / "harness" / "example"
if os.environ.get("CI") != "true":
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: `uv sync --group lm-eval`")


@pytest.fixture(scope="module", autouse=True)
def harness():
    """Import the harness when tests need it: every process that collects these tests would take seconds for it."""
    global load, as_guest, load_tasks
    from evals.harness import load
    from evals.harness.load import as_guest, load_tasks


def folder_with(path, **files):
    for name, text in files.items():
        (path / f"{name}.yaml").write_text(text)
    return {"include_path": (path,), "limit": 2}


def test_a_local_file_includes_a_shipped_task(tmp_path):
    (tmp_path / "mine.jsonl").write_text((FOLDER / "long.jsonl").read_text())
    data = "dataset_path: json\ndataset_kwargs: {data_files: {test: mine.jsonl}}\n"
    given = folder_with(
        tmp_path, a=f"include: longbench_triviaqa\ntask: mine\n{data}", b="include: nobody\ntask: other"
    )
    (found,) = load_tasks(LongbenchCommand(tasks=("mine",), **given))
    assert found.name == "mine"
    assert found.task.config.doc_to_text.startswith("Answer the question based on the given passage.")
    assert len(found.task.instances) == 2
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"answers": None},
            "line 2 of .*trec.jsonl: expected the fields answers, context, question, answers is missing",
        ),
        ({"context": None}, "line 2 of .*context is missing or null"),
        ({"context": " \n"}, "line 2 of .*expected a text in `context`, got none"),
        ({"answers": []}, r"line 2 of .*expected a list of one or more texts in `answers`, got \[\]"),
        ({"answers": [""]}, "line 2 of .*expected a list of one or more texts"),
        ({"answers": "Ann"}, 'line 2 of .*expected a list of one or more texts in `answers`, got "Ann"'),
        ({"length": "two"}, "line 2 of .*`length` is a str, in the lines before a number"),
        ('{"input": \n', "line 2 of .*trec.jsonl: Expecting value"),
        ('["Ann"]\n', "line 2 of .*expected a JSON object, got list"),
    ],
)
def test_a_line_that_is_no_use_is_named_with_its_number(tmp_path, wrong, words):
    with pytest.raises(ValueError, match=words) as raised:
        load_tasks(own_files(tmp_path, LINE, wrong if isinstance(wrong, str) else LINE | wrong))
    assert "\n" not in str(raised.value)


def test_data_that_cannot_be_scored_is_named_before_the_model_runs(tmp_path):
    with pytest.raises(ValueError, match=r"trec\.jsonl has no lines: expected a JSON object with answers, context"):
        load_tasks(own_files(tmp_path, "\n"))
    with pytest.raises(ValueError, match=r"longbench_trec cannot use its data \(TypeError: .*\); check its fields"):
        load_tasks(own_files(tmp_path, LINE | {"all_classes": None}))


@pytest.fixture
def few_shipped(tmp_path, monkeypatch):
    """A harness that ships two folders of tasks, because reading all of them takes many seconds."""
    for folder in ("arc", "longbench"):
        shutil.copytree(load._SHIPPED / folder, tmp_path / "shipped" / folder)
    monkeypatch.setattr(load, "_SHIPPED", tmp_path / "shipped")


def test_tasks_beyond_the_default_ones_are_found(few_shipped):
    (found,) = load_tasks(LongbenchCommand(tasks=("python_attributes",), include_path=(FOLDER,), limit=1))
    assert found.task.config.doc_to_choice == "{{choices}}"


OURS = "include: longbench_trec\ntask: mine\ndataset_path: json\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "task: [",
        "task: {a: 1}",
        "include: 3\ntask: mine",
        OURS + "doc_to_text: '{{'",
        OURS + "doc_to_text: 3",
    ]
    + [f"{OURS}dataset_kwargs: {x}" for x in ("3", "[1]", "{data_files: 3}", "{data_files: {test: a.yaml}}")],
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


def test_a_missing_data_set_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"data set Xnhyacinth/LongBench trec .* --include-path"):
        load_tasks(LongbenchCommand(tasks=("longbench_trec",)))
    broken = "include: longbench_trec\ntask: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: no.jsonl}}"
    with pytest.raises(ValueError, match="cannot load the data of mine, data set json"):
        load_tasks(LongbenchCommand(tasks=("mine",), **folder_with(tmp_path, a=broken)))


def test_third_party_code_leaves_stdout_and_random_numbers_alone(capsys):
    with as_guest(3):
        print("guest")
        drawn = random.random(), np.random.random()
    with as_guest(3):
        assert (random.random(), np.random.random()) == drawn
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "guest\n")
