"""Shared parts of the tests of whole runs: a tiny model with a text, and everything that a run stored."""

import json

import torch
from hashtrain.demo import demo_model_path
from transformers import AutoTokenizer, LlamaForCausalLM

SMALL = [
    *("--context", "512", "--contexts", "2", "--held-out", "1", "--held-out-rows", "4", "--steps", "2"),
    *("--dense-layers", "1", "--workers", "1"),
]


class Given:
    """A capture of queries [C, Hq, T, D], keys and values [C, Hkv, T, D], the same in every layer."""

    def __init__(self, q, k, scaling, v=None):
        self.q, self.k, self.v, self.scaling = q, k, v, scaling

    def __len__(self):
        return len(self.q)

    def stride(self, context):
        return 1

    def read(self, context, layer):
        return self.q[context : context + 1], self.k[context : context + 1], self.scaling

    def keys(self, context, layer):
        return self.read(context, layer)[1:]

    def values(self, context, layer):
        return self.v[context : context + 1]

    def queries(self, context, layer, rows=None):
        q = self.read(context, layer)[0]
        return q if rows is None else q[:, :, rows]


def captured():
    """Random queries and keys of three contexts, keys mostly in a few directions; reads like a capture."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(2, 16, 16, generator=generator)
    q = torch.randn(3, 4, 400, 16, generator=generator)
    k = torch.randn(3, 2, 400, 16, generator=generator) * torch.linspace(3, 0.1, 16)
    return Given(q, k @ mixed + 2, 0.25)


def model_and_text(root, config, lines):
    """Create a random model with the demo tokenizer, and a text; return the options that name them."""
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "model")
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(root / "model")
    (root / "text.txt").write_text("\n".join(f"def name_{i}(x): return x * {i}" for i in range(lines)))
    return ["--model", str(root / "model"), "--text", str(root / "text.txt")]


def command(folder, out, *more):
    """Return the arguments of a small run on such a model and text."""
    return ["--model", str(folder / "model"), "--text", str(folder / "text.txt"), "--out", str(out), *SMALL, *more]


def stored(out):
    """Return every byte of a run's hashers, and its metrics."""
    metrics = json.loads((out / "metrics.json").read_text())
    del metrics["seconds"]
    files = {(path.parent.name, path.name): path.read_bytes() for path in out.glob("*/*") if path.parent.name[0] != "."}
    return metrics, files
