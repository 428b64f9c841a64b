"""The command's help, and where errors about flags point."""

import pytest
from hashtrain.cli import COMMANDS, main


def left(arguments, capsys):
    """Return the exit code and the message, without its frame and line breaks."""
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    captured = capsys.readouterr()
    return leaving.value.code, " ".join((captured.out + captured.err).replace("│", " ").split())


def test_the_help_says_that_it_trains_and_where_the_flags_are(capsys):
    code, said = left(["--help"], capsys)
    assert code == 0
    assert "Without a subcommand it trains" in said
    assert "`hashtrain train --help` lists the flags" in said
    assert "required" not in said
    assert all(f"• {name} " in said for name in COMMANDS)
    assert "--model" in left(["train", "--help"], capsys)[1]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_wrong_flag_points_to_the_help_that_lists_the_right_ones(name, capsys):
    code, said = left([*name.split(), "--modle", "x"], capsys)
    assert code == 2
    assert f"hashtrain {name or 'train'} --help" in said
    assert "hashtrain --help" not in said
