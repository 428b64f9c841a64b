"""Decode steps of a model of Qwen2.5-7B's shape with random weights, dense and sparse."""

import contextlib
from typing import Any
from unittest import mock

import torch
from timing import Stage
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, Qwen2Config
from transformers.cache_utils import DynamicLayer

FRACTION = 0.02
SIZES = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
HEADS = {"num_attention_heads": 28, "num_key_value_heads": 4}
SMALL = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONTEXTS = (1, 131072), (1, 32768), (8, 32768)


class Room(DynamicLayer):
    """Keys and values in one allocation, written in place: a dense cache without transformers' copy at each step."""

    def start(self, k: Tensor, v: Tensor, spare: int = 64) -> None:
        self.room = [x.new_empty(*x.shape[:2], x.shape[2] + spare, x.shape[3]) for x in (k, v)]
        self.n, self.is_initialized, self.dtype, self.device = 0, True, k.dtype, k.device
        self.update(k, v)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.n + key_states.shape[2]
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, self.n : end] = new
        self.n = end
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        return self.n


def make(stage: Stage) -> tuple[PreTrainedModel, Any]:
    """Return a model with random weights, and a hasher for it."""
    from hashtrain import Hasher, HasherConfig, ModelShape
    from hashtrain.models import from_config

    sizes: dict[str, Any] = SIZES | HEADS if stage.cuda else SMALL | SMALL_HEADS
    config = Qwen2Config(max_position_embeddings=1 << 18, **sizes)
    with torch.device("meta"):
        model = from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=stage.device).eval().requires_grad_(False)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(stage.device)
    hasher = Hasher(HasherConfig("transform", ModelShape.of(config), bits=128, hidden=128), 0).requires_grad_(False)
    for i in range(config.num_hidden_layers):
        hasher.layer(i).round_matrices()
        hasher.layer(i).remainder.fill_(0.01)
    return model, hasher


def filled(model: PreTrainedModel, batch: int, tokens: int, attached: Any) -> DynamicCache:
    """Return a cache of random keys and values, prepared for the attached model, or as `Room`."""
    config, cache = model.config, DynamicCache(config=model.config)
    if attached:
        attached.prepare(cache)
    draw = torch.Generator(model.device).manual_seed(1)
    dim = config.hidden_size // config.num_attention_heads
    shape = batch, config.num_key_value_heads, tokens, dim
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, device=model.device, dtype=model.dtype, generator=draw) for _ in range(2))
        if attached:
            cache.update(k, v, layer)
        else:
            cache.layers[layer] = room = Room()
            room.start(k, v)
    return cache


def decode(stage: Stage, model: PreTrainedModel, hasher: Any, batch: int, tokens: int, sparse: bool) -> None:
    """Write a row `decode`: a step as the host queues it, and captured at one length, which leaves the host out."""
    from sparse_decode import Budget, attach

    ids, count = torch.zeros(batch, 1, dtype=torch.long, device=stage.device), 20 if stage.cuda else 2
    attaching = attach(model, hasher, Budget(FRACTION)) if sparse else contextlib.nullcontext()
    with torch.no_grad(), attaching as attached:
        cache = filled(model, batch, tokens, attached)

        def step() -> Tensor:
            return model(ids, past_key_values=cache).logits

        for _ in range(3):
            step()
        eager, host = stage.eager_us([step] * count, rounds=1)
        # While a stream is captured, transformers makes a mask even of no padding: dense attention would then copy its
        # keys for each query head, and ours would take the way of masks.
        with mock.patch("transformers.masking_utils.is_tracing", return_value=False):
            graph = stage.graph_us([step], replays=10)
    row = {"batch": batch, "tokens": tokens, "sparse": sparse, "graph_ms": graph / 1e3, "eager_ms": eager / 1e3}
    stage.put("decode", **row, host_ms=host / 1e3, tokens_s=batch / graph * 1e6)


def agree(stage: Stage, model: PreTrainedModel, hasher: Any, tokens: int) -> None:
    """Write a row `check`: logits of steps with everything selected beside those of the dense model."""
    from sparse_decode import Budget, attach

    ids = torch.randint(0, model.config.vocab_size, (1, tokens + 4), device=stage.device)

    def logits(sparse: bool) -> Tensor:
        attaching = attach(model, hasher, Budget(1.0)) if sparse else contextlib.nullcontext()
        with torch.no_grad(), attaching:
            cache = DynamicCache(config=model.config)
            model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
            steps = (ids[:, i : i + 1] for i in range(tokens, tokens + 4))
            return torch.cat([model(one, past_key_values=cache).logits[:, -1] for one in steps]).float()

    dense, ours = logits(False), logits(True)
    off = ((ours - dense).norm() / dense.norm()).item()
    stage.put("check", what=f"logits at {tokens} tokens, all selected, relative difference from dense", value=off)


def run(stage: Stage) -> None:
    """Measure all contexts for which there is time."""
    model, hasher = make(stage)
    with stage.part("agree"):
        agree(stage, model, hasher, 2000 if stage.cuda else 100)
    for batch, tokens in CONTEXTS if stage.cuda else ((1, 200),):
        for sparse in (True, False):
            if stage.left() < 10:
                stage.put("skipped", what=f"decode {batch} x {tokens}")
                continue
            with stage.part("decode", batch=batch, tokens=tokens, sparse=sparse):
                decode(stage, model, hasher, batch, tokens, sparse)
