"""Whole commands: their last line, and one sentence and exit code 2 for unusable input."""

import importlib
import re
import shutil
from typing import get_type_hints

import pytest
from evals import cli
from evals.settings import Budgets, Methods, TaskCommand
from evals.tasks import ppl
from evals_output import last_line
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def typed(made, tmp_path):
    """Returns the arguments of a small run; keyword arguments replace or add flags."""

    def build(task="ppl", **flags):
        given = {
            "model": made.model,
            "hashers": made.hashers,
            "text": made.text,
            "methods": "lsh",
            "budgets": "0.1",
            "documents": "2",
            "context": "128",
            "dense-layers": "1",
            "out": tmp_path / "run",
            **flags,
        }
        return [task, *(word for name, value in given.items() for word in (f"--{name}", *str(value).split(" ")))]

    return build


def refused(arguments, capsys):
    """Run an invalid command; return its error message."""
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("evals: ")
    lines = output.err.strip().splitlines()
    assert len(lines) == 1, output.err
    return lines[0]


def test_ppl_ends_with_json_and_leaves_the_files(typed, made, tmp_path, capsys):
    assert cli.main(typed()) == 0
    last = last_line(capsys)
    assert last["task"] == "ppl"
    assert [found["method"] for found in last["results"]] == ["dense", "lsh", "lsh"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "config.json",
        "environment.json",
        "samples",
        "rows.json",
        "report.md",
        "figure.png",
    }
    written = "".join(p.read_text() for p in (tmp_path / "run").rglob("*") if p.suffix in (".json", ".md"))
    for folder in (tmp_path, made.root):
        assert str(folder) not in written


def test_iou_ends_with_json(typed, capsys):
    assert cli.main(typed("iou", rows="4", methods="lsh planes")) == 0
    assert {found["method"] for found in last_line(capsys)["results"]} == {"lsh", "planes"}


def test_method_and_budget_may_be_singular(typed, tmp_path, capsys):
    words = typed(rules="visible")
    alias = {"--methods": "--method", "--budgets": "--budget"}
    assert cli.main([alias.get(word, word) for word in words]) == 0
    assert cli.main(words) == 0
    assert last_line(capsys)["results"][-1]["budget"] == 0.1


def test_a_default_table_needs_what_a_plain_training_makes(typed, made, tmp_path, capsys):
    for name in ("lsh", "paper", "transform"):
        shutil.copytree(made.hashers / name, tmp_path / "plain" / name)
    words = typed(hashers=tmp_path / "plain", documents="1", rules="visible")
    at = words.index("--methods")
    assert cli.main([*words[:at], *words[at + 2 :]]) == 0
    found = {result["method"] for result in last_line(capsys)["results"]}
    hashes = {name + more for name in ("lsh", "paper", "transform") for more in ("", "+remainder")}
    assert found == {"dense", "oracle", "recent", *hashes}


@pytest.mark.parametrize("name", cli.TASKS)
def test_every_task_accepts_both_forms(name):
    kind, _ = cli.TASKS[name]
    hints = get_type_hints(kind, include_extras=True)
    assert hints.get("budgets", Budgets) == Budgets
    assert hints.get("methods", Methods) == Methods


def test_list_names_the_methods(capsys):
    assert cli.main(["list"]) == 0
    assert "paper-rotation" in last_line(capsys)["methods"]


def test_missing_hashers_are_named_together_with_what_is_there(typed, made, tmp_path, capsys):
    shutil.copytree(made.hashers / "lsh", tmp_path / "some" / "lsh")
    said = refused(typed(hashers=tmp_path / "some", methods="lsh paper transform+remainder"), capsys)
    assert "no hasher paper, transform in" in said
    assert "--only paper transform --out" in said
    assert "or measure only what it holds: --methods lsh" in said
    said = refused(typed(hashers=tmp_path / "some" / "lsh"), capsys)
    assert said.endswith(f"is one hasher; give the folder that holds it: --hashers {tmp_path / 'some'}")


