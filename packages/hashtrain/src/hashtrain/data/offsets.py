"""Offsets: at which positions contexts are captured, so that a hash serves longer contexts than it was made from.

Keys and queries after RoPE depend on their positions, and a hash knows only what it has seen: made from contexts at
positions 0 to 4,095, it finds less than random hashing at 8,192. Rotary attention depends on differences of positions
alone. A context whose first token is at another position therefore has the same attention, and other keys.

1. The reach is the longest context that a hash is made for.
2. Context n begins at `offset(n, tokens, reach)`: the first at 0, the second as late as fits, each later one in the
   middle of a widest gap. So the first few contexts, which starts and calibration read, cover the reach as all do.
"""

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel


def offset(number: int, tokens: int, reach: int | None) -> int:
    """Return the position of the first token of context `number`, from 0 to reach - tokens; 0 without a reach."""
    room = max(0, (reach or 0) - tokens)
    if number < 2:
        return number * room
    digits = number - 1
    mirrored = int(f"{digits:b}"[::-1], 2)  # 1/2, 1/4, 3/4, 1/8, 5/8, ... once divided
    return room * mirrored >> digits.bit_length()


def positions(model: PreTrainedModel, tokens: int, first: int) -> dict[str, Tensor]:
    """Return what lets a model run `tokens` tokens from position `first` on: int64 `position_ids` [1, T]; {} for 0.

    Raises: ValueError if the model takes no positions.
    """
    if not first:
        return {}
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} takes no positions, expected a model with RoPE; leave --reach out")
    return {"position_ids": torch.arange(first, first + tokens, device=model.device)[None]}


def beyond(tokens: int, reach: int) -> str:
    """Return the warning for a context of `tokens` tokens, given the reach of its hasher."""
    return (
        f"a context of {tokens:,} tokens is longer than the {reach:,} that its hasher was made for; it may then find "
        f"less than random codes do: make one with `hashtrain --reach {tokens}` or more"
    )


def reach_of(model_config: Any, context: int, wanted: int | None = None) -> int:
    """Return the longest context that hashes of a model are made for: `wanted`, or as long as the model's own.

    It is at least the context, and exactly that for models whose keys cannot be moved: those whose config names no
    RoPE, and those with frequencies that follow the length that a process has seen before (`dynamic`), beyond the
    length where that begins. `longrope` has other frequencies from a certain length on: a context at an offset gets
    those of a text that ends there. Layers without RoPE have the same keys at every offset.

    Raises: ValueError if `wanted` is shorter than the context, or longer than the model allows.
    """
    config = model_config.get_text_config(decoder=True)
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    kinds = {inner.get("rope_type") for inner in (rope, *(x for x in rope.values() if isinstance(x, dict)))}
    most = int(getattr(config, "max_position_embeddings", None) or context) if rope else context
    if "dynamic" in kinds:
        most = min(most, int(rope.get("original_max_position_embeddings") or most))
    most = max(context, most)
    if wanted is None:
        return most
    if not context <= wanted <= most:
        said = f"expected --reach from {context}, the --context, to {most}, the longest for this model"
        raise ValueError(f"{said}, got {wanted}")
    return wanted
