"""What a step costs, predicted: the bytes that it moves, and from which length on sparse steps are the faster ones."""

import math

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
