"""Write a model as a GGUF file for llama.cpp, so that both can be timed with the same weights.

For plain Llama and Qwen2 models. Prompts must be token ids: the file's vocabulary consists of placeholder names.
"""

import pathlib
import shutil
from typing import Any

import gguf
import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
TYPES = {"f32": np.float32, "f16": np.float16}


def with_context(path: pathlib.Path, tokens: int, folder: pathlib.Path) -> pathlib.Path:
    """Return a file that llama.cpp takes prompts of this many tokens with: this one, or a copy made in a folder."""
    fields = gguf.GGUFReader(path).fields
    (name,) = (name for name in fields if name.endswith(".context_length"))
    if fields[name].contents() >= tokens:
        return path
    copy = pathlib.Path(shutil.copy(path, folder))
    field = gguf.GGUFReader(copy, "r+").fields[name]
    field.parts[field.data[0]][0] = tokens
    return copy


def write_gguf(model: PreTrainedModel, path: pathlib.Path, kind: str = "f16", context: int | None = None) -> None:
    """Write a model's weights and settings.

    Args:
        kind: dtype of the matrices, "f16" or "f32"; vectors are always float32, as in llama.cpp.
        context: context length to write; None for that of the model's config.
    Raises: ValueError if the model is of another family, or uses scaled RoPE.
    """
    config: Any = model.config
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"expected a model of {', '.join(ARCHITECTURES)}, got {config.model_type}")
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"expected plain rotary positions, got {rope['rope_type']}")
    architecture, layers = ARCHITECTURES[config.model_type], config.num_hidden_layers
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(context or config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    _add_placeholder_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if (heads := _rotated_heads(name, config)) is not None:
            weight = _in_pairs(weight, heads)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"GGUF has no name for the weight {name}")
        writer.add_tensor(found, weight.float().numpy().astype(TYPES[kind] if weight.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_placeholder_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Write a name for each token: llama.cpp requires a vocabulary, but does not use it for prompts of ids."""
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])


def _rotated_heads(name: str, config: Any) -> int | None:
    """Return the number of heads of a query or key weight if llama.cpp stores its rows in another order; else None."""
    if config.model_type != "llama":
        return None
    projections = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((heads for part, heads in projections.items() if part in name), None)


def _in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * D, ...]: llama.cpp's RoPE rotates adjacent rows, transformers' rows half a head apart."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)
