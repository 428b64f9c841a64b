"""The paper's tables and figures: their commands are ours, and what is stored of them is there and of their task."""

import json
import sys
from pathlib import Path

import pytest
from evals import cli
from hashtrain import command_line

FOLDER = Path(__file__).parents[1] / "paper"
RESULTS = Path(__file__).parents[3] / "docs" / "results"


@pytest.fixture(scope="module")
def paper():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import run

        yield run
    del sys.modules["run"]


@pytest.fixture(scope="module")
def items(paper):
    return paper.items()


def test_every_command_is_one_of_ours(paper, items, tmp_path):
    given = paper.parser().parse_args(["--out", str(tmp_path), "--dtype", "bfloat16"])
    ours = [words for item in items if (words := paper.words_of(item, given))]
    assert len(ours) > 20
    for words in ours:
        command = command_line.parse("evals", words, cli.COMMANDS)
        assert type(command) is cli.TASKS[words[0]][0]
        assert command.out.parent == tmp_path
    assert len({command[command.index("--out") + 1] for command in ours}) == len(ours)


def test_all_tables_and_figures_are_there_each_with_what_differs(items):
    names = {item["name"].partition(" (")[0] for item in items}
    assert {f"{kind} {n}" for kind in ("table", "figure") for n in range(1, 12)} | {"code length"} == names
    assert all(item["differs"] for item in items)


def test_what_is_stored_is_of_the_items_task_and_has_its_methods(paper, items):
    if not RESULTS.is_dir():
        pytest.skip("the stored results are in a checkout only")
    for item in items:
        assert paper.stored(item) == item.get("stored", []), item["name"]
        words = paper.words_of(item, paper.parser().parse_args([]))
        found = {}
        for name in item.get("stored", []) if words else []:
            file, _, key = name.partition("/")
            config = json.loads((RESULTS / f"{file}.json").read_text())[key]["config"]
            assert config["task"] == words[0], item["name"]
            found.setdefault(config["model"], set()).update(config.get("methods", ()))
        asked = command_line.parse("evals", words, cli.COMMANDS).methods if words and "--methods" in words else ()
        if found and words[0] != "throughput":
            assert any(set(asked) <= methods for methods in found.values()), item["name"]


def test_an_unknown_table_is_one_sentence(paper, capsys):
    assert paper.main(["table 12"]) == 2
    assert "has no table 12" in capsys.readouterr().err
