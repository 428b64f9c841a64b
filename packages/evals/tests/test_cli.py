"""Whole commands: their last line, and one sentence and exit code 2 for unusable input."""

import json
import shutil

import pytest
from evals import cli
from evals.tasks import ppl


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


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


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


def test_list_names_the_methods(capsys):
    assert cli.main(["list"]) == 0
    assert "paper-reconstruction" in last_line(capsys)["methods"]


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


SETTINGS = {
    "the same budget twice": ({"budgets": "0.1 0.1"}, "without repeats"),
    "misspelt method": ({"methods": "transfrom"}, "--methods takes no transfrom; did you mean transform or"),
    "nothing but dense": ({"methods": "dense"}, "beside dense"),
    "context beyond the model": ({"context": "4096"}, "at most the model's 256 tokens"),
    "no sparse layer": ({"dense-layers": "3"}, "must leave one of 3 layers"),
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


@pytest.mark.parametrize("words", [["report", "runs/ppl"], ["fidelity", "--from", "runs/longbench"]])
def test_what_has_left_is_refused_by_name(words, capsys):
    assert f"evals no longer has {words[0] if words[0] in cli.REMOVED else words[1]}: " in refused(words, capsys)
