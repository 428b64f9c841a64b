"""Decode with an attached model on a GPU: against the CPU, in a CUDA graph, compiled, and timed beside the model.

    uv run --extra cuda python packages/sparse-decode/benchmarks/decode_gpu.py

A random model with the layers of docs/gpu.md's prediction (32 query and 8 KV heads of 128) decodes with 2 % selected.
First a small context: dynamic, padded and static caches on the GPU give what the CPU gives. Then a whole step with a
static cache is captured in a CUDA graph and replayed, and compiled. Last, at several lengths, the times of such a step,
dense and sparse, in CUDA graphs, and by how much a layer differs from a dense one, beside what the model predicts.
The last line is JSON. Without a CUDA device: exit code 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from gpu_model import Layer, card_of, predicted_us
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.models import from_config
from sparse_decode import Budget, attach
from transformers import Cache, DynamicCache, LlamaConfig, PreTrainedModel, StaticCache

LAYER, LAYERS = Layer(), 4
LENGTHS = (8_192, 32_768)
PROMPT, STEPS, PADDING = 300, 4, 40
MOST_STEPS = 64  # a timed graph is replayed at most 43 times, each adds a token
TOLERANCE = 0.03
"""Largest difference of logits from the CPU's, relative to their norm: both have 16-bit weights, and sum in other
orders, after which a few of the selected tokens may differ."""
KINDS = ("dynamic", "padded", "static")
COUNTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "gpu_step.json"


def config_of(layers: int, room: int) -> LlamaConfig:
    """Return a model whose attention is that of the prediction, and whose other parts are small."""
    heads: dict[str, Any] = {
        "num_attention_heads": LAYER.query_heads,
        "num_key_value_heads": LAYER.kv_heads,
        "head_dim": LAYER.dim,
    }
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 512,
        "vocab_size": 512,
        "max_position_embeddings": room,
    }
    return LlamaConfig(num_hidden_layers=layers, **sizes, **heads)


def model_of(config: LlamaConfig, device: str) -> PreTrainedModel:
    """Make the same random model on any device."""
    torch.manual_seed(0)
    return from_config(config, dtype=torch.bfloat16).eval().to(device)


def hasher_of(config: LlamaConfig) -> Hasher:
    """Return a random hasher whose remainder counts as calibrated."""
    hasher = Hasher(HasherConfig("transform", ModelShape.of(config), bits=LAYER.bits, hidden=LAYER.hidden), 0)
    for layer in range(config.num_hidden_layers):
        hasher.layer(layer).remainder.fill_(0.01)
    return hasher


def filled(config: LlamaConfig, model: PreTrainedModel, ids: torch.Tensor, room: int | None, mask: Any = None) -> Cache:
    """Return a cache that holds the prompt ids [B, T]; room: of a static cache, None for a dynamic one."""
    cache = DynamicCache(config=config) if room is None else StaticCache(config=config, max_cache_len=room)
    model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def logits(device: str, kind: str, budget: Budget) -> torch.Tensor:
    """Decode a few given tokens after a prompt of two sequences; return the logits of all steps on the CPU."""
    config = config_of(2, PROMPT + STEPS)
    model, hasher = model_of(config, device), hasher_of(config)
    ids = torch.randint(0, 512, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(1)).to(device)
    mask = None if kind == "dynamic" else torch.ones_like(ids)
    if kind == "padded" and mask is not None:
        mask[0, :PADDING] = 0
    found = []
    with attach(model, hasher, budget):
        room = PROMPT + STEPS if kind == "static" else None
        cache = filled(config, model, ids[:, :PROMPT], room, None if mask is None else mask[:, :PROMPT])
        for end in range(PROMPT + 1, PROMPT + STEPS + 1):
            seen = None if mask is None else mask[:, :end]
            found.append(model(ids[:, end - 1 : end], attention_mask=seen, past_key_values=cache).logits[:, -1])
    return torch.stack(found).float().cpu()


def differences(device: str) -> dict[str, float]:
    """Return how far each kind of cache is from the CPU's dynamic one (padded: from the CPU's padded one)."""
    budget, found = Budget(0.5, min_tokens=16), {}
    expected = {kind: logits("cpu", kind, budget) for kind in ("dynamic", "padded")}
    for kind in KINDS:
        theirs = expected["padded" if kind == "padded" else "dynamic"]
        found[kind] = float((logits(device, kind, budget) - theirs).norm() / theirs.norm())
    return found


class WholeStep:
    """One decode step of a static cache, sparse or dense, that can be captured or compiled."""

    def __init__(self, device: str, tokens: int, sparse: bool, layers: int):
        room = tokens + MOST_STEPS
        config = config_of(layers, room)
        self.model = model_of(config, device)
        self.attachment = attach(self.model, hasher_of(config) if sparse else None, Budget(LAYER.fraction))
        ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
        # Of the whole room, so that its shape stays the same. Without padding, transformers might drop the mask, and
        # with it what hides the unfilled part.
        self.mask = torch.ones(1, room, dtype=torch.long, device=device)
        self.mask[0, 0] = 0
        self.cache = filled(config, self.model, ids, room, self.mask[:, :tokens])
        self.token = ids[:, -1:].clone()

    def __call__(self, model: Any = None) -> torch.Tensor:
        return (model or self.model)(self.token, attention_mask=self.mask, past_key_values=self.cache).logits


@torch.no_grad()
def replayed(device: str, tokens: int = PROMPT) -> dict[str, float]:
    """Return how far the third step is from the eager one, captured in a graph after two, and compiled after one."""
    from gpu_timing import graph_of

    eager, captured, compiled = (WholeStep(device, tokens, True, 2) for _ in range(3))
    expected = [eager() for _ in range(3)][-1].float()
    out: list[torch.Tensor] = []
    captured()
    graph = graph_of([lambda: out.append(captured())])  # runs it once more, and captures it, which runs nothing
    graph.replay()
    if device == "cuda":
        torch.cuda.synchronize()
    compiled()
    step = torch.compile(compiled.model, fullgraph=True)
    found = {"captured": out[-1], "compiled": [compiled(step) for _ in range(2)][-1]}
    return {name: float((x.float() - expected).norm() / expected.norm()) for name, x in found.items()}


@torch.no_grad()
def timed(device: str, tokens: int) -> dict[str, float]:
    """Return microseconds of a whole step in a CUDA graph, dense and sparse, and what a layer saves."""
    from gpu_timing import graph_time

    found = {}
    for name, sparse in (("dense", False), ("sparse", True)):
        found[name] = graph_time([WholeStep(device, tokens, sparse, LAYERS)]).median
    return {"tokens": tokens, **found, "layer_saves": (found["dense"] - found["sparse"]) / LAYERS}


def predicted(device: str, tokens: int) -> float | None:
    """Return the microseconds that a sparse layer saves by docs/gpu.md's model; None for a device it does not list."""
    if (card := card_of(device)) is None:
        return None
    launches = json.loads(COUNTS.read_text("utf-8"))["transform+static+remainder"]["launches"]
    sizes = (LAYER.dense_bytes(tokens), 1), (LAYER.sparse_bytes(tokens, masked=True), launches + 1)
    dense, sparse = (predicted_us(size, n, card.bytes_per_us) for size, n in sizes)
    return dense - sparse


