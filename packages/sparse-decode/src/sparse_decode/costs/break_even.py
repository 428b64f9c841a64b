"""The break-even: the context length from which sparse decode steps are faster than dense ones."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hashtrain import ModelShape
from transformers.cache_utils import DynamicLayer

from sparse_decode.attention.attend_inputs import Inputs
from sparse_decode.budget import Budget
from sparse_decode.caches.cache_types import carry_codes
from sparse_decode.layer.blocks import AttentionArgs, RowRule
from sparse_decode.layer.dense_step import attend_densely, flash_attention
from sparse_decode.layer.plan import Backend, LayerPlan
from sparse_decode.select import Selector

LENGTHS = tuple(256 << i for i in range(10))
"""Context lengths that are timed, 256 to 131,072 tokens."""
NEVER = 1 << 40
"""Longer than any context."""
EARNS = 11 << 18
"""Fixed cost of a sparse step (hashing, search, selection), as the bytes of keys and values that a dense step reads in
that time: 2.75 MiB, slightly more than the break-even of whole steps on the CPU."""
CODE = 16
"""Bytes of a code, per KV head."""
FAR = 2
"""Reading scattered rows takes this many times as long as reading consecutive ones."""
_REPEATS = 5
_MAX_BYTES = 1 << 28  # of keys and values: longer contexts are not timed


def predicted(heads: ModelShape, budget: Budget, dtype: torch.dtype) -> int:
    """Predict the break-even of one layer on the CPU from the bytes that sparse and dense steps read."""
    dense = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    saved = dense - heads.num_kv_heads * CODE - FAR * budget.mean_fraction * dense
    return math.ceil(EARNS / saved) if saved > 0 else NEVER


def break_even(
    module: Any, layer: int, heads: ModelShape, selector: Selector, budget: Budget, dtype: torch.dtype, device: Any,
    backend: Backend = "gather",
) -> int:  # fmt: skip
    """Time decode steps of one layer, of this shape, dtype and device of its keys, at growing contexts.

    Returns: the first length at which the sparse step was no slower; twice the longest one timed if there is none.
    """
    plan = LayerPlan(layer, selector, replace(budget, dense_below=0), RowRule(None, 1), backend=backend)
    longest = LENGTHS[0]
    for n in LENGTHS:
        if n > LENGTHS[0] and 2 * heads.num_kv_heads * n * heads.head_dim * dtype.itemsize > _MAX_BYTES:
            break
        sparse, dense = (_seconds(step, torch.device(device)) for step in _steps(module, plan, heads, n, dtype, device))
        if sparse <= dense:
            return n
        longest = n
    return 2 * longest


@torch.no_grad()
def _steps(
    module: Any, plan: LayerPlan, heads: ModelShape, n: int, dtype: torch.dtype, device: Any
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that run a sparse and a dense decode step with a context of `n` random tokens."""
    draw, dim = torch.Generator().manual_seed(n), heads.head_dim
    q = torch.randn(1, heads.num_query_heads, 1, dim, generator=draw).to(device, dtype)
    k, v = torch.randn(2, 1, heads.num_kv_heads, n, dim, generator=draw).to(device, dtype)
    held: Any = DynamicLayer()
    k, v = held.update(k, v)
    if plan.selector.needs_codes:
        carry_codes(held, plan.encoder)
        k, v = held.keys, held.values

    def sparse() -> None:
        if plan.selector.needs_codes:
            held._codes.truncate(n - 1)  # the step hashes its own key, the last one
        if plan.step(held, Inputs(q, k, v, module.scaling)) is None:
            codes = held.codes if plan.selector.needs_codes else None
            plan.attend(AttentionArgs(q, k, v, None, codes, None, module.scaling, None, None))

    dense = flash_attention if plan.backend == "flash" else attend_densely
    return sparse, lambda: dense(module, q, k, v, None, scaling=module.scaling, dropout=0.0)


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a step in seconds, after a warm-up."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    step()
    wait()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        step()
        wait()  # else only the launches would be timed
        times.append(time.perf_counter() - began)
    return statistics.median(times)
