"""Bytes that a decode step reads per sequence and KV head: a common measure for different methods."""

from __future__ import annotations

import math
from typing import NamedTuple

from sparse_decode.budget import Budget


class StepBytes(NamedTuple):
    """Bytes read by a decode step."""

    codes: float
    keys_and_values: float
    state: float
    """Sums of the remainder: two vectors in float64 and a matrix in float32."""
    dense: float
    """Bytes that dense attention reads: all keys and values."""

    @property
    def share(self) -> float:
        """All bytes read, relative to dense attention."""
        return (self.codes + self.keys_and_values + self.state) / self.dense


def step_bytes(
    n: int, budget: Budget, head_dim: int, bits: int = 128, remainder: bool = True, element: int = 2
) -> StepBytes:
    """Count the bytes that a decode step at context length n reads.

    Args:
        n: visible tokens; budget: of the layer; remainder: whether the sums of the remainder are read.
        head_dim: of keys and values; bits: of a code, 0 without codes; element: bytes per number of keys and values.
    With a shortlist: 32 bits of every code, and all bits of the codes on the list. Unused parts of cache lines or
    sectors are not counted. The state is counted once, although a step also writes it.
    """
    count, word = budget.count_row(n), 4
    codes = n * bits / 8
    if budget.shortlist is not None and bits:
        codes = n * word + min(n, budget.shortlist * count) * bits / 8
    state = remainder * (2 * 8 * head_dim + 4 * head_dim**2)
    values = math.ceil(count * budget.values)
    return StepBytes(codes, (count + values) * head_dim * element, state, 2 * n * head_dim * element)