def test_a_stopped_run_says_how_to_go_on(typed, capsys, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(ppl, "measure", stop)
    assert cli.main(typed()) == 130
    assert "rerun the command" in capsys.readouterr().err


OF_TEXT = [name for name, (kind, _) in cli.TASKS.items() if issubclass(kind, TaskCommand)]


@pytest.mark.parametrize("name", OF_TEXT)
def test_contexts_that_the_text_does_not_hold_are_said_to_be_fewer(name, typed, capsys, monkeypatch):
    module = importlib.import_module("evals.tasks." + cli.TASKS[name][1])
    whole = module.prepare

    def prepared(*arguments):
        found = whole(*arguments)
        assert len(found.documents) < 500
        raise KeyboardInterrupt  # what comes later takes long

    monkeypatch.setattr(module, "prepare", prepared)
    words = typed(name, documents="500", methods="quest" if name == "tune" else "recent")
    assert cli.main(words) == 130
    assert re.search(r"\d contexts of 128 tokens found; 500 were requested", capsys.readouterr().err)


SETTINGS = {
    "budget 0": ({"budgets": "0"}, "above 0 and at most 1"),
    "budget above 1": ({"budgets": "0.1 1.5"}, "above 0 and at most 1"),
    "the same budget twice": ({"budgets": "0.1 0.1"}, "without repeats"),
    "unknown method": ({"methods": "lsh magic"}, "--methods takes no magic; did you mean magicpig"),
    "misspelt method": ({"methods": "transfrom"}, "--methods takes no transfrom; did you mean transform or"),
    "nothing but dense": ({"methods": "dense"}, "beside dense"),
    "no document": ({"documents": "0"}, "at least 1"),
    "short context": ({"context": "3"}, "at least 32"),
    "context beyond the model": ({"context": "4096"}, "at most the model's 256 tokens"),
    "no sparse layer": ({"dense-layers": "3"}, "must leave one of 3 layers"),
    "missing model folder": ({"model": "./nowhere"}, "model folder not found"),
    "missing text": ({"text": "nowhere.txt"}, "text file not found"),
    "missing hashers": (
        {"hashers": "nowhere"},
        "in nowhere; train with `uv run hashtrain --only lsh",
    ),
}


@pytest.mark.parametrize("task", ["ppl", "iou"])
@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be_used(typed, tmp_path, capsys, case, task):
    flags, sentence = SETTINGS[case]
    assert sentence in refused(typed(task, **flags), capsys)
    assert not (tmp_path / "run").exists()


def test_an_unknown_flag_names_the_help_that_lists_them(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["ppl", "--nothing"])
    assert raised.value.code == 2
    assert "evals ppl --help" in capsys.readouterr().err


TEXTS = {
    "not UTF-8": (b"caf\xe9 " * 400, "not UTF-8"),
    "too short": (b"def f(): pass", "shorter than the context"),
    "empty": (b"", "no text found"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_cannot_be_used(typed, tmp_path, capsys, case):
    content, sentence = TEXTS[case]
    (tmp_path / "odd.txt").write_bytes(content)
    assert sentence in refused(typed(text=tmp_path / "odd.txt"), capsys)
    assert not (tmp_path / "run").exists()


def test_hashers_of_another_model(typed, made, tmp_path, capsys):
    shutil.copytree(made.model, tmp_path / "other")
    config = LlamaConfig.from_pretrained(made.model, num_key_value_heads=4)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    capsys.readouterr()  # transformers' progress bar
    assert "belongs to another model" in refused(typed(model=tmp_path / "other"), capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["model", "hashers/lsh"])
def test_truncated_weights(typed, made, tmp_path, capsys, what):
    copy = tmp_path / what.split("/")[0]
    shutil.copytree(getattr(made, copy.name), copy)
    (weights,) = (tmp_path / what).glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "truncated" in refused(typed(**{copy.name: copy}), capsys)
    assert not (tmp_path / "run").exists()


def test_a_corrupt_sample_is_one_sentence(typed, tmp_path, capsys):
    assert cli.main(typed()) == 0
    path = tmp_path / "run" / "samples" / "0000.json"
    path.write_text("{")
    capsys.readouterr()
    assert "0000.json is corrupt" in refused(typed(), capsys)
