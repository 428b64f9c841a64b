"""Which queries of its captures a run reads. This is known before capturing, so no others are stored.

A training step reads all keys of a context and the queries of about 64 rows. The rows follow from the seed and the
schedule (`hashtrain.training.rows`). The first contexts, which starts and calibration read, are stored whole; of every
other context, only the keys and the rows of its steps: 4.8 TB instead of 26 for Llama-3-8B with the paper's schedule.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hashtrain.config import ModelShape
from hashtrain.data.capture import context_bytes
from hashtrain.data.captured import EVERYTHING, Kept
from hashtrain.evaluation.evaluate import rows_of_contexts
from hashtrain.layers import BY_VARIANT
from hashtrain.run.job import training_of
from hashtrain.settings.train_command import TrainCommand
from hashtrain.training.rows import rows_of_steps
from hashtrain.training.train_config import TrainConfig

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Reads:
    """What is read of each of `contexts` contexts of `tokens` tokens; step n reads context n % contexts."""

    shape: ModelShape
    tokens: int
    contexts: int
    whole: int
    """Number of first contexts that are stored whole."""
    steps: int
    rows: int
    """Most rows drawn in one step."""
    settings: dict[str, Any]
    """Settings that decide the rows, as JSON: part of the identity of a capture that lacks other queries."""
    draw: Callable[[int], Tensor]
    """Returns the rows of each step in a layer, int32 [steps, rows]."""

    @property
    def all_queries(self) -> bool:
        """Whether so many rows are read that all are stored; such a capture also serves other schedules."""
        return 2 * self._drawn > self.tokens

    def kept(self, context: int) -> Kept:
        """Return what is stored of a context."""
        if context < self.whole:
            return EVERYTHING
        if self.all_queries:
            return Kept(values=False)
        return Kept(tuple(rows[context :: self.contexts].unique() for rows in self._by_layer), values=False)

    def at_step(self, step: int) -> Kept:
        """Return what one step reads."""
        return Kept(tuple(rows[step].unique() for rows in self._by_layer), values=False)

    def identity(self, contexts: int) -> dict[str, Any]:
        """Return the fields that distinguish a capture of the first `contexts` contexts from a complete one."""
        if contexts <= self.whole:
            return {}
        return {"whole": self.whole, "queries": "all" if self.all_queries else self.settings}

    def bytes(self, contexts: Sequence[int]) -> int:
        """Return an upper bound of the bytes that captures of these contexts take: rows drawn twice are stored once."""
        whole = sum(context < self.whole for context in contexts)
        rows = None if self.all_queries else self._drawn
        few = context_bytes(self.shape, self.tokens, _DTYPE, rows, values=False)
        return whole * context_bytes(self.shape, self.tokens, _DTYPE) + (len(contexts) - whole) * few

    @property
    def step_bytes(self) -> int:
        """Most bytes that a step reads in all layers together."""
        return context_bytes(self.shape, self.tokens, _DTYPE, self.rows, values=False)

    @property
    def _drawn(self) -> int:
        return math.ceil(self.steps / self.contexts) * self.rows

    @cached_property
    def _by_layer(self) -> list[Tensor]:
        return [self.draw(layer) for layer in range(self.shape.num_layers)]


def training_reads(command: TrainCommand, shape: ModelShape, contexts: int, whole: int, shared: bool) -> Reads:
    """Return what training all hashers of a command reads of its `contexts` contexts.

    Starts, repairs and calibration read the first `whole` ones; `shared` is whether processes share a step's rows.
    """
    trained = [recipe for recipe in command.recipes if recipe.trained]
    numbers = ("steps", "rows", "chunk", "max_top", "max_rest", "min_position", "seed")
    schedules: dict[tuple[int, ...], tuple[TrainConfig, set[str]]] = {}
    for recipe in trained or command.recipes[:1]:
        config = training_of(command, recipe, "cpu")
        _, kinds = schedules.setdefault(tuple(getattr(config, name) for name in numbers), (config, set()))
        if trained:
            kinds.add(BY_VARIANT[recipe.variant].target_heads)
    # Target heads by layer: hashers with the same schedule and the same number of target heads draw the same rows.
    draws = [
        (config, [_heads(shape.at(n), kinds) for n in range(shape.num_layers)]) for config, kinds in schedules.values()
    ]
    drawn = [{**{name: getattr(config, name) for name in numbers}, "heads": heads} for config, heads in draws]
    settings = {**drawn[0], "shared": shared} if len(drawn) == 1 else {"draws": drawn, "shared": shared}

    def drawn_in(layer: int) -> Tensor:
        found = [torch.empty(command.steps, 0, dtype=torch.int32)]
        for config, heads in draws:
            found += [rows_of_steps(config, layer, count, command.context, shared) for count in heads[layer]]
        return torch.cat(found, 1)

    most = max(sum(len(heads[layer]) for _, heads in draws) for layer in range(shape.num_layers))
    return Reads(shape, command.context, contexts, whole, command.steps, command.rows * most, settings, drawn_in)


def _heads(shape: ModelShape, kinds: Collection[str]) -> list[int]:
    """Return the distinct head counts of targets of these kinds in a layer."""
    return sorted({shape.num_kv_heads if kind == "kv" else shape.num_query_heads for kind in kinds})


def validation_reads(command: TrainCommand, shape: ModelShape, contexts: int) -> Reads:
    """Return what the evaluation reads of held-out contexts: the same rows in every layer."""
    settings = {name: getattr(command, name) for name in ("first_row", "held_out_rows", "seed")}

    def draw(layer: int) -> Tensor:
        return torch.stack([*rows_of_contexts(command, contexts)]).int()

    return Reads(shape, command.context, contexts, 0, contexts, command.held_out_rows, settings, draw)
