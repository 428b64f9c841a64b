"""A tiny random model with its hashers and its text, created once, and the commands that use them."""

import os
import random
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import pytest
import torch
from evals.methods import NAMES, load_methods
from evals.tasks.settings import PplCommand
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.data.capture import capture
from hashtrain.demo import demo_model_path
from hashtrain.evaluation.calibration import calibrate
from hashtrain.run.recipes import ALL
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

CONTEXT = 128


def tiny_model(vocabulary: int, kv_heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=32)
    sizes |= dict(num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=256)
    config = LlamaConfig(**sizes, initializer_range=0.2)  # sharp attention, so that selections matter
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> SimpleNamespace:
    """Folders of a model, its hashers and four texts."""
    root: Path = tmp_path_factory.mktemp("made")
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    model = tiny_model(len(tokenizer))
    tokenizer.save_pretrained(root / "model")
    model.save_pretrained(root / "model")
    shape = ModelShape.of(model.config)
    tokens = torch.randint(0, len(tokenizer), (4, CONTEXT), generator=torch.Generator().manual_seed(1))
    data = capture(model, list(tokens), root / "capture")
    fitted = {}  # once a variant: it takes the longest
    for seed, candidate in enumerate(ALL):
        hasher = Hasher(HasherConfig(candidate.variant, shape, **{**candidate.config, "bits": 64, "hidden": 64}), seed)
        for number in range(shape.num_layers):
            layer = hasher.layer(number)
            if (candidate.variant, number) not in fitted:
                calibrate(layer, number, data)
            layer.remainder.copy_(fitted.setdefault((candidate.variant, number), layer.remainder.clone()))
        hasher.save_pretrained(root / "hashers" / candidate.name)
    draw = random.Random(0)
    (root / "text").mkdir()
    words = ["def", "return", "self", "value", "for", "in", "(x)", "=", "1"]
    for number in range(4):
        (root / "text" / f"{number}.txt").write_text(" ".join(draw.choice(words) for _ in range(300)))
    return SimpleNamespace(root=root, model=root / "model", hashers=root / "hashers", text=root / "text")


@pytest.fixture(scope="session")
def loaded(made):
    """The model in memory, every method, and the tokens of one context."""
    model = LlamaForCausalLM.from_pretrained(made.model).eval().requires_grad_(False)
    methods = {method.name: method for method in load_methods(NAMES, made.hashers, model.config)}
    ids = torch.randint(0, model.config.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(3))
    return SimpleNamespace(model=model, methods=methods, ids=ids)


@pytest.fixture
def command(made, tmp_path):
    """Build a command on the tiny model; keyword arguments replace its settings."""

    def build(kind, **settings):
        common = {"model": str(made.model), "hashers": made.hashers, "text": (made.text,), "out": tmp_path / "run"}
        common |= {"budgets": (0.1,), "documents": 3, "context": CONTEXT, "dense_layers": 1, "sink": 0, "recent": 0}
        named = {field.name for field in fields(kind)}  # synthetic exercises take no text
        return kind(**{k: v for k, v in common.items() if k in named} | settings)

    return build


@pytest.fixture
def ppl_command(command):
    return lambda **settings: command(PplCommand, **settings)
