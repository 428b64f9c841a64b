"""The command: its errors, what it leaves alone, and whole runs on a tiny model."""

import json
import shutil

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.cli import main, parse
from hashtrain.demo import base_model
from hashtrain.hasher import require_own
from hashtrain.models import load_config
from hashtrain.run.prepare import _check_model, prepare
from hashtrain.run.settings import TrainCommand
from hashtrain_runs import command
from transformers import Gemma2Config, MistralConfig


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "models/none"], "there is no folder of that name, and none on the Hub"),
        (["--fraction", "1.5"], "above 0 and at most 1"),
        (["--context", "100000"], "at most the model's 1024 tokens"),
        (["--only", "transfrom"], "--only takes no transfrom; did you mean transform"),
        (["--only"], "--only needs one"),
        (["--disk", "0.000001"], "not enough disk for captures"),
        (["--bits", "100"], "multiple of 32"),
        (["--dense-layers", "2"], "must leave one of 2 layers"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(folder, tmp_path, capsys, change, message):
    assert main(command(folder, tmp_path / "run", *change)) == 2
    assert not (tmp_path / "run").exists()
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_hashers_of_another_model_are_not_replaced(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["--model", str(folder / "model")]) == 2
    assert "needs --out FOLDER: runs/demo is for the demo's hashers" in capsys.readouterr().err
    Hasher(HasherConfig("lsh", ModelShape(2, 4, 2, 32), base_model="other")).save_pretrained(out / "lsh")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(command(folder, out, "--only", "lsh")) == 2
    assert "is a hasher of another model (other), which would be replaced" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / "lsh" / "config.json").write_text("{}")  # a damaged one may be replaced
    assert main(command(folder, out, "--only", "lsh")) == 0
    assert main(command(folder, out, "--only", "lsh")) == 0  # and the same model's
    require_own(out / "lsh", "model", own := ModelShape.of(load_config(folder / "model")), "a" * 12)
    Hasher(HasherConfig("lsh", own, base_model="model", adapter="b" * 12)).save_pretrained(out / "lsh")
    with pytest.raises(ValueError, match=r"a hasher of another adapter \(model\)"):
        require_own(out / "lsh", "model", own, "a" * 12)
    shutil.copy(folder / "model" / "config.json", out / "lsh" / "config.json")
    assert main(command(folder, out, "--only", "lsh")) == 2
    assert "lsh is a model, which would be replaced" in capsys.readouterr().err


def test_a_model_whose_config_holds_infinity_is_read_and_named_wherever_it_is_called_from(
    folder, tmp_path, monkeypatch
):
    shutil.copytree(folder / "model", tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    config.write_text(config.read_text().replace("{", '{"time_step_limit": [0.0, Infinity],', 1))
    monkeypatch.chdir(config.parent)
    assert (load_config(".").time_step_limit[1], base_model(".")) == (float("inf"), "own")


def test_other_models_have_the_papers_schedule_and_tuned_rates():
    given = parse(["--model", "other", "--out", "made"])
    assert (given.context, given.steps, given.learning_rate) == (8192, 8192, None)


def test_unsupported_models_are_refused_before_training():
    heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    for config, words in (
        (MistralConfig(**heads, sliding_window=128), "whose tokens see 128 others"),
        (Gemma2Config(**heads, head_dim=16), "full attention in every layer"),
    ):
        with pytest.raises(ValueError, match=words):
            _check_model(TrainCommand(context=512, dense_layers=1), config, ModelShape.of(config))
    full = MistralConfig(**heads, sliding_window=None)
    _check_model(TrainCommand(context=512, dense_layers=1), full, ModelShape.of(full))


def test_each_corpus_gives_whole_contexts_and_torn_ones(folder, tmp_path):
    texts = folder / "text.txt", tmp_path / "other.txt"
    texts[1].write_text(texts[0].read_text().replace("name", "other"))
    command = TrainCommand(model=str(folder / "model"), text=texts, context=512, contexts=4, held_out=1, out=tmp_path)
    train = prepare(command).train
    assert [bool((train.places(number).diff() > 1).any()) for number in range(4)] == [False, True, True, False]
    assert train.places(3)[0] > 0  # the second whole one is at another place


def test_a_run_stores_hashers_that_load_and_tell_how_they_were_trained(folder, tiny_config, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(command(folder, out, "--only", "default", "paper-exact", "paper-exact-untrained")) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(last["mean"]) == {"lsh", "paper", "transform", "paper-exact", "paper-exact-untrained"}
    for name in ("lsh", "paper", "transform"):
        hasher = Hasher.from_pretrained(out / name)
        hasher.require_match(tiny_config())
        assert hasher.config.layer_shares == (() if name == "lsh" else (1.0, 1.0))  # layer 0 stays dense, one is left
        assert [len(own) for own in hasher.config.head_shares] == ([] if name == "lsh" else [2, 2])
        assert 0 < metrics["hashers"][name]["kv_head"]["mean"]["iou"] <= 1
    assert not list(out.glob(".work*"))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {(line["hasher"], line["layer"]) for line in lines} == {(name, n) for name in last["mean"] for n in (0, 1)}
    config = Hasher.from_pretrained(out / "paper-exact").config
    told = {"alpha": 3, "beta": 1, "max_top": 8, "max_rest": 512, "of": "length", "sink": 0, "min_position": 0}
    assert config.training.items() >= {**told, "recent": 0, "loss": "ranking", "steps": 2, "contexts": 2}.items()
    assert (config.init, config.hidden, config.residual) == ("gaussian", 128, False)
    assert Hasher.from_pretrained(out / "paper-exact-untrained").config.training == {}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the tests above run without one")
def test_a_run_on_cuda_stores_hashers_that_load(folder, tmp_path):
    assert main(command(folder, tmp_path / "run", "--device", "cuda")) == 0
    assert Hasher.from_pretrained(tmp_path / "run" / "transform").config.variant == "transform"
