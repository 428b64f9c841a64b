"""What `attach` decides and refuses before it changes a model: which layers are sparse, for which heads and budgets."""

# Configs of transformers have no types.
# pyright: reportUnknownMemberType=false

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from hashcore.cuda.program import require_compiler
from hashtrain import ModelShape
from hashtrain.models import text_decoder
from torch import Tensor
from transformers import PreTrainedModel

from sparse_decode.budget import Budget, LayerBudget, Tally
from sparse_decode.costs import predicted
from sparse_decode.hashers import KeyQueryHasher
from sparse_decode.intervals import Memo
from sparse_decode.model import Attention, require_kernels, require_own_keys, require_whole, sparse_modules
from sparse_decode.select import AttendingSelector, HashSelector, Selector
from sparse_decode.step import RowRule, SparseLayer

Modules = Mapping[int, Attention]
Budgets = Mapping[int, LayerBudget]
HeadsOf = Callable[[int], ModelShape]
"""The heads of a layer, by its index."""


@dataclass(frozen=True)
class Options:
    """The arguments of `attach` after its model and its selector, checked one by one."""

    budget: LayerBudget
    dense_layers: Collection[int]
    rule: RowRule
    on_host: bool
    remainder: bool
    prompt: str = "exact"


@dataclass
class Planned:
    """The sparse layers of an attachment: their modules and plans. Attributes: break_even: as in `Attachment`."""

    modules: dict[int, Attention] = field(default_factory=dict[int, Attention])
    plans: dict[int, SparseLayer] = field(default_factory=dict[int, SparseLayer])
    break_even: int | None = None


def plan_layers(model: PreTrainedModel, selector: KeyQueryHasher | Selector | None, how: Options) -> Planned:
    """Plan the sparse layers of a model; there are none without a selector.

    Raises: ValueError if the model, the selector or a budget cannot be used.
    """
    if selector is None:
        return Planned()
    chosen = as_selector(selector)
    chosen.require_match(text_decoder(model).config)
    if how.on_host and not chosen.needs_codes:
        kind = type(chosen).__name__
        raise ValueError(f'kv="host" needs a selector that works on codes, got {kind}; use kv="device"')
    modules = sparse_modules(model, how.dense_layers)
    require_whole(modules)
    shape = ModelShape.of(text_decoder(model).config)
    if not isinstance(chosen, AttendingSelector):
        require_kernels(model, modules, shape, getattr(chosen, "per_query_head", False))
    elif chosen.needs_codes and model.device.type == "cuda":
        require_compiler()
    if how.on_host:
        require_own_keys(model)
    budgets = divided(dict.fromkeys(modules, how.budget), chosen, shape.at)
    if any(x.by_head for x in budgets.values()) and not isinstance(chosen, HashSelector):
        raise ValueError(f"a budget by head needs a hasher, got {type(chosen).__name__}; leave by_head out")
    budgets, even = _settled(model, budgets, shape.at, chosen, how)
    return Planned(modules, _plans(modules, budgets, chosen, how, shape.at), even)


def require_rows(dense_layers: object, sparse_rows: object) -> None:
    """Raise ValueError if these arguments of `attach_rows` are out of range."""
    given = cast("Collection[object]", dense_layers) if isinstance(dense_layers, Collection) else [dense_layers or 0]
    if any(not isinstance(layer, int) or layer < 0 for layer in given):
        raise ValueError(f"dense_layers must be an integer of 0 or more, or a set of them, got {dense_layers!r}")
    if sparse_rows is not None and (not isinstance(sparse_rows, int) or sparse_rows < 0):
        raise ValueError(f"sparse_rows must be None or an integer of 0 or more, got {sparse_rows!r}")


def as_selector(selector: KeyQueryHasher | Selector) -> Selector:
    """Return a selector as it is, and a hasher as a selector. Raises: ValueError for anything else."""
    if hasattr(selector, "select"):
        return selector  # pyright: ignore[reportReturnType]
    if hasattr(selector, "encode_queries"):
        return HashSelector(selector)  # pyright: ignore[reportArgumentType]
    got = f"got {type(selector).__name__}"
    if isinstance(selector, str | Path):
        got = f"got the path {selector}; read it first with hashtrain.Hasher.from_pretrained"
    raise ValueError(f"hasher must be a hasher with encode_keys and encode_queries, or a Selector, {got}")


