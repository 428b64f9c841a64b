"""Inspects a Hugging Face model: whether it can be sparse, which modules attend, and how to switch their attention.

Layers are classified by the properties of their modules, not by model family. A layer can be sparse if it has self
attention over its own keys, sees the whole context, and calls attention through transformers' interface with the
keyword arguments that it was given.
"""

import dis
import functools
import gc
import inspect
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from hashcore.cuda.program import require_compiler
from hashtrain import ModelShape
from hashtrain.config import compresses_keys
from hashtrain.models import text_decoder
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sparse_decode.inputs import require
from sparse_decode.modes import autocasts

# Hugging Face searches these names for "flash", "sdpa" and "flex", so they must not contain these words.
FLASH = "flash_attention_2"
NAMES = {"sdpa": "sparse_decode", "eager": "sparse_decode_eager", FLASH: "sparse_decode_fa2"}
"""Names of our attention, by the dense attention it replaces."""

CACHE_NAMES = ("past_key_values", "layer_past")
"""Names of attention modules' argument for the cache."""
OTHER_STATES = ("cross_attention_states", "encoder_hidden_states", "key_value_states")
"""Names of arguments with the states of another sequence (cross attention)."""
NO_COPY = (
    "a model to which sparse attention is attached cannot be copied or pickled; call detach() first, and attach to the "
    "copy"
)
WHOLE = ("full_attention", "hybrid")
"""Layer types that see the whole context; hybrid layers also have a recurrent state."""
_PASSES_KEYWORDS = 8
"""The flag CO_VARKEYWORDS of code objects: the function has **kwargs."""


class AttentionName(str):
    """The name of our attention in an attached model's config; copies and files of the config get the dense name.

    Attributes: dense: the attention that it replaces; model: returns the attached model; None once it is detached or
        dropped.
    """

    dense: str
    model: Callable[[], PreTrainedModel | None]

    @classmethod
    def of(cls, name: str, dense: str, model: PreTrainedModel) -> "AttentionName":
        """Create the name of an attached model."""
        made = cls(name)
        made.dense, made.model = dense, weakref.ref(model)
        return made

    def end(self) -> None:
        """Say that the model is detached."""
        self.model = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.dense

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.dense,)


def require_attachable(model: PreTrainedModel) -> None:
    """Raise ValueError if the attention of this model cannot be made sparse."""
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise ValueError(f"expected a Hugging Face causal language model, got {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise ValueError("expected a decoder-only model, got an encoder-decoder; cross attention cannot be sparse")
    config = text_decoder(model).config
    if compresses_keys(config):
        raise ValueError(
            f"expected a model with one key per KV head, got {config.model_type}, which stores compressed keys "
            "(multi-head latent attention)"
        )
    if own := [m for m in attention_modules(model) if m.chooses]:
        raise ValueError(
            f"expected attention that takes its mask as it is, got {type(own[0].module).__name__}, which chooses "
            "tokens itself; leave this model as it is"
        )
    if dense_name(model) in NAMES.values():
        gc.collect()  # a model that was dropped while attached refers to itself
    name = dense_name(model)
    if name in NAMES.values():
        raise ValueError(
            "sparse attention is already attached to this model, or to another that shares its config object; "
            "call detach() on what attach() returned, or load the model again if that is lost"
        )
    if name not in NAMES:
        raise ValueError(
            f'attention must be "sdpa", "eager" or "{FLASH}", got "{name}"; call '
            'model.set_attn_implementation("sdpa") first'
        )


def dense_name(model: PreTrainedModel) -> str:
    """Return the text decoder's attention; if the config still has a name of ours, the attention that it replaced."""
    name = cast(str, text_decoder(model).config._attn_implementation)
    return name.dense if isinstance(name, AttentionName) and name.model() is None else name


@dataclass(frozen=True)
class Attention:
    """An attention module of a decoder, its name in the decoder, and the names of its forward arguments, in order."""

    name: str
    module: Any
    arguments: tuple[str, ...]

    @property
    def layer(self) -> int:
        """Index of its layer."""
        return self.module.layer_idx

    @property
    def device(self) -> torch.device | None:
        """Device of its weights; None if there are none."""
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())  # quantised weights are buffers
        return next((x.device for x in tensors), None)

    @property
    def crosses(self) -> bool:
        """Whether it is cross attention. Classes that can be both are told apart by the module's name."""
        if (said := getattr(self.module, "is_cross_attention", None)) is not None:
            return bool(said)
        place = self.name.rpartition(".")[2]
        return OTHER_STATES[0] in self.arguments or "cross" in place or "encoder" in place

    @property
    def chooses(self) -> bool:
        """Whether it makes a mask of its own from the one that it gets: then the name of its attention may decide, or
        whether there is a mask."""
        other = set(OTHER_STATES) & set(self.arguments)  # it may be another sequence's mask
        return not other and _writes_mask(type(self.module))

    @property
    def reaches_us(self) -> bool:
        """Whether it calls attention through transformers' interface and passes on its keyword arguments."""
        code = inspect.unwrap(type(self.module).forward).__code__
        return "get_interface" in code.co_names and bool(code.co_flags & _PASSES_KEYWORDS)


@functools.cache
def _writes_mask(kind: type) -> bool:
    code = dis.get_instructions(inspect.unwrap(kind.forward))
    return any(x.opname.startswith("STORE_FAST") and x.argval == "attention_mask" for x in code)


def attention_modules(model: PreTrainedModel) -> list[Attention]:
    """Return the modules of the decoder that attend through a cache."""
    found = []
    for name, module in text_decoder(model).named_modules():
        if not isinstance(getattr(module, "layer_idx", None), int):
            continue
        arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
        contains_attention = any(hasattr(m, "layer_idx") for m in module.modules() if m is not module)  # a whole layer
        if any(cache in arguments for cache in CACHE_NAMES) and not contains_attention:
            found.append(Attention(name, module, arguments))
    return found


