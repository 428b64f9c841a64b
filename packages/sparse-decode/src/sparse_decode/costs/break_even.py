"""The break-even: the context length from which sparse decode steps are faster than dense ones."""

import math

import torch
from hashtrain import ModelShape

from sparse_decode.budget import LayerBudget

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
