"""A published list of hashers, converted by `hashtrain convert`, is measured by `evals ppl` without further steps."""

import json

import pytest
import torch
from evals import cli
from evals_output import last_line
from hashtrain import Hasher
from hashtrain.cli import main as hashtrain
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def published(path, layers, heads, dim, scale=1.0):
    """Write a list in the published form: four random bfloat16 tensors per layer."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(1, heads, dim, dim), (1, heads, 1, dim)] * 2 * layers
    torch.save([(scale * torch.randn(size, generator=draw)).bfloat16() for size in sizes], path)


def measured(path, model, text, out, capsys, *more):
    """Convert a list and run the command that `convert` prints. Returns: results by method, and the run's rows."""
    assert hashtrain(["convert", str(path), "--model", str(model), "--out", str(out / "made")]) == 0
    told = capsys.readouterr().err
    next_command = next(line for line in told.splitlines() if line.startswith("uv run evals"))
    given = [word for word in next_command.split()[3:] if word not in ("--documents", "4")]
    protocol = ["--text", str(text), "--heads", "query", "--rules", "fixed", "--score", "all", "--budgets", "0.1"]
    assert cli.main([*given, *protocol, *more, "--out", str(out / "run")]) == 0
    found = {x["method"]: x for x in last_line(capsys)["results"]}
    return found, json.loads((out / "run" / "rows.json").read_text())


def test_a_converted_list_is_measured_at_once(made, tmp_path, capsys):
    published(tmp_path / "list.pth", layers=3, heads=4, dim=32, scale=0.2)
    sizes = ("--context", "128", "--documents", "2")
    found, rows = measured(tmp_path / "list.pth", made.model, made.text, tmp_path, capsys, *sizes)
    assert found["paper"]["heads"] == "query_head"
    assert found["paper"]["kl"] > 1e-3
    density = next(row[rows["columns"].index("density")] for row in rows["rows"] if row[1] == "paper")
    assert density == pytest.approx(sum(min(n, 20) for n in range(1, 129)) / sum(range(1, 129)))


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory):
    """A model with Llama-3-8B's layers and heads, but a hidden size of 64 and the demo's vocabulary: 45 MB."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_list_of_llama_3_8bs_shape_is_converted_and_measured(eight_billion, made, tmp_path, capsys):
    """32 layers of 32 heads: 67 MB of bfloat16, 135 MB stored."""
    config = LlamaConfig.from_pretrained(eight_billion)
    published(tmp_path / "list.pth", layers=32, heads=32, dim=128, scale=0.2)
    sizes = ("--context", "96", "--documents", "1")
    found, rows = measured(tmp_path / "list.pth", eight_billion, made.text, tmp_path, capsys, *sizes)
    assert found["paper"]["heads"] == "query_head"
    assert found["paper"]["kl"] > 1e-3
    assert {row[1] for row in rows["rows"]} >= {"dense", "paper"}
    again = Hasher.from_pretrained(tmp_path / "made" / "paper")
    again.require_match(config)
    assert (again.config.bits, again.config.hidden, again.config.residual) == (128, 128, True)
    x = torch.randn(1, 32, 2, 128, generator=torch.Generator().manual_seed(1))
    codes, _ = again.layer(31).encode_queries(x, per_query_head=True)
    assert codes.shape == (1, 32, 2, 1, 4)
