"""Which queries of its captures a run reads. This is known before capturing, so no others are stored.

A training step reads all keys of a context and the queries of about 64 rows. The rows follow from the seed and the
schedule (`hashtrain.training.rows`). The first contexts, which starts and calibration read, are stored whole; of every
other context, only the keys and the rows of its steps: 4.8 TB instead of 26 for Llama-3-8B with the paper's schedule.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

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
_DECISIVE = ("steps", "rows", "chunk", "max_top", "max_rest", "min_position", "seed")
"""Settings of a training that decide which rows it draws."""


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

    def stored_in(self, wave: range) -> list[int]:
        """Return the contexts that are stored during a wave of steps (`hashtrain.run.waves`)."""
        read = range(self.contexts) if len(wave) >= self.contexts else (step % self.contexts for step in wave)
        return sorted({*range(min(self.whole, self.contexts)), *read})

    def bytes(self, contexts: Iterable[int]) -> int:
        """Return an upper bound of the bytes that captures of these contexts take: rows drawn twice are stored once."""
        rows = None if self.all_queries else self._drawn
        few = context_bytes(self.shape, self.tokens, _DTYPE, rows, values=False)
        every = context_bytes(self.shape, self.tokens, _DTYPE)
        return sum(every if context < self.whole else few for context in contexts)

    @property
    def _drawn(self) -> int:
        return math.ceil(self.steps / self.contexts) * self.rows

    @cached_property
    def _by_layer(self) -> list[Tensor]:
        return [self.draw(layer) for layer in range(self.shape.num_layers)]


def training_reads(command: TrainCommand, shape: ModelShape, contexts: int, whole: int) -> Reads:
    """Return what training all hashers of a command reads of its `contexts` contexts.

    Starts, the choice of weights and calibration read the first `whole` ones.
    """
    trained = [recipe for recipe in command.recipes if recipe.trained]
    trainings = [(training_of(command, one, "cpu"), BY_VARIANT[one.variant].target_heads) for one in trained]

    def schedules(layer: int) -> dict[tuple[int, ...], TrainConfig]:
        """Hashers with the same schedule and the same number of target heads draw the same rows."""
        heads_of = {"kv": shape.at(layer).num_kv_heads, "query": shape.at(layer).num_query_heads}
        return {(heads_of[of], *(getattr(config, name) for name in _DECISIVE)): config for config, of in trainings}

    def draw(layer: int) -> Tensor:
        found = [torch.empty(command.steps, 0, dtype=torch.int32)]
        found += [rows_of_steps(config, layer, key[0], command.context) for key, config in schedules(layer).items()]
        return torch.cat(found, 1)

    most = max(len(schedules(layer)) for layer in range(shape.num_layers))
    return Reads(shape, command.context, contexts, whole, command.steps, command.rows * most, draw)


def validation_reads(command: TrainCommand, shape: ModelShape, contexts: int) -> Reads:
    """Return what the evaluation reads of held-out contexts: the same rows in every layer."""

    def draw(layer: int) -> Tensor:
        return torch.stack([*rows_of_contexts(command, contexts)]).int()

    return Reads(shape, command.context, contexts, 0, contexts, command.held_out_rows, draw)
