"""Which queries a run reads of its captures: known before any is made, so that no others need be stored.

A training step reads all keys of a context and the queries of some 64 rows. The rows follow from the seed and the
schedule (`hashtrain.rows`), so the first contexts, which starts and calibration read, are stored whole, and of every
other context the keys and the rows of its steps: 4.8 TB in place of 26 for Llama-3-8B in the paper's schedule.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hashtrain.capture import context_bytes
from hashtrain.captured import EVERYTHING, Kept
from hashtrain.config import ModelShape
from hashtrain.job import training_of
from hashtrain.evaluate import rows_of_contexts
from hashtrain.layers import BY_VARIANT
from hashtrain.plan import TrainCommand
from hashtrain.rows import rows_of_steps
from hashtrain.trainer import TrainConfig

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Reads:
    """What is read of each of `contexts` contexts of `tokens` tokens; step n reads context n % contexts."""

    shape: ModelShape
    tokens: int
    contexts: int
    whole: int
    """The first contexts, of which all is stored."""
    steps: int
    rows: int
    """Rows drawn in each step, at most."""
    facts: dict[str, Any]
    """What the rows follow from, as JSON: part of the identity of a capture without the other queries."""
    draw: Callable[[], list[Tensor]]
    """Returns for each layer the rows of each step, int32 [steps, rows]."""

    @property
    def all_queries(self) -> bool:
        """Whether so many rows are read that all are stored, which serves other schedules, too."""
        return 2 * self._drawn > self.tokens

    def kept(self, context: int) -> Kept:
        """Say what is stored of a context."""
        if context < self.whole:
            return EVERYTHING
        if self.all_queries:
            return Kept(values=False)
        return Kept(tuple(rows[context :: self.contexts].unique() for rows in self._by_layer), values=False)

    def at_step(self, step: int) -> Kept:
        """Say what one step reads."""
        return Kept(tuple(rows[step].unique() for rows in self._by_layer), values=False)

    def identity(self, contexts: int) -> dict[str, Any]:
        """Return what tells a capture of the first so many contexts from one of everything."""
        if contexts <= self.whole:
            return {}
        return {"whole": self.whole, "queries": "all" if self.all_queries else self.facts}

    def bytes(self, contexts: Sequence[int]) -> int:
        """Return the bytes that captures of these contexts take, at most: a row drawn twice is stored once."""
        whole = sum(context < self.whole for context in contexts)
        rows = None if self.all_queries else self._drawn
        few = context_bytes(self.shape, self.tokens, _DTYPE, rows, values=False)
        return whole * context_bytes(self.shape, self.tokens, _DTYPE) + (len(contexts) - whole) * few

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads in all layers together, at most."""
        return context_bytes(self.shape, self.tokens, _DTYPE, self.rows, values=False)

    @property
    def _drawn(self) -> int:
        return math.ceil(self.steps / self.contexts) * self.rows

    @cached_property
    def _by_layer(self) -> list[Tensor]:
        return self.draw()


def training_reads(command: TrainCommand, shape: ModelShape, contexts: int, whole: int, shared: bool) -> Reads:
    """Say what the training of all of a command's hashers reads.

    Args:
        contexts: to train on; whole: the first of them, which starts, repairs and calibration read.
        shared: whether processes share the rows of each step.
    """
    trained = [recipe for recipe in command.recipes if recipe.trained]
    numbers = ("steps", "rows", "chunk", "max_top", "max_rest", "min_position", "seed")
    schedules: dict[tuple[int, ...], tuple[TrainConfig, set[str]]] = {}
    for recipe in trained or command.recipes[:1]:
        config = training_of(command, recipe, "cpu")
        _, kinds = schedules.setdefault(tuple(getattr(config, name) for name in numbers), (config, set()))
        if trained:
            kinds.add(BY_VARIANT[recipe.variant].target_heads)
    # Heads of the targets, by layer: hashers of one schedule whose targets have as many heads draw the same rows.
    draws = [
        (config, [_heads(shape.at(n), kinds) for n in range(shape.num_layers)]) for config, kinds in schedules.values()
    ]
    told = [{**{name: getattr(config, name) for name in numbers}, "heads": heads} for config, heads in draws]
    facts = {**told[0], "shared": shared} if len(told) == 1 else {"draws": told, "shared": shared}

    def draw() -> list[Tensor]:
        return [
            torch.cat(
                [
                    rows_of_steps(config, layer, count, command.context, shared)
                    for config, heads in draws
                    for count in heads[layer]
                ]
                or [torch.empty(command.steps, 0, dtype=torch.int32)],
                1,
            )
            for layer in range(shape.num_layers)
        ]

    most = max(sum(len(heads[layer]) for _, heads in draws) for layer in range(shape.num_layers))
    return Reads(shape, command.context, contexts, whole, command.steps, command.rows * most, facts, draw)


def _heads(shape: ModelShape, kinds: Collection[str]) -> list[int]:
    """List the numbers of heads that targets of these kinds have in a layer, each once."""
    return sorted({shape.num_kv_heads if kind == "kv" else shape.num_query_heads for kind in kinds})


def validation_reads(command: TrainCommand, shape: ModelShape, contexts: int) -> Reads:
    """Say what judging reads of held-out contexts: the same rows in every layer."""
    facts = {name: getattr(command, name) for name in ("first_row", "held_out_rows", "seed")}

    def draw() -> list[Tensor]:
        return [torch.stack([*rows_of_contexts(command, contexts)]).int()] * shape.num_layers

    return Reads(shape, command.context, contexts, 0, contexts, command.held_out_rows, facts, draw)
