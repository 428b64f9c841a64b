"""What docs/tutorial.md says of generating, run as it stands there: on request, for it needs trained hashers."""

import ast
import io
import json
import os
import pathlib
import runpy
import shlex
import subprocess

import pytest
from sparse_decode.cli import main

ROOT = pathlib.Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    "README_HASHERS" not in os.environ, reason="README_HASHERS names a folder that `uv run hashtrain` wrote"
)


@pytest.fixture(scope="module")
def blocks(load, tmp_path_factory):
    """The blocks of the section, by language, which read hashers of this machine and write to a folder of this test."""
    text = (ROOT / "docs" / "tutorial.md").read_text().partition("## 3. Generate")[2]
    assert "runs/demo/transform" in text
    text = text.replace("runs/demo", os.environ["README_HASHERS"])
    text = text.replace("runs/prompt.txt", str(tmp_path_factory.mktemp("tutorial") / "prompt.txt"))
    found = {block.language: block.code for block in load("tools", "check_readme").blocks(text)}
    subprocess.run(["bash", "-c", found["bash"].splitlines()[0]], cwd=ROOT, check=True)  # head: makes the prompt
    return found | {"prompt": text.partition("`echo ")[2].partition(" |")[0]}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_command_generates_and_compares(blocks, capsys):
    program, *words = shlex.split(blocks["bash"].splitlines()[1].removeprefix("uv run "))
    assert program == "sparse-decode"
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["sparse"]["new_tokens"] > 10
    assert 0.019 < found["sparse"]["density"] < 0.03  # the first and last tokens come on top of the 2 %
    assert found["dense"]["tokens_per_second"] > 0


def test_the_server_goes_on_with_the_files_it_is_named(blocks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{blocks['prompt']}\n" * 2))
    (tmp_path / "serve.py").write_text(blocks["python"])
    runpy.run_path(str(tmp_path / "serve.py"), run_name="__main__")
    texts = capsys.readouterr().out.split("\nshare of the visible tokens read, by layer: ")
    assert len(texts) == 3
    shares = [ast.literal_eval(text.splitlines()[0]) for text in texts[1:]]
    assert shares[0] == shares[1]  # the second request knows nothing of the first
    assert 0.019 < sum(shares[0].values()) / len(shares[0]) < 0.03  # layers have shares of their own
    assert len(texts[0]) > 40
