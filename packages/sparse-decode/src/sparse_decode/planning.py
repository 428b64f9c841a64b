"""What `attach` decides and refuses before it changes a model: which layers are sparse, for which heads and budgets."""

# Configs of transformers have no types.
# pyright: reportUnknownMemberType=false

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from hashcore.cuda.program import require_compiler
from hashtrain import ModelShape
from hashtrain.models import text_decoder
from transformers import PreTrainedModel

from sparse_decode.budget import Budget, LayerBudget, Tally
from sparse_decode.intervals import Memo
from sparse_decode.model import Attention, require_kernels, require_own_keys, require_whole, sparse_modules
from sparse_decode.select import AttendingSelector, HashSelector, KeyQueryHasher, Selector
from sparse_decode.step import SparseLayer

Modules = Mapping[int, Attention]
NEVER = 1 << 40
"""Longer than any context."""
STEP_COST_BYTES = 11 << 18
"""Fixed cost of a sparse step (hashing, search, selection), as the bytes of keys and values that a dense step reads in
that time: 2.75 MiB, slightly more than the break-even of whole steps on the CPU."""
CODE_BYTES = 16
"""Bytes of a code, per KV head."""
SCATTERED_READ_FACTOR = 2
"""Reading scattered rows takes this many times as long as reading consecutive ones."""


def plan_layers(
    model: PreTrainedModel, hasher: KeyQueryHasher | Selector | None, budget: Budget | None,
    dense_layers: Collection[int], start: int | None, on_host: bool, remainder: bool,
) -> tuple[Modules, dict[int, SparseLayer]]:  # fmt: skip
    """Return the attention modules to make sparse and their sparse layers, by layer; none without a selector.

    Raises: ValueError if the model, the selector or a budget cannot be used.
    """
    if hasher is None:
        return {}, {}
    chosen = as_selector(hasher)
    chosen.require_match(text_decoder(model).config)
    if on_host and not chosen.needs_codes:
        kind = type(chosen).__name__
        raise ValueError(f'kv="host" needs a selector that works on codes, got {kind}; use kv="device"')
    modules = sparse_modules(model, dense_layers)
    require_whole(modules)
    shape = ModelShape.of(text_decoder(model).config)
    if not isinstance(chosen, AttendingSelector):
        require_kernels(model, modules, shape, getattr(chosen, "per_query_head", False))
    elif chosen.needs_codes and model.device.type == "cuda":
        require_compiler()
    if on_host:
        require_own_keys(model)
    # The prediction is for CPUs: it compares the bytes of codes, keys and values that are read.
    foreseen = budget is None and start is None and chosen.needs_codes and not on_host
    foreseen = foreseen and model.device.type == "cpu"
    budgets = _budgets(modules, chosen, budget or Budget(), shape, model.dtype if foreseen else None)
    return modules, _layers(modules, budgets, chosen, start, remainder, shape)


def require_arguments(budget: object, dense_layers: object, sparse_rows: object, kv: object, prompt: object) -> None:
    """Raise ValueError if these arguments of `Attachment` are of another type or out of range."""
    if not isinstance(budget, Budget | None):
        raise ValueError(f"a budget must be a Budget, got {budget!r}; write Budget(fraction=0.02), for example")
    if kv not in ("device", "host"):
        raise ValueError(f'kv must be "device" or "host", got {kv!r}')
    if prompt not in ("exact", "sparse"):
        raise ValueError(f'prompt must be "exact" or "sparse", got {prompt!r}')
    given = cast("Collection[object]", dense_layers) if isinstance(dense_layers, Collection) else [dense_layers or 0]
    if any(not isinstance(layer, int) or layer < 0 for layer in given):
        raise ValueError(f"dense_layers must be an integer of 0 or more, or a set of them, got {dense_layers!r}")
    if sparse_rows is not None and (not isinstance(sparse_rows, int) or sparse_rows < 0):
        raise ValueError(f"sparse_rows must be None or an integer of 0 or more, got {sparse_rows!r}")


