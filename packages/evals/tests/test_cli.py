"""Whole commands: their last line, one sentence and exit code 2 for unusable input, and those of the paper's tables."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from evals import cli
from hashtrain import command_line


@pytest.fixture
def typed(made, tmp_path):
    """Returns the arguments of a small run; keyword arguments replace or add flags."""

    def build(task="ppl", **flags):
        given = {"model": made.model, "hashers": made.hashers, "text": made.text, "methods": "lsh", "budgets": "0.1"}
        given |= {"documents": "2", "context": "128", "dense-layers": "1", "out": tmp_path / "run", **flags}
        return [task, *(word for name, value in given.items() for word in (f"--{name}", *str(value).split(" ")))]

    return build


def refused(arguments, capsys):
    """Run an invalid command; return its error message."""
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    (line,) = output.err.strip().splitlines()
    assert output.out == ""
    assert line.startswith("evals: ")
    return line


def test_a_command_ends_with_json_and_leaves_files_without_places_of_this_machine(typed, made, tmp_path, capsys):
    assert cli.main(["list"]) == 0
    assert "paper-reconstruction" in json.loads(capsys.readouterr().out.strip().splitlines()[-1])["methods"]
    assert cli.main(typed()) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["task"] == "ppl"
    assert [found["method"] for found in last["results"]] == ["dense", "lsh"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "environment.json", "samples", "rows.json", "report.md", "figure.png"}
    written = "".join(p.read_text() for p in (tmp_path / "run").rglob("*") if p.suffix in (".json", ".md"))
    assert not any(str(folder) in written for folder in (tmp_path, made.root))


def test_missing_hashers_are_named_together_with_what_is_there(typed, made, tmp_path, capsys):
    shutil.copytree(made.hashers / "lsh", tmp_path / "some" / "lsh")
    said = refused(typed(hashers=tmp_path / "some", methods="lsh paper transform+remainder"), capsys)
    assert "no hasher paper, transform in" in said
    assert "--only paper transform --out" in said
    assert "or measure only what it holds: --methods lsh" in said
    said = refused(typed(hashers=tmp_path / "some" / "lsh"), capsys)
    assert said.endswith(f"is one hasher; give the folder that holds it: --hashers {tmp_path / 'some'}")


@pytest.mark.parametrize(
    ("task", "flags", "sentence"),
    [
        ("ppl", {"budgets": "0.1 0.1"}, "without repeats"),
        ("iou", {"methods": "transfrom"}, "--methods takes no transfrom; did you mean transform or"),
        ("ppl", {"methods": "dense"}, "beside dense"),
        ("iou", {"context": "4096"}, "at most the model's 256 tokens"),
        ("ppl", {"dense-layers": "3"}, "one of 3 layers sparse"),
        ("iou", {"hashers": "nowhere"}, "in nowhere; train with `uv run hashtrain --only lsh"),
    ],
)
def test_settings_that_cannot_be_used(typed, tmp_path, capsys, task, flags, sentence):
    assert sentence in refused(typed(task, **flags), capsys)
    assert not (tmp_path / "run").exists()


FOLDER = Path(__file__).parents[1] / "paper"


def test_every_command_is_one_of_ours(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import run

    del sys.modules["run"]  # another may have that name
    given = run.parser().parse_args(["--out", str(tmp_path), "--dtype", "bfloat16"])
    ours = [words for item in run.items() if (words := run.words_of(item, given))]
    assert len(ours) > 20
    for words in ours:
        command = command_line.parse("evals", words, cli.COMMANDS)
        assert type(command) is cli.TASKS[words[0]][0]
        assert command.out.parent == tmp_path
    assert len({command[command.index("--out") + 1] for command in ours}) == len(ours)
