"""What must be known of a Hugging Face model: whether it can be sparse, which modules attend, and how to switch it.

A layer is classified by what its module can do, not by its family: it attends to its own sequence, through keys of its
own, seeing the whole context, and calls attention through transformers' interface with the keywords it was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from hashtrain import ModelShape
from hashtrain.config import compresses_keys
from hashtrain.models import text_decoder
from torch import nn
from transformers import PreTrainedModel

from sparse_decode.attend import require
from sparse_decode.interface import FLASH_NAME, NAMES, AttentionName
from sparse_decode.modes import autocasts

CACHE_NAMES = ("past_key_values", "layer_past")
"""What attention modules call the cache."""
OTHER_STATES = ("cross_attention_states", "encoder_hidden_states", "key_value_states")
"""Arguments through which attention modules get the states of another sequence."""
WHOLE = ("full_attention", "hybrid")
"""Types of layers that see the whole context; a hybrid one has a recurrent state beside its attention."""
_PASSES_KEYWORDS = 8
"""CO_VARKEYWORDS of a code object."""


def require_attachable(model: PreTrainedModel) -> None:
    """Raise ValueError with one sentence if the attention of this model cannot be made sparse."""
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise ValueError(f"a Hugging Face causal language model is needed, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise ValueError("a decoder-only model is needed, got an encoder-decoder; its cross attention cannot be sparse")
    config = text_decoder(model).config
    if compresses_keys(config):
        raise ValueError(
            f"a model with one key per KV head is needed, got {config.model_type}, which keeps compressed keys "
            "(multi-head latent attention)"
        )
    name = dense_name(model)
    if name in (*NAMES.values(), FLASH_NAME):
        raise ValueError(
            "sparse attention is already attached to this model, or to another that shares its config object; "
            "call detach() on that attachment first"
        )
    if name not in NAMES:
        raise ValueError(
            f'attention must be "sdpa" or "eager", got "{name}"; call model.set_attn_implementation("sdpa") first'
        )


def dense_name(model: PreTrainedModel) -> str:
    """Return the attention of the text decoder; what a name of ours replaced that a copied config has kept."""
    name = cast(str, text_decoder(model).config._attn_implementation)
    return name.dense if isinstance(name, AttentionName) and not name.live else name


@dataclass(frozen=True)
class Attention:
    """An attention module of a decoder: its name in the decoder, and the names of its forward arguments, in order."""

    name: str
    module: Any
    arguments: tuple[str, ...]

    @property
    def layer(self) -> int:
        """Index of its layer."""
        return self.module.layer_idx

    @property
    def crosses(self) -> bool:
        """Whether it attends to another sequence; a class that can do both says so by its place, or when called."""
        if (said := getattr(self.module, "is_cross_attention", None)) is not None:
            return bool(said)
        place = self.name.rpartition(".")[2]
        return OTHER_STATES[0] in self.arguments or "cross" in place or "encoder" in place

    @property
    def reaches_us(self) -> bool:
        """Whether it calls attention through transformers' interface, and hands on the keywords it gets."""
        code = inspect.unwrap(type(self.module).forward).__code__
        return "get_interface" in code.co_names and bool(code.co_flags & _PASSES_KEYWORDS)


def attention_modules(model: PreTrainedModel) -> list[Attention]:
    """List the modules of the decoder that attend through a cache."""
    found = []
    for name, module in text_decoder(model).named_modules():
        if not isinstance(getattr(module, "layer_idx", None), int):
            continue
        arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if any(cache in arguments for cache in CACHE_NAMES) and not _contains_attention(module):
            found.append(Attention(name, module, arguments))
    return found


def sparse_modules(model: PreTrainedModel, dense_layers: Collection[int]) -> dict[int, Attention]:
    """Find the attention modules to make sparse, by layer: full causal self attention, but not in `dense_layers`."""
    config, attention = text_decoder(model).config, attention_modules(model)
    if not attention:
        raise ValueError(
            f"attention modules that take a cache and know their layer are needed, got none in {type(model).__name__}; "
            "leave this model dense"
        )
    own = [m for m in attention if not m.crosses]
    full = [m for m in own if _is_full(config, m)]
    if not full:
        raise ValueError(
            f"a model with full-attention layers is needed, got {len(own)} self-attention layers of "
            f"{type(model).__name__}, none of which sees the whole context through keys of its own"
        )
    if deaf := [m for m in full if not m.reaches_us]:
        raise ValueError(
            f"attention through transformers' interface is needed, got {type(deaf[0].module).__name__}, which attends "
            "by itself; leave this model dense"
        )
    # The text part of another model gets its masks from that: a prefix whose tokens see each other, then causal ones.
    alone = config is model.config
    if alone and (both_ways := [m for m in full if getattr(m.module, "is_causal", True) is False]):
        raise ValueError(f"causal attention is needed, got layer {both_ways[0].layer}, whose tokens see later ones")
    modules = {m.layer: m for m in full}
    if len(modules) < len(full) or any("cycle_offset" in m.arguments for m in full):
        raise ValueError(
            f"one attention module for each layer of the cache is needed, got {len(full)} for {len(modules)} of "
            f"{type(model).__name__}; leave this model dense"
        )
    chosen = {layer: m for layer, m in sorted(modules.items()) if layer not in dense_layers}
    if not chosen:
        raise ValueError(
            f"dense_layers must leave a full-attention layer, which are {sorted(modules)}, got {sorted(dense_layers)}"
        )
    return chosen


