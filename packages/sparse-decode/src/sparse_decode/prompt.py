"""Prompts of an attached model: `generate` feeds long ones in chunks, so that memory does not grow with their length.

All layers run on one chunk before the next: what a chunk needs beside its keys and values is CHUNK rows of activations.
Matrix products of CHUNK rows are also faster than those of all rows, which do not fit the CPU's caches.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

CHUNK = 2048
"""Rows at a time."""
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
        return getattr(kind, _PREFILL)(own(), input_ids, generation_config, model_kwargs, *args, **how)

    def undo() -> None:
        if vars(model).get(_PREFILL) is prefill:
            delattr(model, _PREFILL)

    if hasattr(kind, _PREFILL) and not getattr(model.config, "is_encoder_decoder", False):
        setattr(model, _PREFILL, prefill)
    return undo