def as_selector(selector: KeyQueryHasher | Selector) -> Selector:
    """Return a selector as it is, but for one by hashes a copy, whose placed weights are this attachment's own.

    Raises: ValueError for what is neither a selector nor a hasher.
    """
    if isinstance(selector, HashSelector):
        return copy.copy(selector)
    if hasattr(selector, "select"):
        return selector  # pyright: ignore[reportReturnType]
    if hasattr(selector, "encode_queries"):
        return HashSelector(selector)  # pyright: ignore[reportArgumentType]
    got = f"got {type(selector).__name__}"
    if isinstance(selector, str | Path):
        got = f"got the path {selector}; read it first with hashtrain.Hasher.from_pretrained"
    raise ValueError(f"hasher must be a hasher with encode_keys and encode_queries, or a Selector, {got}")


def _budgets(
    modules: Modules, selector: Selector, budget: Budget, shape: ModelShape, foreseen: torch.dtype | None
) -> dict[int, LayerBudget]:
    """Return the budget of each sparse layer: a `LayerBudget` as it is, another one by the shares that a hasher has.

    Args: foreseen: the type of keys, if short contexts stay dense; None: sparse steps from the first token on.
    """
    hashes, per_query_head = isinstance(selector, HashSelector), getattr(selector, "per_query_head", False)
    by_layer = getattr(selector, "layer_shares", ())
    by_head = getattr(selector, "head_shares", ()) if hashes else ()
    mean = sum(by_layer[layer] for layer in modules) / len(modules) if by_layer else 1.0
    found = dict[int, LayerBudget]()
    for layer in modules:
        heads = shape.at(layer)
        sets, repeats = (heads.num_query_heads, heads.group) if per_query_head else (heads.num_kv_heads, 1)
        own = budget
        if own.fraction == 1:  # everything: there is nothing to divide
            own = LayerBudget.like(own)
        if not isinstance(own, LayerBudget):
            each = tuple(share for share in by_head[layer] for _ in range(repeats)) if by_head else ()
            fraction = min(1.0, own.fraction * (by_layer[layer] / mean if by_layer else 1.0))
            own = LayerBudget.like(own, fraction=fraction, by_head=each)
        if own.by_head and not hashes:
            raise ValueError(f"a budget by head needs a hasher, got {type(selector).__name__}; leave by_head out")
        if own.by_head and len(own.by_head) != sets:
            raise ValueError(f"by_head must have {sets} shares in layer {layer}, got {len(own.by_head)}")
        found[layer] = replace(own, dense_below=predicted(heads, own, foreseen)) if foreseen else own
    return found


def predicted(heads: ModelShape, budget: LayerBudget, dtype: torch.dtype) -> int:
    """Predict the break-even of one layer on the CPU from the bytes that sparse and dense steps read."""
    dense = 2 * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    saved = dense - heads.num_kv_heads * CODE_BYTES - SCATTERED_READ_FACTOR * budget.mean_fraction * dense
    return math.ceil(STEP_COST_BYTES / saved) if saved > 0 else NEVER


def _layers(
    modules: Modules, budgets: Mapping[int, LayerBudget], selector: Selector, start: int | None, remainder: bool,
    shape: ModelShape,
) -> dict[int, SparseLayer]:  # fmt: skip
    coefficients = getattr(selector, "remainder", None) if remainder else None
    found, memo, shared = dict[int, SparseLayer](), Memo(), dict[Any, Tally]()
    for layer, budget in budgets.items():
        fitted = None if coefficients is None else coefficients(layer)
        if fitted is not None and isinstance(selector, AttendingSelector):
            raise ValueError(
                "the remainder is fitted to softmax attention over a selection, got "
                f"{type(selector).__name__}, which has its own attention; attach with remainder=False"
            )
        device = modules[layer].device
        if device is None or device.type == "meta":  # of a layer that is loaded only when called
            device = torch.device("cpu")
        counts = shared.setdefault((budget, device, shape.at(layer).num_query_heads), Tally(device))
        found[layer] = SparseLayer(layer, selector, budget, start, fitted, memo, counts, device)
    return found
