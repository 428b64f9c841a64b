"""A published list of hashers, converted by `hashtrain convert`, is measured by `evals ppl` without further steps."""

import json

import pytest
import torch
from evals import cli
from evals_output import last_line
from hashtrain import Hasher, ModelShape
from hashtrain.artefact.convert import convert
from hashtrain.cli import main as hashtrain
from transformers import LlamaConfig


def published(path, layers, heads, dim, scale=1.0):
    """Write a list in the published form: four random bfloat16 tensors per layer."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(1, heads, dim, dim), (1, heads, 1, dim)] * 2 * layers
    torch.save([(scale * torch.randn(size, generator=draw)).bfloat16() for size in sizes], path)


def test_a_converted_list_is_measured_at_once(made, tmp_path, capsys):
    published(tmp_path / "list.pth", layers=3, heads=4, dim=32, scale=0.2)
    words = ["convert", str(tmp_path / "list.pth"), "--model", str(made.model), "--out", str(tmp_path / "made")]
    assert hashtrain(words) == 0
    told = capsys.readouterr().err
    next_command = next(line for line in told.splitlines() if line.startswith("uv run evals"))
    given = next_command.split()[3:]  # the words after `uv run evals`
    given = [word for word in given if word not in ("--documents", "4")]
    more = ["--text", str(made.text), "--context", "128", "--documents", "2", "--heads", "query", "--rules", "fixed"]
    assert cli.main([*given, *more, "--score", "all", "--budgets", "0.1", "--out", str(tmp_path / "run")]) == 0
    found = {x["method"]: x for x in last_line(capsys)["results"]}
    assert found["paper"]["heads"] == "query_head"
    assert found["paper"]["kl"] > 1e-3
    rows = json.loads((tmp_path / "run" / "rows.json").read_text())
    density = next(row[rows["columns"].index("density")] for row in rows["rows"] if row[1] == "paper")
    assert density == pytest.approx(sum(min(n, 20) for n in range(1, 129)) / sum(range(1, 129)))


def test_a_list_of_llama_3_8bs_shape_converts(tmp_path):
    """32 layers of 32 heads: 67 MB of bfloat16, 135 MB stored; no weights of the model are needed, only its config."""
    config = LlamaConfig(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
    published(tmp_path / "list.pth", layers=32, heads=32, dim=128)
    made = convert(tmp_path / "list.pth", config, tmp_path / "paper", "Meta-Llama-3-8B")
    again = Hasher.from_pretrained(tmp_path / "paper")
    again.require_match(config)
    assert again.config.shape == ModelShape.of(config)
    assert (again.config.bits, again.config.hidden, again.config.residual) == (128, 128, True)
    assert torch.equal(again.layer(31).w2, made.layer(31).w2)
    x = torch.randn(1, 32, 2, 128, generator=torch.Generator().manual_seed(1))
    codes, _ = again.layer(31).encode_queries(x, per_query_head=True)
    assert codes.shape == (1, 32, 2, 1, 4)
