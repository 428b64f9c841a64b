"""Tiny random models for the serving checks, and hashers for them."""

from typing import Any

SHAPE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048}


def hash_of(model: str, folder: str, given: str | None = None) -> tuple[str, int]:
    """Return a hasher of a stored model, by default an untrained one in `folder`, and the sparse layers x heads."""
    from hashtrain import Hasher, HasherConfig, ModelShape
    from hashtrain.models import load_config

    config = load_config(model)
    if given is None:
        Hasher(HasherConfig("lsh", ModelShape.of(config), bits=128), 0).save_pretrained(folder)
    hasher = Hasher.from_pretrained(given or folder)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    sparse = [i for i, kind in enumerate(kinds) if kind == "full_attention" and i not in hasher.config.dense_layers]
    return given or folder, len(sparse) * config.num_attention_heads


def tiny(family: str, folder: str) -> tuple[str, str, int]:
    """Create a tiny model: qwen3 normalises queries and keys; gpt_oss has learned sinks, a window and experts."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    more: dict[str, Any] = {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 96}
    more["layer_types"] = ["sliding_attention", "full_attention"] * 2
    kind: Any = Qwen3ForCausalLM if family == "qwen3" else GptOssForCausalLM
    model = kind(Qwen3Config(**SHAPE, head_dim=32) if family == "qwen3" else GptOssConfig(**SHAPE, **more))
    draw = torch.Generator().manual_seed(1)
    for layer in model.model.layers if family == "gpt_oss" else ():  # their initial zeros would have almost no effect
        layer.self_attn.sinks.data.copy_(torch.randn(8, generator=draw))
    model.save_pretrained(f"{folder}/model")
    return f"{folder}/model", *hash_of(f"{folder}/model", f"{folder}/hasher")
