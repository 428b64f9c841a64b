"""Checks that raise an error for everything exact mode does not support, before anything runs."""

# Configs of transformers have no types.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from sparse_decode.caches.cache import CodedDynamicLayer
from sparse_decode.caches.growing import GrowingLayer
from sparse_decode.layer.dense_step import MOST_ROWS

MOST = MOST_ROWS - 1
"""Maximal number of tokens drafted at once: a check has one row more, up to the limit of our dense kernel."""
SLIDES: bool = tuple(int(x) for x in transformers.__version__.split(".")[:2]) >= (5, 19)
"""Whether transformers' sliding layers can drop tokens after several calls: 5.17 attends to too many tokens then."""
_FORGETS = DynamicLayer, GrowingLayer, CodedDynamicLayer, DynamicSlidingWindowLayer


def require_exact(
    exact: object, selector: object, sparse_rows: object, max_decode_rows: int, kv: str, backend: str
) -> None:
    """Raise ValueError if exact mode does not support these arguments of `attach`."""
    if not isinstance(exact, int) or isinstance(exact, bool) or not 1 <= exact <= MOST:
        raise ValueError(f"exact must be an integer from 1 to {MOST}, the number of tokens to draft, got {exact!r}")
    if selector is None:
        raise ValueError("exact mode drafts with sparse attention, got no selector; pass a hasher, or omit exact")
    for name, value, needed in (
        ("sparse_rows", sparse_rows, "decode"),
        ("max_decode_rows", max_decode_rows, 1),
        ("kv", kv, "device"),
        ("backend", backend, "gather"),
    ):
        if value != needed:
            raise ValueError(
                f"exact mode needs {name}={needed!r}, got {value!r}: only drafts are sparse, checks read all keys"
            )


def require_forgets(model: PreTrainedModel) -> None:
    """Raise ValueError if a model cannot generate, or has a state that cannot be rolled back (a recurrent one)."""
    if not model.can_generate():
        raise ValueError(f"exact mode needs a model with generate, got {type(model).__name__}; omit exact")
    require_forgetting_cache(DynamicCache(config=model.config))


def require_forgetting_cache(cache: object) -> None:
    """Raise ValueError if a cache cannot drop its last tokens."""
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
        raise ValueError(
            f"exact mode needs a DynamicCache without offloading, got {type(cache).__name__}; omit the cache"
        )
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _FORGETS:
            raise ValueError(
                "exact mode needs cache layers that can drop tokens, DynamicLayer or DynamicSlidingWindowLayer, "
                f"got {type(layer).__name__} in layer {index}; attach without exact"
            )
        if type(layer) is DynamicSlidingWindowLayer and not SLIDES:
            raise ValueError(
                "exact mode with sliding layers needs transformers 5.19 or newer, got "
                f"{transformers.__version__}; attach without exact"
            )


def require_drafts(input_ids: Tensor, settings: Any, inputs: Mapping[str, Any]) -> None:
    """Raise ValueError if transformers' assisted decoding does not support a generation.

    Args: input_ids [B, T]; settings: a GenerationConfig; inputs: the model's other arguments.
    """
    if len(input_ids) != 1:
        raise ValueError(
            f"exact mode needs a batch of one sequence, got {len(input_ids)}: sequences accept different numbers of "
            "tokens; call generate once per sequence"
        )
    cache = inputs.get("past_key_values")
    if not inputs.get("use_cache") or cache is None:
        raise ValueError("exact mode needs a cache, got use_cache=False; omit it")
    require_forgetting_cache(cache)
    for name, none in (("prefill_chunk_size", None), ("guidance_scale", (None, 1)), ("output_attentions", False)):
        value = getattr(settings, name, None)
        if value not in (none if isinstance(none, tuple) else (none, None)):
            raise ValueError(f"exact mode does not support {name}, got {value!r}; omit it, or attach without exact")
    if inputs.get("inputs_embeds") is not None:
        raise ValueError("exact mode needs input_ids, got inputs_embeds; pass ids, or attach without exact")
    mask = inputs.get("attention_mask")
    whole = mask.shape[1] if mask is not None else getattr(settings, "_mask_length", input_ids.shape[1])
    if cache.get_seq_length() >= input_ids.shape[1] or whole != input_ids.shape[1]:
        raise ValueError(
            f"with a cache of {cache.get_seq_length()} tokens exact mode needs the ids of all of them and of new "
            f"tokens, got {input_ids.shape[1]} ids; pass the whole sequence"
        )
