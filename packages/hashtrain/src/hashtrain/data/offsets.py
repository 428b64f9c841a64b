"""Positions at which contexts are captured, so that a hash serves longer contexts than it was made from.

Keys and queries after RoPE depend on their positions, and a hash knows only what it has seen: made from contexts at
positions 0 to 4,095, it finds less than random hashing at 8,192. Rotary attention depends on differences of positions
alone. A context whose first token is at another position therefore has the same attention, and other keys. Made from
distances below 8,192 alone, a trained hash is no better at 32,768 than before training; so tokens must also be as far
apart as they will be.

1. The reach is the longest context that a hash is made for.
2. Held-out contexts are whole. Context n begins at `offset(n, tokens, reach)`: the first at 0, the second as late as
   fits, each later one in the middle of a widest gap. So the first few contexts, which starts read, cover the reach
   as all do.
3. Of the training contexts of each corpus every second one is whole, at these offsets. The others are torn into
   `PIECES`, which lie apart over all of the reach (docs/log.md, 2026-11-27).
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

PIECES = 8
"""Parts that a torn context has."""


def offset(number: int, tokens: int, reach: int | None) -> int:
    """Return the position of the first token of context `number`, from 0 to reach - tokens; 0 without a reach."""
    room = max(0, (reach or 0) - tokens)
    if number < 2:
        return number * room
    digits = number - 1
    mirrored = int(f"{digits:b}"[::-1], 2)  # 1/2, 1/4, 3/4, 1/8, 5/8, ... once divided
    return room * mirrored >> digits.bit_length()


def places(number: int, tokens: int, reach: int | None, torn: bool, corpora: int = 1) -> Tensor:
    """Return the position of each token of context `number`, ascending: int64 [tokens].

    Args:
        torn: whether every second context is torn; the number of a whole one is then halved.
        corpora: how many give contexts in turn: the torn ones are then every second of each corpus.
    """
    at, room = torch.arange(tokens, device="cpu"), max(0, (reach or 0) - tokens)
    if not torn or sum(divmod(number, corpora)) % 2 == 0:
        return at + offset(number // 2 if torn else number, tokens, reach)
    draw = torch.Generator("cpu").manual_seed(number)
    uneven, gaps = torch.rand(2, PIECES - 1, generator=draw, dtype=torch.float64, device="cpu")
    cuts = (torch.arange(1, PIECES, device="cpu") + uneven - 0.5) * tokens / PIECES
    shifts = torch.cat([gaps.new_zeros(1), gaps.cumsum(0) / gaps.sum() * room]).round().long()
    return at + shifts[(at[:, None] >= cuts).sum(1)]


def positions(model: PreTrainedModel, where: Tensor | None) -> dict[str, Tensor]:
    """Return the arguments that let a model run tokens at these positions, int64 [T]; {} for None and 0, 1, 2, ...

    Raises: ValueError if the model takes no positions.
    """
    if where is None or where[-1] == len(where) - 1:
        return {}
    if "position_ids" not in inspect.signature(model.forward).parameters:
        name = type(model).__name__
        raise ValueError(f"{name} takes no positions, expected a model with RoPE; make --reach equal to --context")
    found = where[None].to(model.device)
    # Without a mask, transformers takes positions with gaps for several sequences, which do not see each other.
    return {"position_ids": found, "attention_mask": torch.ones_like(found)}


def beyond(tokens: int, reach: int) -> str:
    """Return the warning for a context of `tokens` tokens, given the reach of its hasher."""
    return (
        f"a context of {tokens:,} tokens is longer than the {reach:,} that its hasher was made for; it may then find "
        f"less than random codes do: make one with `hashtrain --reach {tokens}` or more"
    )


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def rope_kinds(config: Any) -> set[Any]:
    """Return the kinds of RoPE that a text config names, such as `default` or `yarn`, over all kinds of layers."""
    rope = _rope(config)
    return {inner.get("rope_type") for inner in (rope, *(x for x in rope.values() if isinstance(x, dict)))}


def longest_of(model_config: Any) -> int | None:
    """Return the longest context of a model, None if its config names none."""
    config = model_config.get_text_config(decoder=True)
    most, rope = getattr(config, "max_position_embeddings", None), _rope(config)
    if most and "yarn" in rope_kinds(config):  # whose factor some configs leave out there
        most = max(most, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or 0)))
    return most


def reach_of(model_config: Any, context: int, wanted: int | None = None) -> int:
    """Return the longest context that hashes of a model are made for: `wanted`, or as long as the model's own.

    It is at least the context, and exactly that for models whose keys cannot be moved: those whose config names no
    RoPE, and those with frequencies that follow the length that a process has seen before (`dynamic`), beyond the
    length where that begins. `longrope` has other frequencies from a certain length on: a context at an offset gets
    those of a text that ends there. Layers without RoPE have the same keys at every offset.

    Raises: ValueError if `wanted` is shorter than the context, or longer than the model allows.
    """
    config = model_config.get_text_config(decoder=True)
    rope, kinds = _rope(config), rope_kinds(config)
    most = (longest_of(model_config) or context) if rope else context
    if "dynamic" in kinds:
        most = min(most, int(rope.get("original_max_position_embeddings") or most))
    most = max(context, most)
    if wanted is None:
        return most
    if not context <= wanted <= most:
        said = f"expected --reach from {context}, the --context, to {most}, the longest for this model"
        raise ValueError(f"{said}, got {wanted}")
    return wanted
