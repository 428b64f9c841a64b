"""The command's errors, its output before and after a run, and its smaller subcommands."""

import json
import shutil

import pytest
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.cli import main, next_command
from hashtrain.run.prepare import _check_model
from hashtrain.run.settings import TrainCommand
from hashtrain_runs import command
from transformers import Gemma2Config, MistralConfig


@pytest.fixture
def refused(folder, tmp_path, capsys):
    """Run a command that is refused before anything is written; return the last line of its error."""

    def run(*more):
        assert main(command(folder, tmp_path / "run", *more)) == 2
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "./none"], "model folder not found"),
        (["--text", "none.txt"], "text file not found"),
        (["--fraction", "0"], "above 0 and at most 1"),
        (["--fraction", "1.5"], "above 0 and at most 1"),
        (["--context", "100000"], "at most the model's 1024 tokens"),
        (["--only", "magic"], "--only takes no magic; expected one of default, all, lsh"),
        (["--only", "transfrom"], "--only takes no transfrom; did you mean transform"),
        (["--steps", "0"], "at least 1"),
        (["--stream"], "--stream left in hashtrain 2.0: captures are made in waves"),
        (["--alpha=1"], "--alpha left in hashtrain 2.0: every ablation is a hasher with a name"),
        (["--disk", "0.000001"], "not enough free disk for captures"),
        (["--bits", "100"], "multiple of 32"),
        (["--planes", "9"], "between 1 and 8"),
        (["--digits", "9"], "--digits must be between 1 and 8, got 9"),
        (["--only"], "--only needs one"),
        (["--dense-layers", "-1"], "at least 0"),
        (["--workers", "-1"], "at least 0"),
        (["--dense-layers", "2"], "must leave one of 2 layers"),
        (["--model", "models/none"], "there is no folder of that name, and none on the Hub"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(refused, change, message):
    assert message in refused(*change)


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
    shutil.copy(folder / "model" / "config.json", out / "lsh" / "config.json")
    assert main(command(folder, out, "--only", "lsh")) == 2
    assert "lsh is a model, which would be replaced" in capsys.readouterr().err


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(folder, tmp_path, capsys):
    assert main(command(folder, tmp_path / "run", "--only", "lsh", "planes", "--dry-run")) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["dry_run"]
    whole = 3 * 512 * 2 * (4 + 2 + 2) * 32 * 2  # contexts, tokens, layers, heads, head_dim, bytes
    assert found == {"hashers": ["lsh", "planes"], "disk": whole, "waves": 1}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"only": ("all",)}, ""),
        ({"only": ("default", "planes")}, ""),
        ({"only": ("linear", "planes")}, "--methods planes linear"),
        ({"only": ("lsh", "transform-start")}, "--methods lsh transform-start"),
        ({"context": 8192, "dense_layers": 1}, "--context 8192 --dense-layers 1"),
    ],
)
def test_the_next_command_has_options_that_evals_accepts(changes, words):
    assert (
        next_command(TrainCommand(**changes)) == f"uv run evals ppl --documents 4 --hashers runs/demo {words}".strip()
    )


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
