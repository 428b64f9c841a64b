"""What README.md and docs/tutorial.md show runs as it stands there, once hashers are trained; nothing of ours is
installed by a name that others own."""

import ast
import dataclasses
import io
import json
import math
import os
import pathlib
import re
import runpy
import shlex
import subprocess

import pytest
from hashtrain import HasherConfig
from hashtrain.demo import demo_model_path
from safetensors import safe_open
from sparse_decode import Budget
from sparse_decode.cli import main

ROOT = pathlib.Path(__file__).resolve().parent.parent
needs_hashers = pytest.mark.skipif(
    "README_HASHERS" not in os.environ, reason="README_HASHERS names a folder that `uv run hashtrain` wrote"
)


def blocks(text):
    """The last fenced block of each language, which reads the hashers of this machine."""
    assert "runs/demo/transform" in text
    text = text.replace("runs/demo", os.environ["README_HASHERS"])
    return {language: code for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)}


def test_every_number_in_the_readme_is_stored_or_set_in_the_code():
    """Tables come from stored runs (`update_readme.py --check`); a number in a sentence has its source here."""
    text = (ROOT / "README.md").read_text()
    sentences = re.sub(r"<!-- results:.*?<!-- end -->|^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.S | re.M)
    numbers = set(re.findall(r"\d(?:[\d.,]*\d)?", sentences))
    bits = {field.name: field.default for field in dataclasses.fields(HasherConfig)}["bits"]
    with safe_open(next(demo_model_path().glob("*.safetensors")), "pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    qwen = json.loads((ROOT / "docs" / "results" / "qwen.json").read_text())
    head, longest = 64, qwen["english-32k"]["config"]["context"]
    assert longest == 4 * qwen["training"]["context"]
    assert numbers == {
        f"{bits}",
        f"{100 * Budget().fraction:g}",
        f"{parameters / 1e6:.1f}",
        f"{head}",
        f"{100 * bits / 8 / (2 * head * 2):.0f}",  # of keys and values of two bytes each
        f"{longest:,}",
        "3.11",  # of Python, as CI installs it
        "3.13",
        "2508.19740",  # of arXiv
        "2.0",  # of the licence
    }


@needs_hashers
def test_the_example_of_the_readme_generates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "example.py").write_text(blocks((ROOT / "README.md").read_text())["python"])
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    densities = ast.literal_eval(capsys.readouterr().out.strip().rsplit("\n", 1)[1])
    # Layers have shares of their own; together they read what was asked, rounded down to whole tokens.
    assert 0.019 < sum(densities.values()) / len(densities) <= 0.02


@needs_hashers
def test_the_tutorial_generates_compares_and_serves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "tutorial.md").read_text().partition("## 3. Generate")[2]
    text = text.replace("runs/prompt.txt", str(tmp_path / "prompt.txt"))
    found = blocks(text)
    makes_the_prompt, line = found["bash"].splitlines()[:2]
    subprocess.run(["bash", "-c", makes_the_prompt], cwd=ROOT, check=True)
    program, *words = shlex.split(line.removeprefix("uv run "))
    assert program == "sparse-decode"
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["sparse"]["new_tokens"] > 10
    assert 0.019 < said["sparse"]["density"] < 0.03  # the first and last tokens come on top of the 2 %
    assert said["dense"]["tokens_per_second"] > 0
    prompt = text.partition("`echo ")[2].partition(" |")[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n" * 2))
    (tmp_path / "serve.py").write_text(found["python"])
    runpy.run_path(str(tmp_path / "serve.py"), run_name="__main__")
    texts = capsys.readouterr().out.split("\nshare of the visible tokens read, by layer: ")
    shares = [ast.literal_eval(text.splitlines()[0]) for text in texts[1:]]
    assert len(shares) == 2
    assert shares[0] == shares[1]  # the second request knows nothing of the first
    assert 0.019 < sum(shares[0].values()) / len(shares[0]) < 0.03
    assert len(texts[0]) > 40
