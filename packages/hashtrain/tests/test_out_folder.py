"""A file at --out, where a folder is expected, is rejected with one sentence before anything is read."""

import pytest
from hashtrain.cli import main
from hashtrain.usage import require_folder


@pytest.mark.parametrize("words", [["train"], ["convert", "list.pth", "--model", "demo"]])
@pytest.mark.parametrize("below", ["", "/run/first"])
def test_a_file_in_place_of_the_folder_is_one_sentence(words, below, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert main([*words, "--out", f"{tmp_path}/file{below}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hashtrain: --out must be a folder or a new name, got ")
    assert said.endswith(f"where {tmp_path}/file is a file; choose another\n")
    assert (tmp_path / "file").read_text() == "kept"


def test_folders_and_new_names_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, tmp_path / "new" / "run"):
        require_folder(path)
        require_folder(path.relative_to(tmp_path))