def dense_modules(model: PreTrainedModel, sparse: Collection[int]) -> list[Attention]:
    """List the other modules that attend to their own sequence through keys of their own, whatever they see of it."""
    config = text_decoder(model).config
    own = [m for m in attention_modules(model) if not m.crosses and m.layer not in sparse and m.reaches_us]
    return [m for m in own if not _reuses(config, m.layer)]


def require_kernels(model: PreTrainedModel, modules: dict[int, Attention], shape: ModelShape, one_each: bool) -> None:
    """Raise ValueError if the kernels do not take the model's device, type or heads: before a prefill is lost.

    Args:
        one_each: whether every query head has a selection of its own.
    """
    for layer, found in modules.items():
        device = _device(found.module, model)
        if device.type == "meta" or autocasts(device):  # somewhere else, or of another type, by the time it attends
            continue
        # Weights may be quantised, so that their type says nothing of the keys': the first call sees those.
        dtype = model.dtype if model.dtype in (torch.float32, torch.float64) else torch.bfloat16
        heads = shape.at(layer)
        require(device, dtype, (heads.head_dim,), 1 if one_each else heads.group)


def _device(module: nn.Module, model: PreTrainedModel) -> torch.device:
    return next((x.device for x in module.parameters()), model.device)


def require_own_keys(model: PreTrainedModel) -> None:
    """Raise ValueError if layers attend to keys of other layers, which would get them where those keep them."""
    config = text_decoder(model).config
    if shared := [m.layer for m in attention_modules(model) if _reuses(config, m.layer)]:
        raise ValueError(
            f'kv="host" needs a model whose layers have keys of their own, got layer {shared[0]}, which attends to '
            'another one\'s; use kv="device"'
        )


def require_all_full(model: PreTrainedModel) -> None:
    """Raise ValueError if a layer does not see the whole context: flash-attn is given no window."""
    config = text_decoder(model).config
    if other := [m.layer for m in attention_modules(model) if m.crosses or not _is_full(config, m)]:
        raise ValueError(
            f'backend="flash" needs a model whose layers all see the whole context, got layer {other[0]}, which does '
            'not; use backend="gather"'
        )


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the text decoder alone: a vision tower keeps its own.

    Raises: ValueError if the model does not let it be set; it is then as before.
    """
    decoder = text_decoder(model).config
    before, path = decoder._attn_implementation, _path(model.config, decoder)
    wanted: Any = name
    for key in reversed(path):
        wanted = {key: wanted}
    model.set_attn_implementation(wanted)
    if decoder._attn_implementation != name:
        decoder._attn_implementation_internal = before
        raise ValueError(
            f"a model whose attention can be set is needed, got {type(model).__name__}, which keeps "
            f'"{before}"; leave this model dense'
        )


def _path(config: Any, wanted: Any) -> list[str]:
    """Return the names of the parts of a config that lead to one of them; none if it is the config itself."""
    for key in () if config is wanted else config.sub_configs:
        part = getattr(config, key, None)
        if part is wanted:
            return [key]
        if part is not None and (rest := _path(part, wanted)):
            return [key, *rest]
    return []


def _contains_attention(module: nn.Module) -> bool:
    """Whether a module is a whole layer, with an attention module in it."""
    inner = (m for m in module.modules() if m is not module)
    return any(hasattr(m, "layer_idx") for m in inner)


def _reuses(config: Any, layer: int) -> bool:
    """Whether a layer attends to another one's keys. transformers before 5.21 says how many of the last ones do."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return modes[layer] == "reuse"
    return layer >= config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)


def _is_full(config: Any, found: Attention) -> bool:
    """Whether a layer sees the whole context through keys of its own."""
    if _reuses(config, found.layer):  # another layer's keys, of which the cache has none here
        return False
    types = getattr(config, "layer_types", None)
    if types is not None:
        return found.layer < len(types) and types[found.layer] in WHOLE
    own = config.per_layer_config[found.layer] if getattr(config, "is_heterogeneous", False) else config
    window = getattr(found.module, "sliding_window", getattr(own, "sliding_window", None))
    return window is None and getattr(own, "attention_chunk_size", None) is None
