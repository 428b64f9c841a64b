"""What a request's decode steps read, told by its lengths alone: the budget looks at nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sparse_decode.budget import Budget


class Spent(NamedTuple):
    """Over the decode steps of one request, for one query head of one sparse layer."""

    read: int
    """Tokens read."""
    seen: int
    """Tokens seen: `read / seen` is the density."""
    steps: int
    """Decode steps."""
    sparse: int
    """Those of them from the break-even on, the budget's `dense_below`: the others read all they see."""

    @classmethod
    def of(cls, budget: Budget, prompt: int, generated: int) -> Spent:
        """Count what a request reads.

        Args:
            prompt, generated: its tokens. The first generated one is made by the prompt's last row, each other one by a
                decode step of its own, which sees all tokens before it. After a preemption all that a request has is
                read again as a prompt: its next token counts here as a decode step, though it is none.
        """
        lengths = torch.arange(prompt + 1, prompt + max(generated, 1))
        below = int((lengths < int(budget.dense_below)).sum())
        return cls(int(budget.count(lengths).sum()), int(lengths.sum()), len(lengths), len(lengths) - below)
