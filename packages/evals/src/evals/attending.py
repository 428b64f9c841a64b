"""Attention by a method inside a block: where tasks that judge methods attach, so that all serve a prompt alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sparse_decode import Budget, attach
from transformers import PreTrainedModel

from evals.methods import LoadedMethod, Sampling
from evals.plan import Always


@dataclass
class Attended:
    """What the sparse rows of a block attended to, known when it ends."""

    selected: int = 0
    """Tokens attended to, over rows, layers and query heads."""
    visible: int = 0
    """Tokens that these rows saw."""
    empty: float | None = None
    """Share of the sampled rows and heads that drew nothing; None for methods that do not sample."""

    @property
    def density(self) -> float:
        """Tokens attended to / tokens visible; 1 where nothing was sparse."""
        return self.selected / self.visible if self.visible else 1.0


@contextlib.contextmanager
def attending(
    model: PreTrainedModel, method: LoadedMethod, budget: Budget, always: Always, prompt: int | None
) -> Iterator[Attended]:
    """Attend by a method inside the block.

    Args:
        budget: tokens per row, `always.sink` and `always.recent` among them; dense attention heeds none.
        always: layers that stay dense, beside those that the method's hasher names.
        prompt: None makes every row sparse. With a number of tokens the rows of these first ones are dense, every later
            row is sparse, and the method is told: see `LoadedMethod.selector_after`.
    """
    found, selector = Attended(), method.selector_after(prompt)
    if selector is None:
        yield found
        return
    if isinstance(selector, Sampling):
        selector.sampled = selector.empty = 0
    start = 0 if prompt is None else prompt
    budget = replace(budget, sink=always.sink, recent=always.recent, shortlist=always.shortlist)
    dense = {*range(always.dense_layers), *always.dense_at, *getattr(selector, "dense_layers", ())}
    with attach(
        model, selector, budget, dense_layers=dense, sparse_rows=start, remainder=method.remainder
    ) as attachment:
        yield found
        for selected, visible in attachment.counts().values():
            found.selected += selected
            found.visible += visible
    if isinstance(selector, Sampling):
        found.empty = selector.empty / max(selector.sampled, 1)
