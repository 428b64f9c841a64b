"""What must be known of a Hugging Face model: whether it can be sparse, which modules attend, and how to switch it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sparse_decode.interface import FLASH_NAME, NAMES


def require_attachable(model: PreTrainedModel) -> None:
    """Raise ValueError with one sentence if the attention of this model cannot be made sparse."""
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise ValueError(f"a Hugging Face causal language model is needed, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise ValueError("a decoder-only model is needed, got an encoder-decoder; its cross attention cannot be sparse")
    config = model.get_decoder().config
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"a model with one key per KV head is needed, got {config.model_type}, which keeps compressed keys "
            "(multi-head latent attention)"
        )
    name = config._attn_implementation
    if name in (*NAMES.values(), FLASH_NAME):
        raise ValueError(
            "sparse attention is already attached to this model, or to another that shares its config object; "
            "call detach() on that attachment first"
        )
    if name not in NAMES:
        raise ValueError(
            f'attention must be "sdpa" or "eager", got "{name}"; call model.set_attn_implementation("sdpa") first'
        )


def sparse_modules(model: PreTrainedModel, dense_layers: int) -> dict[int, Any]:
    """Find the attention modules to make sparse, by layer: full causal attention, from layer `dense_layers` on."""
    decoder = model.get_decoder()
    attention: list[Any] = [m for m in decoder.modules() if _is_attention(m)]
    modules = {m.layer_idx: m for m in attention}
    full = {layer: m for layer, m in modules.items() if _is_full(decoder.config, layer)}
    if not full:
        raise ValueError(
            f"a model with full-attention layers is needed, got {len(modules)} attention layers of "
            f"{type(model).__name__}, none of which sees the whole context"
        )
    if both_ways := [layer for layer, m in full.items() if getattr(m, "is_causal", True) is False]:
        raise ValueError(f"causal attention is needed, got layer {both_ways[0]}, whose tokens see later ones")
    chosen = {layer: m for layer, m in sorted(full.items()) if layer >= dense_layers}
    if not chosen:
        raise ValueError(
            f"dense_layers must leave a full-attention layer, of which the last is {max(full)}, got {dense_layers}"
        )
    return chosen


def require_all_full(model: PreTrainedModel) -> None:
    """Raise ValueError if a layer does not see the whole context: flash-attn is given no window."""
    config = model.get_decoder().config
    attention: list[Any] = [m for m in model.get_decoder().modules() if _is_attention(m)]
    layers = [m.layer_idx for m in attention]
    if other := [layer for layer in layers if not _is_full(config, layer)]:
        raise ValueError(
            f'kernel="flash" needs a model whose layers all see the whole context, got layer {other[0]}, which does '
            'not; use kernel="gather"'
        )


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the text decoder alone: a vision tower keeps its own."""
    config, decoder = model.config, model.get_decoder().config
    mine = [key for key in config.sub_configs if getattr(config, key) is decoder]
    model.set_attn_implementation({mine[0]: name} if mine else name)


def _is_attention(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "o_proj") and (
        "past_key_values" in inspect.signature(module.forward).parameters
    )  # fmt: skip


def _reuses(config: Any, layer: int) -> bool:
    """Say whether a layer attends to another one's keys. transformers before 5.21 says how many of the last ones do."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return modes[layer] == "reuse"
    return layer >= config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)


def _is_full(config: Any, layer: int) -> bool:
    """Say whether a layer sees the whole context through keys of its own."""
    if _reuses(config, layer):  # another layer's keys, of which the cache has none here
        return False
    types = getattr(config, "layer_types", None)
    if types is not None:
        return types[layer] == "full_attention"
    return getattr(config, "sliding_window", None) is None and getattr(config, "attention_chunk_size", None) is None
