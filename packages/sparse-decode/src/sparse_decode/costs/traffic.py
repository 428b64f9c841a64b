"""Bytes that a decode step moves per sequence and KV head: a common measure for different methods."""

from statistics import mean
from typing import NamedTuple

from sparse_decode.budget import LayerBudget
from sparse_decode.unselected.sums import FOLD


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
