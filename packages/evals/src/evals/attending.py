"""Attach a method to a model for a block, so that all tasks treat a prompt alike."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from sparse_decode import Attachment, Budget
from transformers import PreTrainedModel

from evals.methods import LoadedMethod
from evals.settings import Always


@dataclass
class Attended:
    """What the sparse rows of a block attended to; complete when the block ends."""

    selected: int = 0
    """Tokens attended to, over rows, layers and query heads."""
    visible: int = 0
    """Tokens visible to these rows."""
    empty: float | None = None
    """Share of the sampled rows and heads that drew no token; None for methods that do not sample."""

    @property
    def density(self) -> float:
        """Tokens attended to / tokens visible; 1 if nothing was sparse."""
        return self.selected / self.visible if self.visible else 1.0


@contextlib.contextmanager
def attending(
    model: PreTrainedModel, method: LoadedMethod, budget: Budget, always: Always, prompt: int | None
) -> Generator[Attended]:
    """Use a method's attention inside the block.

    Args:
        budget: tokens per row, including `always.sink` and `always.recent`; dense attention ignores it. A hasher's
            shares divide a `Budget` among layers and heads, as in deployment, but not a `LayerBudget`.
        always: layers that stay dense, in addition to those that the method's hasher names.
        prompt: None makes every row sparse. Otherwise this many first rows are dense and all later ones sparse; see
            `LoadedMethod.selector_after`.
    """
    found, selector = Attended(), method.selector_after(prompt)
    if selector is None:
        yield found
        return
    counting: Any = selector if hasattr(selector, "sampled") else None
    if counting is not None:
        counting.sampled = counting.empty = 0
    start = 0 if prompt is None else prompt
    budget = replace(budget, sink=always.sink, recent=always.recent)
    dense = {*always.dense, *getattr(selector, "dense_layers", ())}
    with Attachment(
        model, selector, budget, dense_layers=dense, sparse_rows=start, remainder=method.remainder, prompt=always.prompt
    ) as attachment:
        yield found
        for selected, visible in attachment.counts().values():
            found.selected += selected
            found.visible += visible
    if counting is not None:
        found.empty = counting.empty / max(counting.sampled, 1)
