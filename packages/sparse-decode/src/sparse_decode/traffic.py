"""Bytes that a decode step reads of one sequence and KV head, counted: the measure of methods that differ in kind."""

from __future__ import annotations

import math
from typing import NamedTuple

from sparse_decode.budget import Budget


class StepBytes(NamedTuple):
    """Bytes by what they are."""

    codes: float
    keys_and_values: float
    state: float
    """Running sums of the remainder: two of float64 and a product of float32."""
    dense: float
    """What dense attention reads: all keys and values."""

    @property
    def share(self) -> float:
        """Of what dense attention reads."""
        return (self.codes + self.keys_and_values + self.state) / self.dense


def step_bytes(
    n: int, budget: Budget, head_dim: int, bits: int = 128, remainder: bool = True, element: int = 2
) -> StepBytes:
    """Count what a step reads that sees n tokens.

    Args:
        head_dim: of keys and values; bits: of a code, 0 for a method without; element: bytes of a number of theirs.
    With a shortlist 32 bits of every code and the whole of those on the list; what a cache line or a sector holds
    beside is not counted. The state is counted once, though a step writes it, too.
    """
    count, word = budget.count_row(n), 4
    codes = n * bits / 8
    if budget.shortlist is not None and bits:
        codes = n * word + min(n, budget.shortlist * count) * bits / 8
    state = remainder * (2 * 8 * head_dim + 4 * head_dim**2)
    values = math.ceil(count * budget.values)
    return StepBytes(codes, (count + values) * head_dim * element, state, 2 * n * head_dim * element)
