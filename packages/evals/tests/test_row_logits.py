"""Logits a piece at a time: those that the model makes at once, in memory that the number of rows does not change."""

import copy

import pytest
import torch
import transformers
from accelerate import cpu_offload
from evals import row_logits as module
from evals.row_logits import row_logits
from evals.settings import Always
from evals.tasks.ppl import Cell, measure
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, final_logit_softcapping=0.1),
    "cohere": lambda: transformers.CohereConfig(**SIZES, logit_scale=0.5),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=3.0),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    ),
}
ROW_BYTES = 4 * SIZES["vocab_size"]


def made(kind, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).eval().requires_grad_(False)


class Largest(TorchDispatchMode):
    """The most rows of a tensor as wide as the vocabulary, and as long as a context."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim and x.shape[-1] == self.width:
                self.rows = max(self.rows, x.numel() // self.width)
        return out

    def __init__(self, width):
        super().__init__()
        self.width = width


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_logits_that_the_model_makes_at_once(kind, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 7 * ROW_BYTES)
    model, ids = made(kind), torch.arange(3, 43)[None]
    whole = model(ids).logits[0, 10:-1]
    found = row_logits(model, ids, slice(10, -1), use_cache=False)
    pieces = list(found.pieces())
    assert [len(range(*piece.indices(29))) for piece in pieces] == [7, 7, 7, 7, 1]
    torch.testing.assert_close(torch.cat([found.at(piece) for piece in pieces]), whole)
    assert torch.equal(model(ids).logits[0, 10:-1], whole)  # the model is as it was


def test_an_offloaded_model_makes_the_same():
    model, ids = made("llama"), torch.arange(3, 43)[None]
    whole = model(ids).logits[0, :-1]
    moved = cpu_offload(copy.deepcopy(model), execution_device="cpu")
    found = row_logits(moved, ids, slice(0, -1), use_cache=False)
    torch.testing.assert_close(found.at(slice(None)), whole)
    torch.testing.assert_close(moved(ids).logits[0, :-1], whole)


@pytest.mark.parametrize("phase", ["everywhere", "decode"])
def test_perplexity_never_holds_the_logits_of_all_rows(loaded, phase, monkeypatch):
    width = loaded.model.config.vocab_size
    monkeypatch.setattr(module, "PIECE_BYTES", 8 * 4 * width)
    cells = [Cell("lsh", "visible", 0.1), Cell("recent", "visible", 0.1)]
    with Largest(width) as largest:
        found = measure(loaded.model, loaded.ids, cells, loaded.methods, Always(1, 0, 0), phase=phase)
    assert found["scored"] == 64
    assert 1 < largest.rows <= 8
