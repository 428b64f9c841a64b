"""The command from end to end on a tiny model, and its complaints."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from hashtrain import Hasher
from hashtrain.cli import main
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer, LlamaForCausalLM

SMALL = [
    "--context",
    "512",
    "--contexts",
    "2",
    "--held-out",
    "1",
    "--held-out-rows",
    "4",
    "--steps",
    "2",
    "--dense-layers",
    "1",
    "--workers",
    "1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config):
    """A model folder and a text file."""
    root = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(vocab_size=4096)).save_pretrained(root / "model")
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(root / "model")
    (root / "text.txt").write_text("\n".join(f"def name_{i}(x): return x * {i}" for i in range(2000)))
    return root


def command(folder, out, *more):
    return ["--model", str(folder / "model"), "--text", str(folder / "text.txt"), "--out", str(out), *SMALL, *more]


def test_a_run_stores_hashers_that_load_and_ends_with_json(folder, tiny_config, tmp_path, capsys):
    assert main(command(folder, tmp_path / "run")) == 0
    captured = capsys.readouterr()
    last = json.loads(captured.out.strip().splitlines()[-1])
    assert set(last["mean"]) == {"lsh", "paper", "paper-rotation", "planes"}
    assert "uv run evals ppl" in captured.out + captured.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    for name in last["mean"]:
        Hasher.from_pretrained(tmp_path / "run" / name).require_match(tiny_config())
        assert 0 < metrics["hashers"][name]["kv_head"]["mean"]["iou"] <= 1
    for figure in ("training.png", "heads.png", "bits.png"):
        assert (tmp_path / "run" / figure).read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "run").glob(".work*"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {(line["hasher"], line["layer"]) for line in lines} == {(name, n) for name in last["mean"] for n in (0, 1)}


def test_hashers_and_figures_do_not_depend_on_the_number_of_workers(folder, tmp_path):
    found = []
    for workers in ("1", "3"):
        out = tmp_path / workers
        assert main(command(folder, out, "--only", "lsh", "planes", "--workers", workers)) == 0
        metrics = json.loads((out / "metrics.json").read_text())
        del metrics["seconds"]
        found.append((metrics, Hasher.from_pretrained(out / "planes").state_dict()))
    (one, mine), (other, theirs) = found
    assert one == other
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "./none"], "model folder not found"),
        (["--text", "none.txt"], "text file not found"),
        (["--fraction", "0"], "above 0 and at most 1"),
        (["--fraction", "1.5"], "above 0 and at most 1"),
        (["--context", "100000"], "at most the model's 1024 tokens"),
        (["--only", "magic"], "--only takes"),
        (["--steps", "0"], "at least 1"),
        (["--bits", "100"], "multiple of 32"),
        (["--planes", "9"], "between 1 and 8"),
        (["--only"], "--only needs one"),
        (["--dense-layers", "-1"], "0 or more"),
        (["--workers", "-1"], "0 or more"),
        (["--dense-layers", "2"], "must leave one of 2 layers"),
        (["--model", "models/none"], "there is no folder of that name"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(folder, tmp_path, capsys, change, message):
    assert main(command(folder, tmp_path / "run", *change)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "held", "message"),
    [
        ("text.txt", "text.txt", "text.txt holds most of the held-out text text.txt"),
        ("short.txt", "text.txt", "expected at least 512 tokens in one document, got at most"),
        ("empty.txt", "text.txt", "no text found"),
        ("binary.txt", "text.txt", "is binary"),
    ],
)
def test_corpora_that_cannot_be_used_are_one_sentence(folder, tmp_path, capsys, text, held, message):
    (tmp_path / "short.txt").write_text("one short line")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\0\1")
    (tmp_path / "text.txt").write_text((folder / "text.txt").read_text())
    texts = ["--text", str(tmp_path / text), "--held-out-text", str(tmp_path / held)]
    assert main(command(folder, tmp_path / "run", *texts)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_sentence_and_nothing_is_written(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert main(command(folder, tmp_path / "run")) == 2
    assert "not enough free disk" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_truncated_model_weights_are_one_sentence(folder, tmp_path, capsys):
    broken = tmp_path / "model"
    broken.mkdir()
    for file in (folder / "model").iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    assert main(command(folder, tmp_path / "run", "--model", str(broken))) == 2
    assert "truncated or damaged" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_inspect_prints_the_config(folder, tmp_path, capsys):
    assert main(command(folder, tmp_path / "run", "--only", "lsh")) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "run" / "lsh")]) == 0
    assert json.loads(capsys.readouterr().out)["variant"] == "lsh"
    assert main(["inspect", str(tmp_path)]) == 2