def sparse_modules(model: PreTrainedModel, dense_layers: Collection[int]) -> dict[int, Attention]:
    """Return the attention modules to make sparse by layer: full causal self attention, except in `dense_layers`.

    Raises: ValueError if there are none, or if they cannot be made sparse.
    """
    config, attention = text_decoder(model).config, attention_modules(model)
    if not attention:
        raise ValueError(
            f"expected attention modules with a cache argument and a layer_idx, got none in {type(model).__name__}; "
            "leave this model dense"
        )
    own = [m for m in attention if not m.crosses]
    full = [m for m in own if _is_full(config, m)]
    if not full:
        raise ValueError(
            f"expected a model with full-attention layers, got {len(own)} self-attention layers of "
            f"{type(model).__name__}, none of which sees the whole context through its own keys"
        )
    if deaf := [m for m in full if not m.reaches_us]:
        raise ValueError(
            f"expected attention through transformers' interface, got {type(deaf[0].module).__name__}, which computes "
            "attention itself; leave this model dense"
        )
    # In a multimodal model, the masks of the text part make it causal after a prefix with bidirectional attention.
    alone = config is model.config
    if alone and (both_ways := [m for m in full if getattr(m.module, "is_causal", True) is False]):
        raise ValueError(f"expected causal attention, got layer {both_ways[0].layer}, whose tokens see later ones")
    modules = {m.layer: m for m in full}
    if len(modules) < len(full) or any("cycle_offset" in m.arguments for m in full):
        raise ValueError(
            f"expected one attention module per cache layer, got {len(full)} for {len(modules)} layers of "
            f"{type(model).__name__}; leave this model dense"
        )
    layers = ModelShape.of(config).num_layers
    if (last := max(dense_layers, default=0)) >= layers:
        raise ValueError(f"dense_layers names layer {last}, expected layers of the model, 0 to {layers - 1}")
    chosen = {layer: m for layer, m in sorted(modules.items()) if layer not in dense_layers}
    if not chosen:
        raise ValueError(
            f"dense_layers must leave at least one of the full-attention layers {sorted(modules)} sparse, got "
            f"{sorted(dense_layers)}"
        )
    return chosen


def with_own_keys(model: PreTrainedModel) -> list[Attention]:
    """Return the self-attention modules with their own keys, including sliding ones."""
    config = text_decoder(model).config
    return [m for m in attention_modules(model) if not (m.crosses or _reuses(config, m.layer))]


def dense_modules(model: PreTrainedModel, sparse: Collection[int]) -> list[Attention]:
    """Return those that are not sparse."""
    return [m for m in with_own_keys(model) if m.layer not in sparse and m.reaches_us]


def require_kernels(
    model: PreTrainedModel, modules: dict[int, Attention], shape: ModelShape, per_query_head: bool
) -> None:
    """Raise ValueError if the kernels do not support the model's device, dtype or heads, or cannot be compiled."""
    for layer, found in modules.items():
        device = found.device or model.device
        if device.type == "meta" or autocasts(device):  # device or dtype will differ when it attends
            continue
        # Weights may be quantised, so that keys may have another dtype; the first call checks that.
        dtype = model.dtype if model.dtype in (torch.float32, torch.float64) else torch.bfloat16
        heads = shape.at(layer)
        if device.type == "cuda":
            require_compiler()
        require(device, dtype, (heads.head_dim,), 1 if per_query_head else heads.group)


def require_own_keys(model: PreTrainedModel) -> None:
    """Raise ValueError if layers share the keys of other layers, which would then be in host memory."""
    config = text_decoder(model).config
    if shared := [m.layer for m in attention_modules(model) if _reuses(config, m.layer)]:
        raise ValueError(
            f'kv="host" needs a model whose layers have their own keys, got layer {shared[0]}, which shares those of '
            'another layer; use kv="device"'
        )


def require_whole(modules: Mapping[int, Attention]) -> None:
    """Raise ValueError if the heads of a layer are divided among processes."""
    for found in modules.values():
        if isinstance(getattr(getattr(found.module, "k_proj", None), "weight", None), DTensor):
            raise ValueError(
                "sparse attention does not support transformers' tensor parallelism; load the model in one process, or "
                "serve it with vLLM (sparse-serve)"
            )


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of the text decoder only; a vision tower keeps its own.

    Raises: ValueError if the model does not support this; it is then unchanged.
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
            f"expected a model whose attention can be set, got {type(model).__name__}, which keeps "
            f'"{before}"; leave this model dense'
        )


def _path(config: Any, wanted: Any) -> list[str]:
    """Return the path of attribute names from a config to one of its parts; empty for the config itself."""
    for key in () if config is wanted else config.sub_configs:
        part = getattr(config, key, None)
        if part is wanted:
            return [key]
        if part is not None and (rest := _path(part, wanted)):
            return [key, *rest]
    return []


def _reuses(config: Any, layer: int) -> bool:
    """Whether a layer uses another layer's keys. Before transformers 5.21, configs have the number of last layers."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return modes[layer] == "reuse"
    return layer >= config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)


def _is_full(config: Any, found: Attention) -> bool:
    """Whether a layer sees the whole context through its own keys."""
    if _reuses(config, found.layer):
        return False
    types = getattr(config, "layer_types", None)
    if types is not None:
        return found.layer < len(types) and types[found.layer] in WHOLE
    own = config.per_layer_config[found.layer] if getattr(config, "is_heterogeneous", False) else config
    window = getattr(found.module, "sliding_window", getattr(own, "sliding_window", None))
    return window is None and getattr(own, "attention_chunk_size", None) is None
