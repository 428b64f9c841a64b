"""Model shapes for speed and size, where weights do not matter: public configs by name, or a folder's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashtrain.config import HasherConfig, ModelShape
from hashtrain.demo import DEMO, model_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def _qwen(**sizes: Any) -> PretrainedConfig:
    from transformers import Qwen2Config  # imported here and below: `--help` does not need it

    return Qwen2Config(**sizes, max_position_embeddings=1 << 22)


def _llama(**sizes: Any) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(**sizes, max_position_embeddings=1 << 22)


PLANES = HasherConfig("transform", ModelShape(1, 1, 1, 128)).planes
"""Default number of bit planes of a query: that of `transform`, the default hasher of `attach`."""
SMALL = "small"
PRESETS = {
    # Qwen/Qwen2.5-7B and meta-llama/Meta-Llama-3-8B as in their config.json, but with positions for any length.
    "qwen2.5-7b": lambda: _qwen(hidden_size=3584, intermediate_size=18944, vocab_size=152064, **_sizes(28, 28, 4)),
    "llama3-8b": lambda: _llama(hidden_size=4096, intermediate_size=14336, vocab_size=128256, **_sizes(32, 32, 8)),
    # Qwen2.5-7B's groups and heads, 4 layers, little besides attention: for two CPU cores.
    SMALL: lambda: _qwen(hidden_size=896, intermediate_size=896, vocab_size=1024, head_dim=128, **_sizes(4, 28, 4)),
}


def _sizes(layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def load_config(name: str) -> PretrainedConfig:
    """Return the config of a preset, of the demo model, or of a folder or hub id.

    Raises: ValueError with one sentence if there is none.
    """
    if name in PRESETS:
        return PRESETS[name]()
    from hashtrain.models import load_config as load

    path = model_path(name)
    remedy = f"use {', '.join(PRESETS)}, {DEMO} or a model's folder"
    if not Path(path).is_dir() and (path.count("/") != 1 or path.startswith((".", "/", "~"))):  # not a hub id either
        raise ValueError(f"no shape {name}: there is no folder of that name; {remedy}")
    try:
        return load(path)
    except ValueError as error:
        raise ValueError(f"no shape {name}: its config.json cannot be read ({error}); {remedy}") from error


def shape_of(config: PretrainedConfig) -> ModelShape:
    """Return the numbers of layers and heads, and the head size."""
    return ModelShape.of(config)
