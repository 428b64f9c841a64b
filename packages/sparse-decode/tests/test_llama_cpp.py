"""What the benchmark beside llama.cpp times is the same model."""

import os
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

if os.environ.get("CI") != "true":
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: `uv sync --group llama-cpp`")

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "initializer_range": 0.1,  # logits far enough apart for another order of sums, and a cache in float16
}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "tied"), [(LlamaConfig, True), (Qwen2Config, False)])
def test_llama_cpp_gets_the_same_model(benchmark, config, tied, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SMALL, tie_word_embeddings=tied)).eval()
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            x.data.normal_()
    benchmark("gguf_file").write_gguf(model, tmp_path / "model.gguf", "f32")
    llama = benchmark("llama_cpp").LlamaCpp(tmp_path / "model.gguf", 256, 1)
    for n in (1, 2, 30, 200):
        ids = torch.arange(n) * 31 % 500
        with torch.no_grad():
            wanted = int(model(ids[None]).logits[0, -1].argmax())
        assert llama.complete(ids.tolist(), 1)["choices"][0]["text"] == f"t{wanted}"
    state = Path(f"/proc/{llama._process.pid}/stat")
    deadline = time.monotonic() + 5
    while state.read_text().split()[2] != "T" and time.monotonic() < deadline:  # stopped
        time.sleep(0.01)
    assert state.read_text().split()[2] == "T"
    llama.close()


def test_a_model_of_another_family_is_refused(benchmark, tmp_path):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model.config.model_type = "gpt2"
    with pytest.raises(ValueError, match="expected a model of llama, qwen2, got gpt2"):
        benchmark("gguf_file").write_gguf(model, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.slow
def test_steps_are_timed_and_taken_back(benchmark, tmp_path, capsys):
    """One short length, all three beside one another."""
    module = benchmark("llama_cpp")
    model = benchmark("shapes").smollm2(2)
    attached = benchmark("never_slower").attached_models(model)
    models = {name: each for name, each in attached.items() if name in module.WAYS}
    benchmark("gguf_file").write_gguf(model, tmp_path / "model.gguf")
    llama = module.LlamaCpp(tmp_path / "model.gguf", 128, 1)
    row = module.measure(llama, models, 64, 2)
    llama.close()
    assert set(row["steps"]) == {"llama.cpp", "transformers", "ours", "ours, dense"}
    assert all(len(each["rounds"]) == 2 and each["ms"] > 0 for each in row["steps"].values())
    assert "64 tokens: llama.cpp read the prompt" in capsys.readouterr().out


def test_beyond_what_was_measured_it_is_a_line(benchmark):
    rows = [{"tokens": n, "steps": {"llama.cpp": {"ms": 40 + n / 128}}} for n in (1024, 4096, 8192)]
    found = benchmark("llama_cpp").predicted(rows, 131072)
    assert found == {"ms": 40 + 1024, "rounds": [], "predicted": True}
