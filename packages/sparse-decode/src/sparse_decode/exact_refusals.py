"""What exact mode cannot do, said in a sentence before anything runs."""

# Configs of transformers have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from sparse_decode.cache import CodedDynamicLayer
from sparse_decode.dense_step import MOST_ROWS
from sparse_decode.growing import GrowingLayer

MOST = MOST_ROWS - 1
"""Tokens drafted at once, at most: a check has one row more, and our dense kernel takes so many."""
SLIDES: bool = tuple(int(x) for x in transformers.__version__.split(".")[:2]) >= (5, 19)
"""Whether sliding layers of transformers can take several calls before they forget: 5.17 attends to too many tokens."""
_FORGETS = DynamicLayer, GrowingLayer, CodedDynamicLayer, DynamicSlidingWindowLayer


def require_exact(exact: object, selector: object, sparse_rows: object, max_decode_rows: int, kv: str, backend: str) -> None:
    """Raise ValueError if `attach` was asked for exact mode with what it cannot have."""
    if not isinstance(exact, int) or isinstance(exact, bool) or not 1 <= exact <= MOST:
        raise ValueError(f"exact must be an integer from 1 to {MOST}, the most tokens to draft at once, got {exact!r}")
    if selector is None:
        raise ValueError("exact mode drafts by sparse attention, got no selector; give a hasher, or leave exact out")
    for name, value, needed in (
        ("sparse_rows", sparse_rows, "decode"),
        ("max_decode_rows", max_decode_rows, 1),
        ("kv", kv, "device"),
        ("backend", backend, "gather"),
    ):
        if value != needed:
            raise ValueError(
                f"exact mode needs {name}={needed!r}, got {value!r}: its drafts alone are sparse, checks read all keys"
            )


def require_forgets(model: PreTrainedModel) -> None:
    """Raise ValueError if a model cannot generate, or keeps what cannot be taken back: a recurrent state."""
    if not model.can_generate():
        raise ValueError(f"exact mode is of generate, which {type(model).__name__} has not; leave exact out")
    require_forgetting_cache(DynamicCache(config=model.config))


def require_forgetting_cache(cache: object) -> None:
    """Raise ValueError if a cache cannot drop its last tokens as if they had never been there."""
    if not isinstance(cache, Cache) or getattr(cache, "offloading", False):
        raise ValueError(
            f"exact mode needs a DynamicCache that stays on its device, got {type(cache).__name__}; leave it out"
        )
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _FORGETS:
            raise ValueError(
                "exact mode needs layers of a cache that can drop tokens, DynamicLayer or DynamicSlidingWindowLayer, "
                f"got {type(layer).__name__} in layer {index}; attach without exact"
            )
        if type(layer) is DynamicSlidingWindowLayer and not SLIDES:
            raise ValueError(
                "exact mode of a model with sliding layers needs transformers 5.19 or newer, got "
                f"{transformers.__version__}; attach without exact"
            )


def require_drafts(input_ids: Tensor, settings: Any, inputs: Mapping[str, Any]) -> None:
    """Raise ValueError if a generation is none that transformers' loop for assisted decoding can do.

    Args: input_ids [B, T]; settings: a GenerationConfig; inputs: what else the loop is given, for the model.
    """
    if len(input_ids) != 1:
        raise ValueError(
            f"exact mode makes one sequence at a time, got {len(input_ids)}: each accepts another number of tokens; "
            "call generate for one after the other"
        )
    cache = inputs.get("past_key_values")
    if not inputs.get("use_cache") or cache is None:
        raise ValueError("exact mode needs a cache, got use_cache=False; leave that out")
    require_forgetting_cache(cache)
    for name, none in (("prefill_chunk_size", None), ("guidance_scale", (None, 1)), ("output_attentions", False)):
        value = getattr(settings, name, None)
        if value not in (none if isinstance(none, tuple) else (none, None)):
            raise ValueError(f"exact mode has no {name}, got {value!r}; leave it out, or attach without exact")
    if inputs.get("inputs_embeds") is not None:
        raise ValueError("exact mode needs input_ids, got inputs_embeds; give ids, or attach without exact")
    mask = inputs.get("attention_mask")
    whole = mask.shape[1] if mask is not None else getattr(settings, "_mask_length", input_ids.shape[1])
    if cache.get_seq_length() >= input_ids.shape[1] or whole != input_ids.shape[1]:
        raise ValueError(
            f"with a cache of {cache.get_seq_length()} tokens exact mode needs the ids of those and of new ones, got "
            f"{input_ids.shape[1]} ids; give the whole sequence"
        )
