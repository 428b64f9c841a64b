"""What a step costs, predicted: the bytes that it moves, and from which length on sparse steps are the faster ones."""

import math
from statistics import mean
from typing import NamedTuple

import torch
from hashtrain import ModelShape

from sparse_decode.budget import LayerBudget
from sparse_decode.sums import FOLD

NEVER = 1 << 40
"""Longer than any context."""
EARNS = 11 << 18
"""Fixed cost of a sparse step (hashing, search, selection), as the bytes of keys and values that a dense step reads in
that time: 2.75 MiB, slightly more than the break-even of whole steps on the CPU."""
CODE = 16
"""Bytes of a code, per KV head."""
FAR = 2
"""Reading scattered rows takes this many times as long as reading consecutive ones."""


def predicted(heads: ModelShape, budget: LayerBudget, dtype: torch.dtype) -> int:
    """Predict the break-even of one layer on the CPU from the bytes that sparse and dense steps read."""
    dense = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    saved = dense - heads.num_kv_heads * CODE - FAR * budget.mean_fraction * dense
    return math.ceil(EARNS / saved) if saved > 0 else NEVER


class StepBytes(NamedTuple):
    """Bytes moved by a decode step."""

    codes: float
    keys_and_values: float
    state: float
    """Sums of the remainder, read and written: `state_bytes`."""
    dense: float
    """Bytes that dense attention reads: all keys and values."""

    @property
    def share(self) -> float:
        """All bytes moved, relative to dense attention."""
        return (self.codes + self.keys_and_values + self.state) / self.dense


def state_bytes(head_dim: int, element: int = 2) -> float:
    """Count the bytes of the remainder's sums that a step reads and writes, on average over `FOLD` steps.

    Each step reads two vectors in float64, a matrix in 8 bits with a factor a row, and the keys and values of the
    tokens that are not in the sums yet. Every `FOLD` steps these tokens are read once more, the vectors and a matrix in
    float32 are read and written, and the matrix in 8 bits is written.
    """
    vectors, rounded = 2 * 8 * head_dim, head_dim**2 + 4 * head_dim
    tokens = 2 * head_dim * element
    added = 2 * (vectors + 4 * head_dim**2) + rounded + FOLD * tokens
    return vectors + rounded + (FOLD + 1) / 2 * tokens + added / FOLD


def step_bytes(
    n: int, budget: LayerBudget, head_dim: int, bits: int = 128, remainder: bool = True, element: int = 2
) -> StepBytes:
    """Count the bytes that a decode step at context length n requests, and those of the remainder that it writes.

    By head, these are the means over KV heads.

    Args:
        n: visible tokens; budget: of the layer; remainder: whether the sums of the remainder are used.
        head_dim: of keys and values; bits: of a code, 0 without codes; element: bytes per number of keys and values.
    Unused parts of cache lines or sectors are not counted, nor are the new token's own key, value and code.
    """
    state = state_bytes(head_dim, element) if remainder else 0
    read = 2 * mean(budget.count_heads(n)) * head_dim * element
    return StepBytes(n * bits / 8, read, state, 2 * n * head_dim * element)
