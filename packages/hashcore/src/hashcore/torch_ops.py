"""hashcore's operations as torch operators, for tensors that numpy cannot view: in CUDA memory, or traced.

`hashcore.ops` checks the arguments, and calls `run`. Each operation has a schema, a function that
allocates its results, which is also its fake implementation, and an implementation for each device. The CPU's is that
of arrays; CUDA's launches kernels on the current stream. Values in device memory are not checked, because the host
would have to wait: the kernels clamp lengths and starts to [0, N], and k to [0, K]. The host waits only where `planes`
and `quantise` check weights, and for the largest k of a tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hashcore import arguments, ops, quantiser, validation
from hashcore.cuda import tensor_search, tensors
from hashcore.validation import Comparison, RowLimits

OPERATORS: Any = torch.ops.hashcore
DEVICES = ("cpu", "cuda", "meta")
MOST_PLANES = 8  # that the CUDA kernels are made for
Tensor = torch.Tensor
Outputs = tuple[Tensor, ...]


# ---- Results, and implementations on CUDA --------------------------------------------------------------------------


def _int32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _selected(like: Tensor, dtype: torch.dtype, *shape: int) -> Outputs:
    return like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=torch.int64)


def _levels(w: Tensor, planes: int, check: bool) -> Outputs:
    levels = w.new_empty(w.shape, dtype=torch.int8 if planes < 8 else torch.int16)
    return levels, w.new_empty((*w.shape[:-1], 1), dtype=torch.float32)


def _group(codes: Tensor) -> Outputs:
    *lead, group, words = codes.shape
    return (_int32(codes, *lead, int(group).bit_length(), words),)


def _rows(query: Tensor, keys: Tensor, weights: Any, blocks: Tensor | None = None) -> tuple[int, ...]:
    """Return the shape of the rows of scores; with blocks, keys are pages [..., M, S, W]."""
    lead = torch.broadcast_shapes(query.shape[:-2], keys.shape[: -2 if blocks is None else -3])
    return (*lead, query.shape[-2]) if weights is None else (*lead,)


def _topk_on_cuda(x: Tensor, *more: Any) -> None:
    *limits, scores, indices = more
    tensors.topk(x, RowLimits(*limits), scores, indices)


def _search_on_cuda(query: Tensor, keys: Tensor, weights: Any, best: bool, blocks: Any, *more: Any) -> None:
    *limits, scores, indices = more
    tensor_search.search(query, keys, weights, RowLimits(*limits), scores, indices, blocks)
    if best:  # stable: ties stay in index order, and empty slots, with the lowest score, at the end
        values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
        indices.copy_(indices.gather(-1, order))
        scores.copy_(values)


# ---- The table of operators ----------------------------------------------------------------------------------------


def _rows_on_host(count: int, k: Any, lengths: Any, starts: Any, length: int, start: int, *ends: int) -> dict[str, Any]:
    rows = ("k", k, count), ("lengths", lengths, length), ("starts", starts, start)
    return {name: one if x is None else x for name, x, one in rows} | dict(zip(("sink", "recent"), ends, strict=True))


def _topk_on_host(scores: Any, *rows: Any) -> Any:
    return ops.topk(scores, **_rows_on_host(*rows))


def _search_on_host(query: Any, keys: Any, weights: Any, best: bool, blocks: Any, *rows: Any) -> Any:
    how: Any = {"order": "best" if best else "index", "blocks": blocks}
    return ops.search(query, keys, weights=weights, **how, **_rows_on_host(*rows))


class Operation(NamedTuple):
    """One operator.

    Attributes:
        inputs: of the schema. outputs: their number. results: allocates the outputs for the inputs.
        host: returns the results for arrays. cuda: writes to the outputs, which come after the inputs.
    """

    inputs: str
    outputs: int
    results: Callable[..., Outputs]
    host: Callable[..., Any]
    cuda: Callable[..., None]


_RANGE = "Tensor? lengths, Tensor? starts, SymInt length, SymInt start, SymInt sink, SymInt recent"
OPERATIONS = {
    "pack": Operation(
        "Tensor x", 1, lambda x: (_int32(x, *x.shape[:-1], x.shape[-1] // 32),), quantiser.pack, tensors.pack
    ),
    "quantise": Operation("Tensor w, int planes, bool check", 2, _levels, quantiser.quantise, tensors.quantise),
    "planes": Operation(
        "Tensor w, int planes, bool check",
        1,
        lambda w, planes, check: (_int32(w, *w.shape[:-1], planes, w.shape[-1] // 32),),
        quantiser.planes,
        tensors.planes,
    ),
    "group_planes": Operation("Tensor codes", 1, _group, quantiser.group_planes, tensors.group_planes),
    "score": Operation(
        "Tensor query, Tensor keys, int[]? weights",
        1,
        lambda query, keys, weights: (_int32(query, *_rows(query, keys, weights), keys.shape[-2]),),
        ops.score,
        tensors.score,
    ),
    "topk": Operation(
        f"Tensor x, SymInt count, Tensor? k, {_RANGE}",
        2,
        lambda x, count, *_: _selected(x, x.dtype, *x.shape[:-1], count),
        _topk_on_host,
        _topk_on_cuda,
    ),
    "search": Operation(
        f"Tensor query, Tensor keys, int[]? weights, bool best, Tensor? blocks, SymInt count, Tensor? k, {_RANGE}",
        2,
        lambda query, keys, weights, best, blocks, count, *_: _selected(
            query, torch.int32, *_rows(query, keys, weights, blocks), count
        ),
        _search_on_host,
        _search_on_cuda,
    ),
}


def on_cuda(name: str) -> Callable[..., Any]:
    """Return an operator's implementation on CUDA, which allocates its results."""
    return _functional(OPERATIONS[name].results, OPERATIONS[name].cuda)


