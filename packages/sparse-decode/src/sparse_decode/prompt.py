"""Prompts of an attached model on a CPU: `generate` feeds long ones in chunks, and they may be sparse.

All layers run on one chunk before the next, so that memory does not grow with a prompt's length: what a chunk needs
beside its keys and values is CHUNK rows of activations. Matrix products of CHUNK rows are also at least as fast as
those of all rows, which do not fit the caches.
"""

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from hashtrain.data.offsets import rope_kinds
from hashtrain.models import text_decoder
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from sparse_decode.caches.buffer import coming
from sparse_decode.cpu.bfloat_lanes import supported
from sparse_decode.dense import PROMPT_FRACTION
from sparse_decode.model import NAMES, Attention
from sparse_decode.modes import prompting

CHUNK = 2048
"""Rows of a prompt at a time."""
FRACTION = 0.1
"""Share of the tokens that a sparse prompt reads, of those that it does not always read."""
_OF_TEXT = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
"""What `generate` gives a model with a prompt of text alone."""
_PREFILL = "_prefill"
"""The method of `generate` that runs the prompt. It can split it, but has to be told."""


def own_prompts(model: PreTrainedModel) -> bool:
    """Whether our kernel attends in prompts of a model."""
    return model.device.type == "cpu" and model.dtype == torch.bfloat16 and supported()


def suits_chunks(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Whether a prompt in chunks gives the same, and takes no longer than at once.

    Some recurrent layers begin anew with each call of several tokens, some kinds of RoPE turn keys by the length of the
    text so far, and Doge's experts are chosen by all tokens of a call. A model's own eager attention also computes what
    masks hide.
    """
    config, recurrent = cast(Any, text_decoder(model).config), LinearAttentionCacheLayerMixin
    if model.device.type != "cpu" or rope_kinds(config) & {"dynamic", "longrope"}:
        return False
    if any(isinstance(layer, recurrent) for layer in cache.layers) or getattr(config, "is_moe", False):
        return False
    return own_prompts(model) or config._attn_implementation in ("sdpa", NAMES["sdpa"])


def feed_in_chunks(model: PreTrainedModel) -> Callable[[], None]:
    """Make `generate` split prompts of more than CHUNK tokens on a CPU, unless the caller gives a size.

    Prompts of more than text, or whose hidden states are wanted, and other caches than a DynamicCache, stay whole.

    Returns: a function that undoes it.
    """
    own, kind = cast(Callable[[], PreTrainedModel], weakref.ref(model)), type(model)

    def prefill(input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **how: Any) -> Any:
        cache = model_kwargs.get("past_key_values")
        text = type(cache) is DynamicCache and {n for n, x in model_kwargs.items() if x is not None} <= _OF_TEXT
        given = generation_config
        whole = given.prefill_chunk_size is not None or given.output_hidden_states or given.output_attentions
        if text and input_ids.shape[1] > CHUNK and not whole and suits_chunks(own(), cast(DynamicCache, cache)):
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = CHUNK
        tokens = input_ids.shape[1]  # and those of the answer, unless they may be very many
        before = coming.set(min(generation_config.max_length or tokens, tokens + tokens // 8) if text else 0)
        first = prompting.set(not given.is_assistant)  # an assistant's later calls are steps
        try:
            return getattr(kind, _PREFILL)(own(), input_ids, generation_config, model_kwargs, *args, **how)
        finally:
            prompting.reset(first)
            coming.reset(before)

    def undo() -> None:
        if vars(model).get(_PREFILL) is prefill:
            delattr(model, _PREFILL)

    if hasattr(kind, _PREFILL) and not getattr(model.config, "is_encoder_decoder", False):
        setattr(model, _PREFILL, prefill)
    return undo


def require_sparse_prompts(model: PreTrainedModel) -> None:
    """Raise ValueError if the kernel of sparse prompts does not support the model's device, dtype or processor."""
    place = "a CPU without it" if model.device.type == "cpu" and not supported() else f"device {model.device}"
    if not own_prompts(model):
        raise ValueError(
            f"sparse prompts need a model in bfloat16 on a CPU with AVX512_BF16, got {model.dtype} on {place}; leave "
            "`prompt` out"
        )


def mark_sparse(modules: Mapping[int, Attention]) -> Callable[[], None]:
    """Make the prompts of these attention modules sparse. Returns: a function that undoes it."""
    for found in modules.values():
        vars(found.module)[PROMPT_FRACTION] = FRACTION

    def undo() -> None:
        for found in modules.values():
            vars(found.module).pop(PROMPT_FRACTION, None)

    return undo
