"""How many tokens to draft before the next check, from the acceptance so far and the predicted cost of steps.

    tokens(k) = (1 - a^(k + 1)) / (1 - a)          expected tokens of a round with k drafts, each accepted with chance a
    time(k)   = k draft(n) + check(n, k + 1)       at a context length of n

The k with the most tokens per time is drafted; none, if a dense step makes more tokens per time. Times are counted in
bytes read, as in `break_even.predicted`. So they are the same on every machine and at any load, and a seed always
samples the same tokens. A clock would break that: the number of drafts decides which random numbers are drawn.

Assumed is a CPU on which a dense step is bound by memory and a check also by products, as on an AMD EPYC without AMX in
November 2026 (docs/log.md, "exact mode"). `benchmarks/exact_speed.py` measures, on any machine, what these constants
predict there: the cost of drafts and checks, and the gain over dense steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from hashtrain import ModelShape
from transformers import DynamicCache, PreTrainedModel

from sparse_decode.budget import Budget
from sparse_decode.costs.break_even import CODE, EARNS, FAR, NEVER

HOST = 6 << 20
"""Time of a layer apart from reading weights, keys and values; in bytes of keys and values that a dense step reads in
that time. This and the next three constants were measured on a CPU; see docs/log.md."""
SEVERAL, ROW = 0.15, 0.03
"""Extra time of a pass over several rows outside of attention, relative to one row: fixed, and per further row."""
LINE = 0.47
"""Time of the products of one query head and row in dense attention, relative to reading the keys and values. On
processors that multiply pairs of bfloat16 (AVX512_BF16) it is about half of that, so fewer tokens are drafted there
than would be best; see docs/log.md."""
GUESS, TRUST = 0.8, 4.0
"""Prior of the acceptance: its mean, and its weight in tokens."""
FORGETS = 0.95
"""Factor by which each round discounts the counts of earlier rounds."""
PROBE = 64
"""Rounds without drafts after which one token is drafted again, if drafting could save time at a high acceptance."""
_SURE = 0.95  # that high acceptance


def _weights(model: Any) -> int:
    """Return the bytes of weights that a step reads; input embeddings count only if they also compute the logits."""
    read = sum(x.nbytes for x in model.parameters())
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    return read if outputs is None or inputs.weight is outputs.weight else read - inputs.weight.nbytes


@dataclass(frozen=True)
class LayerCost:
    """Bytes that a step reads in one layer, per token of context."""

    dense: float
    sparse: float
    group: int
    """Query heads per KV head."""
    below: int
    """Context length below which drafts are dense, too."""
    window: int | None = None
    """Length of the sliding window."""

    def read(self, n: int, rows: int = 1) -> float:
        """Return the time of dense attention of `rows` rows at context length n, in bytes."""
        more = (1 + LINE * self.group * rows) / (1 + LINE * self.group)
        return min(n, self.window or n) * self.dense * more


@dataclass(frozen=True)
class Costs:
    """Predicted times of steps, in bytes read."""

    layers: Sequence[LayerCost]
    weights: float
    """Bytes of a pass outside of attention, including `HOST`."""

    @classmethod
    def predicted(cls, model: PreTrainedModel, budgets: Mapping[int, Budget], heads: Sequence[ModelShape]) -> "Costs":
        """Predict the costs of a model on the CPU.

        Args: budgets: of its sparse layers, with numbers in `dense_below`; heads: the shape of each layer.
        """
        held: list[Any] = DynamicCache(config=model.config).layers
        layers: list[LayerCost] = []
        for layer, shape in enumerate(heads):
            dense, budget = 2.0 * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize, budgets.get(layer)
            sparse, below = dense, NEVER
            if budget is not None:
                sparse = shape.num_kv_heads * CODE + FAR * budget.mean_fraction * dense
                below = cast(int, budget.dense_below)
            window = getattr(held[layer], "sliding_window", None) if layer < len(held) else None
            layers.append(LayerCost(dense, sparse, shape.group, below, window))
        return cls(layers, _weights(model) + HOST * len(layers))

    def draft(self, n: int) -> float:
        """Return the time of drafting a token at context length n."""
        layers = (layer.read(n) if n < layer.below else EARNS + n * layer.sparse for layer in self.layers)
        return self.weights + sum(layers)

    def check(self, n: int, rows: int) -> float:
        """Return the time of a dense pass over `rows` rows at context length n."""
        more = 1 + SEVERAL * (rows > 1) + ROW * (rows - 1)
        return self.weights * more + sum(layer.read(n, rows) for layer in self.layers)


class Pace:
    """Chooses how many tokens one generation drafts next, at most `most`.

    Args: costs: predicted times; None: assume that a draft takes half a check's time; stops: whether it may draft none,
        else at least one token from context length `below` on; below it drafts would be dense, and there are none.
    """

    def __init__(self, most: int, costs: Costs | None, stops: bool, below: int = 0):
        self._most, self._costs, self._stops, self._below = most, costs, stops, below
        self._accepted = self._refused = 0.0
        self._idle = 0

    @property
    def chance(self) -> float:
        """Estimated probability that the next drafted token is accepted."""
        return (self._accepted + GUESS * TRUST) / (self._accepted + self._refused + TRUST)

    def next(self, n: int) -> int:
        """Return how many tokens to draft at context length n."""
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
        """Whether drafting at context length n could save time if nearly all drafts were accepted."""
        return n >= self._below and (not self._stops or self._best(n, _SURE)[1] > 1)

    def learn(self, drafted: int, accepted: int) -> None:
        """Record a check: the number of drafts, and the length of the accepted prefix."""
        self._accepted = FORGETS * self._accepted + accepted
        self._refused = FORGETS * self._refused + (accepted < drafted)

    def _best(self, n: int, chance: float) -> tuple[int, float]:
        """Return the best number of drafts, 1 or more, and its speed relative to dense steps."""
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