def as_budget(budget: Budget | None, selector: object, decode: bool) -> LayerBudget:
    """Return the budget of all layers, divided if the hasher has shares; decode: whether only decode steps are sparse.

    Without a budget, short contexts stay dense. A `LayerBudget` is taken as it is.
    """
    if isinstance(budget, LayerBudget):
        return budget
    if not isinstance(budget, Budget | None):
        raise ValueError(f"a budget must be a Budget, got {budget!r}; write Budget(fraction=0.02), for example")
    layers, heads = (bool(getattr(selector, f"{kind}_shares", ())) for kind in ("layer", "head"))
    hashes = isinstance(selector, HashSelector) or not hasattr(selector, "select")  # as `as_selector` tells hashers
    below = "predicted" if budget is None and decode else 0
    return LayerBudget.like(budget or Budget(), by_layer=layers, by_head=heads and hashes, dense_below=below)


def divided(budgets: Budgets, selector: Selector, heads: HeadsOf) -> dict[int, LayerBudget]:
    """Return the budgets of all sparse layers, those by layer or by head with the shares of the selector's hasher.

    Raises: ValueError if it has no shares to go by, or the shares given are not those of its index sets.
    """
    layers, by_head = (_shares(kind, budgets, selector) for kind in ("layer", "head"))
    mean, found = sum(layers[layer] for layer in budgets) / len(budgets) if layers else 1.0, dict[int, LayerBudget]()
    for layer, own in budgets.items():
        shape, per_query_head = heads(layer), getattr(selector, "per_query_head", False)
        sets, repeats = (shape.num_query_heads, shape.group) if per_query_head else (shape.num_kv_heads, 1)
        each = tuple(share for share in by_head[layer] for _ in range(repeats)) if by_head else ()
        found[layer] = made = own.in_layer(layers[layer] / mean if layers else 1.0, each)
        if isinstance(made.by_head, tuple) and len(made.by_head) != sets:
            raise ValueError(f"by_head must have {sets} shares in layer {layer}, got {len(made.by_head)}")
    return found


def _shares(kind: str, budgets: Budgets, selector: Selector) -> Sequence[Any]:
    """Return a selector's shares by layer or by head; none if no budget asks for them."""
    if not any(getattr(own, f"by_{kind}") is True for own in budgets.values()):
        return ()
    if shares := getattr(selector, f"{kind}_shares", ()):
        return shares
    raise ValueError(
        f"a budget by {kind} needs a hasher with {kind}_shares, which `hashtrain` measures, got none; train it anew, "
        f"or leave by_{kind} out"
    )


def _settled(
    model: PreTrainedModel, budgets: Budgets, heads: HeadsOf, selector: Selector, how: Options
) -> tuple[dict[int, LayerBudget], int | None]:
    """Replace "predicted" in `dense_below`; also return the first above 0."""
    found, even = dict(budgets), None
    # The prediction is for CPUs: it compares the bytes of codes, keys and values that are read.
    foreseen = model.device.type == "cpu" and selector.needs_codes and not how.on_host
    for layer, budget in budgets.items():
        if budget.dense_below == "predicted":
            below = predicted(heads(layer), budget, model.dtype) if foreseen else 0
            found[layer] = replace(budget, dense_below=below)
            even = even or below or None
    return found, even


def _plans(
    modules: Modules, budgets: Budgets, selector: Selector, how: Options, heads: HeadsOf
) -> dict[int, SparseLayer]:
    coefficients = getattr(selector, "remainder", None) if how.remainder else None
    found, memo, shared = dict[int, SparseLayer](), Memo(), dict[Any, Tally]()
    for layer, budget in budgets.items():
        left_out = None if coefficients is None else coefficients(layer)
        if left_out is not None and isinstance(selector, AttendingSelector):
            raise ValueError(
                "the remainder is fitted to softmax attention over a selection, got "
                f"{type(selector).__name__}, which has its own attention; attach with remainder=False"
            )
        device = _device_of(modules[layer].module)
        counts = shared.setdefault((budget, device, heads(layer).num_query_heads), Tally(device))
        found[layer] = SparseLayer(layer, selector, budget, how.rule, left_out, memo, counts, device)
    return found


def _device_of(module: Any) -> torch.device:
    """Return the device of a layer; the CPU for a layer that is loaded only when called (meta tensors)."""
    tensors: Iterator[Tensor] = itertools.chain(module.parameters(), module.buffers())  # quantised weights are buffers
    device = next((x.device for x in tensors), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device
