"""A tiny model in a folder, every command that reads one, and what a refusal looks like."""

import importlib
import pathlib
import time

import pytest
import torch
from evals.cli import main as evals
from hashtrain.cli import main as hashtrain
from hashtrain.demo import demo_model_path
from sparse_decode.cli import main as sparse_decode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 10
SIZES = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}


def make_model(folder, **changes):
    """Write a tiny model with a tokenizer, and texts beside it; return the model's folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, **{**HEADS, **changes})).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(folder / "model")
    for name, lines in (("text.txt", 200), ("short.txt", 2)):
        (folder / name).write_text("def name(x): return x\n" * lines)
    return folder / "model"


SHORT = ["--context", "128", "--documents", "1", "--budgets", "0.1"]
QUICK = ["--contexts", "64", "--repeats", "1", "--steps", "1", "--warmup", "1", "--methods", "sdpa"]


def commands(folder, text):
    """Every command that reads a model, on this one."""
    name, out = str(folder), str(folder.parent / "out")
    lsh = ["--prompt-file", str(text.with_name("short.txt")), "--hasher", "lsh", "--max-new-tokens", "1"]
    ours = ["--context", "512", "--out", out, "--text", str(text)]
    return {
        "sparse-decode": (sparse_decode, ["--model", name, *lsh]),
        "hashtrain": (hashtrain, ["--model", name, *ours, "--only", "lsh"]),
        "convert": (hashtrain, ["convert", str(text), "--model", name, "--out", out]),
        "evals ppl": (
            evals,
            ["ppl", "--model", name, "--methods", "recent", "--out", out, "--text", str(text), *SHORT],
        ),
        "evals throughput": (evals, ["throughput", "--shape", name, *QUICK, "--out", out]),
        "chat": (example("chat"), ["--model", name, "--hasher", "lsh"]),
        "attach_local": (example("attach_local"), ["--model", name, "--hasher", "lsh", "--prompt-file", str(text)]),
        "train_folder": (example("train_folder"), [str(text), "--model", name, "--out", out]),
    }


def example(name):
    def main(words):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "examples")
            return importlib.import_module(name).main(words)

    return main


def refused(main, words, capsys):
    """Run a command that must end with a sentence; return it."""
    capsys.readouterr()
    began = time.monotonic()
    try:
        code = main(words)
    except SystemExit as leaving:
        code = leaving.code
    took, said = time.monotonic() - began, capsys.readouterr()
    assert code == 2, (words, code, said)
    assert took < SECONDS, (words, took)
    assert "Traceback" not in said.err + said.out
    last = said.err.strip().splitlines()[-1]
    assert last, words
    return last