def _functional(results: Callable[..., Outputs], write: Callable[..., None]) -> Callable[..., Any]:
    def operator(*inputs: Any) -> Any:
        outputs = results(*inputs)
        write(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    return operator


def _on_cpu(operation: Operation) -> Callable[..., None]:
    """Return a function that writes to the tensors that come last; a selection's may have more slots than it needs."""
    outputs = operation.outputs

    def write(*given: Any) -> None:
        found = operation.host(*(arguments.tensor_view(x) if isinstance(x, Tensor) else x for x in given[:-outputs]))
        for empty, result, target in zip((0, -1), found if outputs > 1 else [found], given[-outputs:], strict=False):
            if target.shape != result.shape:
                target.fill_(empty)
            target[..., : result.shape[-1]] = torch.from_numpy(result)

    return write


def _nothing(*_: Any) -> None:
    """Write no results: they are fake."""


def _register() -> torch.library.Library:
    """Define all operators; they exist as long as the library object."""
    library = torch.library.Library("hashcore", "DEF")
    for name, operation in OPERATIONS.items():
        library.define(f"{name}({operation.inputs}) -> {'(Tensor, Tensor)' if operation.outputs == 2 else 'Tensor'}")
        for device, write in (("CPU", _on_cpu(operation)), ("CUDA", operation.cuda)):
            library.impl(name, _functional(operation.results, write), device)
        torch.library.register_fake(f"hashcore::{name}", _functional(operation.results, _nothing), lib=library)
    return library


LIBRARY = _register()


# ---- What `hashcore.ops` calls, as of `ops.Host` -------------------------------------------------------------------


def run(name: str, *inputs: Any, compared: Comparison | None = None) -> Any:
    """Call an operator."""
    x = inputs[0]
    if name == "unpack":
        return tensors.unpack(x)
    if name in ("quantise", "planes"):
        inputs = x.detach(), *inputs[1:]
    if name == "topk" and x.device.type != "cpu" and _dtype(x).name not in ("int8", "uint8", "int16", "int32"):
        raise TypeError(f"scores on {x.device} must be int8, uint8, int16 or int32, got {_dtype(x)}; convert them")
    return getattr(OPERATORS, name)(*inputs)


def compared(query: Tensor, keys: Tensor, weights: Any, blocks: Any = None) -> tuple[Tensor, Tensor, Comparison]:
    against = layout("keys", keys)
    if blocks is not None:
        against = validation.paged(against, blocks)
        pages, size, _ = keys.shape[-3:]
        if keys.device.type != "cpu" and (size < 1 or size & (size - 1)):
            raise ValueError(
                f"pages on {keys.device} must have a power of two of keys, got {size}; use pages of 16 or 32"
            )
        if not pages:
            raise ValueError("keys in pages must have at least one page, got none")
    found = validation.comparison(layout("query", query), against, weights)
    if keys.device.type != "cpu" and len(found.weights) > MOST_PLANES:
        raise ValueError(f"queries on {keys.device} have at most {MOST_PLANES} planes, got {len(found.weights)}")
    return query, keys, found


def integers(name: str, x: Tensor, lead: Sequence[int], n: int) -> Tensor:
    if x.dtype == torch.uint64 and x.device.type != "cpu":
        raise TypeError(f"{name} on {x.device} must be integers that int64 holds, got uint64; convert it")
    return x


def largest(k: Tensor, lead: Sequence[int]) -> int:
    if torch.compiler.is_compiling():
        raise ValueError(
            "a compiled program needs the width of its results, got a tensor k; call the operator of "
            "torch.ops.hashcore, which takes the width"
        )
    return int(k.to(torch.int64).max()) if k.numel() and 0 not in lead else 0


def check_devices(named: dict[str, Any]) -> None:
    """Raise an error unless all arrays are tensors on one device of those that have operators."""
    passed = {name: x for name, x in named.items() if arguments.is_array(x)}
    if not all(isinstance(x, Tensor) for x in passed.values()):
        raise arguments.mixed_kinds(passed)
    devices = {name: x.device for name, x in passed.items()}
    if len(set(devices.values())) > 1:
        got = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"expected all tensors on one device, got {got}; move them with .to()")
    for device in devices.values():
        if device.type not in DEVICES:
            raise ValueError(f"hashcore runs on the CPU and on CUDA, got a tensor on {device}; move it with .cpu()")


def layout(name: str, x: Any) -> arguments.Layout:
    """Return the properties of a tensor that the checks look at."""
    if not isinstance(x, Tensor):
        raise arguments.mixed_kinds({name: x})
    if x.layout != torch.strided:
        raise arguments.not_strided(x)
    return arguments.Layout(_dtype(x), (*x.shape,), tuple(step * x.element_size() for step in x.stride()))


def _dtype(x: Tensor) -> np.dtype[Any]:
    if x.dtype == torch.bfloat16:
        return np.dtype(np.float16)  # real, like bfloat16
    try:
        return np.dtype(str(x.dtype).removeprefix("torch."))
    except TypeError:
        raise TypeError(f"expected a dtype that numpy has, or bfloat16, got {x.dtype}; convert it first") from None
