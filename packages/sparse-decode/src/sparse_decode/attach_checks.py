"""What `attach` refuses, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

import torch
from hashcore.cuda.program import require_compiler
from hashtrain import ModelShape
from hashtrain.models import text_decoder
from transformers import PreTrainedModel

from sparse_decode.attention import flash
from sparse_decode.attention.attend_inputs import require_values
from sparse_decode.budget import Budget
from sparse_decode.hashing.hashers import KeyQueryHasher
from sparse_decode.layer.plan import Backend
from sparse_decode.model import Attention, require_all_full, require_kernels, require_own_keys
from sparse_decode.select import AttendingSelector, HashSelector, Selector


def require_rows(dense_layers: object, sparse_rows: object, max_decode_rows: object) -> None:
    """Raise ValueError if these arguments of `attach` are out of range."""
    given = cast("Collection[object]", dense_layers) if isinstance(dense_layers, Collection) else [dense_layers or 0]
    if any(not isinstance(layer, int) or layer < 0 for layer in given):
        raise ValueError(f"dense_layers must be an integer of 0 or more, or a set of them, got {dense_layers!r}")
    if sparse_rows != "decode" and (not isinstance(sparse_rows, int) or sparse_rows < 0):
        raise ValueError(f'sparse_rows must be "decode" or an integer of 0 or more, got {sparse_rows!r}')
    if not isinstance(max_decode_rows, int) or max_decode_rows < 1:
        raise ValueError(f"max_decode_rows must be an integer of 1 or more, got {max_decode_rows!r}")


def as_selector(selector: KeyQueryHasher | Selector) -> Selector:
    """Return a selector as it is, and a hasher as a selector. Raises: ValueError for anything else."""
    if hasattr(selector, "select"):
        return selector  # pyright: ignore[reportReturnType]
    if hasattr(selector, "encode_queries"):
        return HashSelector(selector)  # pyright: ignore[reportArgumentType]
    raise ValueError(
        f"selector must be a hasher with encode_keys and encode_queries, or a Selector, got {type(selector).__name__}"
    )


def require_flash(model: PreTrainedModel, on_host: bool) -> None:
    """Raise ValueError if flash-attn cannot serve the model."""
    shape = ModelShape.of(text_decoder(model).config)
    flash.require(model.device, model.dtype, [shape.at(i).head_dim for i in range(shape.num_layers)])
    require_all_full(model)
    if on_host:
        raise ValueError('backend="flash" gathers on the model\'s device; use kv="device"')


def require_selector(model: PreTrainedModel, selector: Selector, on_host: bool, backend: Backend) -> None:
    """Raise ValueError if a selector does not match the model, the place of its keys, or the backend."""
    selector.require_match(text_decoder(model).config)
    kind = type(selector).__name__
    if on_host and not selector.needs_codes:
        raise ValueError(f'kv="host" needs a selector that works on codes, got {kind}; use kv="device"')
    if backend == "flash" and isinstance(selector, AttendingSelector):
        raise ValueError(
            f'backend="flash" does not support a selector with its own attention, got {kind}; use backend="gather"'
        )


def require_layers(
    model: PreTrainedModel,
    modules: dict[int, Attention],
    shape: ModelShape,
    selector: Selector,
    on_host: bool,
    backend: Backend,
) -> None:
    """Raise ValueError if the sparse layers cannot be computed."""
    if backend == "gather" and not isinstance(selector, AttendingSelector):
        require_kernels(model, modules, shape, getattr(selector, "per_query_head", False))
    elif selector.needs_codes and model.device.type == "cuda":
        require_compiler()
    if on_host:
        require_own_keys(model)


def require_remainder(selector: Selector, backend: Backend) -> None:
    """Raise ValueError if the attention cannot add the remainder."""
    if isinstance(selector, AttendingSelector):
        raise ValueError(
            "the remainder is fitted to softmax attention over a selection, got "
            f"{type(selector).__name__}, which has its own attention; attach with remainder=False"
        )
    if backend == "flash":
        raise ValueError(
            'backend="flash" does not support the remainder; attach with remainder=False, or use backend="gather"'
        )


def require_budgets(budgets: Iterable[Budget], backend: Backend, selector: Selector, device: torch.device) -> None:
    """Raise ValueError if the attention does not support budgets by head, or with a share of the values."""
    budgets = list(budgets)
    by = 'backend="flash"' if backend == "flash" else type(selector).__name__
    if any(budget.by_head for budget in budgets) and (backend == "flash" or not isinstance(selector, HashSelector)):
        raise ValueError(f"a budget by head needs a hasher and our own kernels, got {by}; leave by_head out")
    share = min(budget.values for budget in budgets)
    require_values(share, device)
    if share < 1 and (backend == "flash" or isinstance(selector, AttendingSelector)):
        raise ValueError(f"values below 1 needs our own kernels, got {share} and {by}; set it to 1")