def bars_of(differing: dict[str, float]) -> list[dict[str, Any]]:
    """Return what a run is judged by: all outputs are those of the CPU, or of an eager step."""
    return [
        {"what": f"{name} differs by", "value": value, "asked": f"<= {TOLERANCE}", "met": value <= TOLERANCE}
        for name, value in differing.items()
    ]


def run(name: str, lengths: Iterable[int], device: str = "cuda") -> dict[str, Any]:
    """Measure everything on a device of this name, printing results."""
    differing = differences(device) | replayed(device)
    for kind, value in differing.items():
        print(f"{kind}: differs by {value:.4f} (at most {TOLERANCE})")
    rows = []
    for tokens in lengths:
        rows.append({**timed(device, tokens), "predicted_to_save": predicted(name, tokens)})
        row = rows[-1]
        foreseen = "no prediction" if row["predicted_to_save"] is None else f"predicted {row['predicted_to_save']:.1f}"
        print(
            f"{tokens:,} tokens: dense {row['dense']:.1f} us a step, sparse {row['sparse']:.1f}; a layer saves "
            f"{row['layer_saves']:.1f} us ({foreseen})"
        )
    return {"rows": rows, "bars": bars_of(differing)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Decoding with an attached model on a GPU.")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none; run this on a machine with a GPU", file=sys.stderr)
        return 2
    from gpu_timing import environment

    found = environment()
    result = found | run(found["device"], LENGTHS)
    if out:
        temporary = out.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(temporary, out)
    print(json.dumps(result))
    return int(any(not bar["met"] for bar in result["bars"]))


if __name__ == "__main__":
    sys.exit(main())
