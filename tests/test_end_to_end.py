"""The way of a stranger's data through all four packages: text -> capture -> hashers -> attached model -> report."""

import pytest
import torch
from hashtrain import Hasher
from hashtrain.cli import main as hashtrain
from hashtrain.demo import demo_model_path
from sparse_decode import Budget, attach
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny random model with the demo tokenizer, a text, and the hashers trained on them."""
    folder = tmp_path_factory.mktemp("end-to-end")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("\n".join(f"value_{i} = compute(value_{i // 7}, {i})" for i in range(1500)))
    model, text = str(folder / "model"), str(folder / "text.txt")
    settings = ["--context", "512", "--contexts", "2", "--held-out", "2", "--held-out-rows", "8", "--steps", "3"]
    settings += ["--workers", "1"]  # each of two would import torch for three steps
    out = str(folder / "hashers")
    assert hashtrain(["--model", model, "--text", text, "--out", out, *settings, "--only", "default", "planes"]) == 0
    return folder


@pytest.mark.parametrize("name", ["lsh", "paper", "planes", "transform"])
def test_trained_hashers_decode_at_the_density_they_were_asked_for(run, name):
    model = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    prompt = tokenizer((run / "text.txt").read_text(), return_tensors="pt", truncation=True, max_length=300)
    with attach(model, Hasher.from_pretrained(run / "hashers" / name), Budget(fraction=0.1)) as attached:
        out = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        density = attached.density()
    assert out.shape == (1, 308)
    assert set(density) == {0, 1, 2}
    # 7 decode steps see 301 to 307 tokens and select 30 of them; if layers and heads divide them, whole tokens each.
    asked, divided = sum([30] * 7) / sum(range(301, 308)), name != "lsh"
    assert sum(density.values()) / 3 == pytest.approx(asked, rel=0.02 if divided else 1e-9)
