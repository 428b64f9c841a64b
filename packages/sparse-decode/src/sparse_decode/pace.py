"""How many tokens to draft before the next check, from what checks accepted and what steps are predicted to cost.

    tokens(k) = (1 - a^(k + 1)) / (1 - a)          made by a round that drafts k, if each is accepted with chance a
    time(k)   = k draft(n) + check(n, k + 1)       behind a context of n tokens

The k with the most tokens per time is drafted, none if a dense step makes more. Times are counted in bytes, as
`break_even.predicted` does, so that they are the same on every machine: a seed then draws the same tokens whatever else
the machine does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from hashtrain import ModelShape
from transformers import DynamicCache, PreTrainedModel

from sparse_decode.break_even import CODE, EARNS, FAR, NEVER
from sparse_decode.budget import Budget

HOST = 6 << 20
"""Bytes of keys and values that a dense step reads in the time that a layer takes for everything but reading weights,
keys and values. This and the next three are of the CPU; docs/log.md has the measurements."""
SEVERAL, ROW = 0.15, 0.03
"""What a pass of several rows takes more than one of one row outside of attention, as a share of that: at all, and for
each row behind the first."""
LINE = 0.47
"""What the products of one query head and row take in dense attention, over the reading of the keys and values."""
GUESS, TRUST = 0.8, 4.0
"""The chance that a drafted token is accepted before anything is known, and how many tokens that guess counts for."""
FORGETS = 0.95
"""What a round leaves of the weight of those before it."""
PROBE = 64
"""Rounds without a draft after which one token is drafted again, where drafts would pay if they were accepted."""
_SURE = 0.95  # a chance of acceptance that can be hoped for


def _weights(model: Any) -> int:
    """Return the bytes of weights that a step reads: of embeddings that no logits are made with, a row."""
    read = sum(x.nbytes for x in model.parameters())
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    return read if outputs is None or inputs.weight is outputs.weight else read - inputs.weight.nbytes


@dataclass(frozen=True)
class LayerCost:
    """Bytes that a step reads in one layer, for each token it sees."""

    dense: float
    sparse: float
    group: int
    """Query heads of a KV head."""
    below: int
    """Context below which its drafts are dense, too."""
    window: int | None = None
    """The most tokens that it sees."""

    def read(self, n: int, rows: int = 1) -> float:
        """Return what dense attention of so many rows takes."""
        more = (1 + LINE * self.group * rows) / (1 + LINE * self.group)
        return min(n, self.window or n) * self.dense * more


class Costs:
    """Times of steps in bytes read.

    Args: layers: those that attend; weights: bytes of a pass outside of attention, the host's share among them.
    """

    def __init__(self, layers: Sequence[LayerCost], weights: float):
        self._layers = tuple(layers)
        self._weights = weights

    @classmethod
    def predicted(cls, model: PreTrainedModel, budgets: Mapping[int, Budget], heads: Sequence[ModelShape]) -> Costs:
        """Count the bytes of a model on the CPU.

        Args: budgets: of its sparse layers, whose `dense_below` are numbers; heads: the shape of each layer.
        """
        held: list[Any] = DynamicCache(config=model.config).layers
        layers: list[LayerCost] = []
        for layer, shape in enumerate(heads):
            dense, budget = 2.0 * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize, budgets.get(layer)
            sparse, below = dense, NEVER
            if budget is not None:
                sparse, below = shape.num_kv_heads * CODE + FAR * budget.fraction * dense, cast(int, budget.dense_below)
            window = getattr(held[layer], "sliding_window", None) if layer < len(held) else None
            layers.append(LayerCost(dense, sparse, shape.group, below, window))
        return cls(layers, _weights(model) + HOST * len(layers))

    def draft(self, n: int) -> float:
        """Return what drafting a token behind n others takes."""
        each = (layer.read(n) if n < layer.below else EARNS + n * layer.sparse for layer in self._layers)
        return self._weights + sum(each)

    def check(self, n: int, rows: int) -> float:
        """Return what a dense pass over so many rows behind n tokens takes."""
        more = 1 + SEVERAL * (rows > 1) + ROW * (rows - 1)
        return self._weights * more + sum(layer.read(n, rows) for layer in self._layers)


class Pace:
    """Chooses how many tokens one generation drafts next.

    Args:
        most: never more than this; costs: None if nobody knows them, where a draft is taken to cost half of a check.
        stops: whether it may draft none from there on; otherwise it drafts one at least.
        below: context below which it drafts none, because its drafts would be dense.
    """

    def __init__(self, most: int, costs: Costs | None, stops: bool, below: int = 0):
        self._most, self._costs, self._stops, self._below = most, costs, stops, below
        self._accepted = self._refused = 0.0
        self._idle = 0

    @property
    def chance(self) -> float:
        """The chance that the next drafted token is accepted."""
        return (self._accepted + GUESS * TRUST) / (self._accepted + self._refused + TRUST)

    def next(self, n: int) -> int:
        """Return how many tokens to draft behind n tokens."""
        if n < self._below:
            return 0
        best, gain = self._best(n, self.chance)
        if gain > 1 or not self._stops:
            self._idle = 0
            return best
        self._idle += 1
        if self._idle <= PROBE or not self.could(n):
            return 0
        self._idle = 0
        return 1

    def could(self, n: int) -> bool:
        """Whether drafts behind n tokens pay if nearly all of them are accepted."""
        return n >= self._below and (not self._stops or self._best(n, _SURE)[1] > 1)

    def learn(self, drafted: int, accepted: int) -> None:
        """Take notice of a check: how many tokens it was given, and how many of the first of them it accepted."""
        self._accepted = FORGETS * self._accepted + accepted
        self._refused = FORGETS * self._refused + (accepted < drafted)

    def _best(self, n: int, chance: float) -> tuple[int, float]:
        """Return the number of drafted tokens that pays most, 1 or more, and its speed over a dense step's."""
        found, tokens = (1, 0.0), 1.0
        for k in range(1, self._most + 1):
            tokens += chance**k
            if self._costs is None:
                gain = tokens / (k / 2 + 1)  # a guess
            else:
                time = k * self._costs.draft(n) + self._costs.check(n, k + 1)
                gain = tokens * self._costs.check(n, 1) / time
            if gain > found[1]:
                found = k, gain
        return found
