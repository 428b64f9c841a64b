"""A file at --out, where a folder is expected, is rejected with one sentence before anything is read."""

import pytest
from evals import cli

NEEDED = {"report": ["run"]}


@pytest.mark.parametrize("name", [name for name, kind in cli.COMMANDS.items() if hasattr(kind, "out")])
def test_a_file_in_place_of_the_folder_is_one_sentence(name, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert cli.main([name, *NEEDED.get(name, []), "--out", str(tmp_path / "file")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("evals: --out must be a folder or a new name, got ")
    assert said.count("\n") == 1
