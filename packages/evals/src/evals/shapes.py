"""Model shapes for speed and size, where weights do not matter: public configs by name, or a folder's own."""

from typing import TYPE_CHECKING

from hashtrain.config import HasherConfig, ModelShape
from hashtrain.demo import model_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig


PLANES = HasherConfig("transform", ModelShape(1, 1, 1, 128)).planes
"""Default number of bit planes of a query: that of `transform`, the default hasher of `attach`."""
SMALL = "small"
PRESETS = {  # class of the config, hidden and intermediate size, vocabulary, layers, heads, KV heads
    # Qwen/Qwen2.5-7B and meta-llama/Meta-Llama-3-8B as in their config.json, but with positions for any length.
    "qwen2.5-7b": ("Qwen2Config", 3584, 18944, 152064, 28, 28, 4),
    "llama3-8b": ("LlamaConfig", 4096, 14336, 128256, 32, 32, 8),
    # Qwen2.5-7B's groups and heads, 4 layers, little besides attention: for two CPU cores.
    SMALL: ("Qwen2Config", 896, 896, 1024, 4, 28, 4),
}


def _preset(
    kind: str, hidden: int, intermediate: int, words: int, layers: int, heads: int, kv: int
) -> "PretrainedConfig":
    import transformers  # imported here: `--help` does not need it

    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": words, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 1 << 22}
    return getattr(transformers, kind)(**sizes, head_dim=128)


def load_config(name: str) -> "PretrainedConfig":
    """Return the config of a preset, the demo model, a folder or a hub id. Raises: ValueError if there is none."""
    if name in PRESETS:
        return _preset(*PRESETS[name])
    from hashtrain.models import load_config as load

    return load(model_path(name))
