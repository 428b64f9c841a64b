"""The paper's tables and figures: their commands are ours, and what is stored of them is there and of their task."""

import sys
from pathlib import Path

import pytest
from evals import cli
from hashtrain import command_line

FOLDER = Path(__file__).parents[1] / "paper"


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
