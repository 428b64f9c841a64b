"""A tiny causal LM and its captured queries and keys, created here: no download, the same in every run."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # worker_jobs, which other processes import by name
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hashtrain.data.capture import capture
from hashtrain_runs import model_and_text
from transformers import LlamaConfig, LlamaForCausalLM


def make_config(**changes):
    settings = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    settings |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0)
    return LlamaConfig(**settings | changes)


@pytest.fixture(scope="session")
def tiny_config():
    """The tiny model's config, with changes given by keyword."""
    return make_config


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(make_config()).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def data(model, tmp_path_factory):
    generator = torch.Generator().manual_seed(1)
    contexts = [torch.randint(0, 97, (512,), generator=generator) for _ in range(3)]
    return capture(model, contexts, tmp_path_factory.mktemp("capture"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_config):
    """A model folder and a text file."""
    root = tmp_path_factory.mktemp("cli")
    model_and_text(root, tiny_config(vocab_size=4096), 2000)
    return root
