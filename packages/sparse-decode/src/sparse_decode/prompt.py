"""Prompts of an attached model: `generate` feeds long ones in chunks, and on a CPU they may be sparse.

All layers run on one chunk before the next, so that memory does not grow with a prompt's length: what a chunk needs
beside its keys and values is CHUNK rows of activations. Matrix products of CHUNK rows are also faster than those of all
rows, which do not fit the CPU's caches.
"""

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sparse_decode.caches.buffer import coming
from sparse_decode.cpu.bfloat_lanes import supported
from sparse_decode.dense import PROMPT_FRACTION
from sparse_decode.model import Attention

CHUNK = 2048
"""Rows at a time."""
FRACTION = 0.1
"""Share of the tokens that a sparse prompt reads, of those that it does not always read."""
_PREFILL = "_prefill"
"""The method of `generate` that runs the prompt. It can split it, but has to be told."""


def feed_in_chunks(model: PreTrainedModel) -> Callable[[], None]:
    """Make `generate` split prompts of more than CHUNK tokens on the CPU, unless the caller gives a chunk size.

    Prompts with images or embeddings, and other caches than a DynamicCache, stay whole.

    Returns: a function that undoes it.
    """
    own, kind = weakref.ref(model), type(model)

    def prefill(input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **how: Any) -> Any:
        cache = model_kwargs.get("past_key_values")
        text = type(cache) is DynamicCache and model_kwargs.get("inputs_embeds") is None
        if text and input_ids.is_cpu and input_ids.shape[1] > CHUNK and generation_config.prefill_chunk_size is None:
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = CHUNK
        tokens = input_ids.shape[1]  # and those of the answer, unless they may be very many
        before = coming.set(min(generation_config.max_length or tokens, tokens + tokens // 8) if text else 0)
        try:
            return getattr(kind, _PREFILL)(own(), input_ids, generation_config, model_kwargs, *args, **how)
        finally:
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
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not supported():
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
