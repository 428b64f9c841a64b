"""Models with random weights and published shapes for the benchmarks, and untrained hashers for them."""

import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.models import from_config, pretrained
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

QWEN_LAYERS, QWEN_VOCABULARY = 24, 151936


def smollm2(layers: int = 30) -> PreTrainedModel:
    """Return a model of SmolLM2-135M's shape in bfloat16."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    return from_config(config, dtype=torch.bfloat16).eval()


def qwen(layers: int = QWEN_LAYERS) -> PreTrainedModel:
    """Return a model of Qwen2.5-0.5B's shape in bfloat16; with fewer layers, the vocabulary shrinks in proportion."""
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=QWEN_VOCABULARY * layers // QWEN_LAYERS,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    return from_config(config, dtype=torch.bfloat16).eval()


SHAPES = {"smollm2-135m": smollm2, "qwen2.5-0.5b": qwen}


def make_model(folder: str | None, shape: str, layers: int | None) -> PreTrainedModel:
    """Load a model from a folder or hub id, or create one of a shape with `layers` layers (None: all)."""
    if folder is not None:
        return pretrained(AutoModelForCausalLM, folder, dtype=torch.bfloat16).eval()
    return SHAPES[shape]() if layers is None else SHAPES[shape](layers)


def make_hasher(model: PreTrainedModel) -> Hasher:
    """Return an untrained `transform` hasher for a model, with arbitrary remainder coefficients."""
    shape = ModelShape.of(model.config)
    hasher = Hasher(HasherConfig("transform", shape)).requires_grad_(False)
    for layer in range(shape.num_layers):
        hasher.layer(layer).remainder.copy_(torch.tensor([-1.0, 0.4, 0.5, 0.1, -0.2, 0.6]))
    return hasher
