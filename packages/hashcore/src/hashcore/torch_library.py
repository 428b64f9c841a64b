"""hashcore's operations as torch operators: schemas, result shapes, and implementations per device.

Arguments have been checked by torch_ops. Each operation has a function that allocates outputs, which is also its fake
implementation, and a writer per device. The plain operator allocates and writes; the _out operator only writes. The CPU
writers use numba; the CUDA writers launch kernels on the current stream, and the host reads no device memory, except
when `planes` and `quantise` check weights. Other devices are not supported.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hashcore import host
from hashcore.cuda import operands, tensors

Outputs = tuple[torch.Tensor, ...]

_RANGE = "Tensor? lengths, Tensor? starts, SymInt length, SymInt start, SymInt sink, SymInt recent"
SCHEMAS = {
    "pack": "(Tensor x) -> Tensor",
    "quantise": "(Tensor w, int planes, bool check) -> (Tensor, Tensor)",
    "planes": "(Tensor w, int planes, bool check) -> Tensor",
    "group_planes": "(Tensor codes) -> Tensor",
    "score": "(Tensor query, Tensor keys, int[]? weights) -> Tensor",
    "topk": f"(Tensor x, SymInt count, Tensor? k, {_RANGE}) -> (Tensor, Tensor)",
    "search": f"(Tensor query, Tensor keys, SymInt count, Tensor? k, int[]? weights, {_RANGE}, bool best, "
    "SymInt shortlist, Tensor? first, Tensor? blocks) -> (Tensor, Tensor)",
    "pack_out": "(Tensor x, Tensor(a!) codes) -> ()",
    "score_out": "(Tensor query, Tensor keys, int[]? weights, Tensor(a!) scores) -> ()",
    "topk_out": f"(Tensor x, SymInt count, Tensor? k, {_RANGE}, Tensor(a!) scores, Tensor(b!) indices) -> ()",
    "search_out": f"(Tensor query, Tensor keys, SymInt count, Tensor? k, int[]? weights, {_RANGE}, bool best, "
    "SymInt shortlist, Tensor? first, Tensor? blocks, Tensor(a!) scores, Tensor(b!) indices, Tensor(c!)? workspace) "
    "-> ()",
}


# ---- Shapes and dtypes of results ----------------------------------------------------------------------------------


def rows_of(
    query: torch.Tensor, keys: torch.Tensor, weighted: bool, blocks: torch.Tensor | None = None
) -> tuple[int, ...]:
    """Return the shape of the rows of scores for query and keys; with blocks, keys are pages [..., M, S, W]."""
    keys = keys if blocks is None else keys[..., 0, :, :]
    lead = torch.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
    return (*lead,) if weighted else (*lead, query.shape[-2])


def _int32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _levels(w: torch.Tensor, planes: int, check: bool) -> Outputs:
    levels = w.new_empty(w.shape, dtype=torch.int8 if planes < 8 else torch.int16)
    return levels, w.new_empty((*w.shape[:-1], 1), dtype=torch.float32)


def _group(codes: torch.Tensor) -> Outputs:
    *lead, group, words = codes.shape
    return (_int32(codes, *lead, int(group).bit_length(), words),)


def _scores(query: torch.Tensor, keys: torch.Tensor, weights: Sequence[int] | None) -> Outputs:
    return (_int32(query, *rows_of(query, keys, weights is not None), keys.shape[-2]),)


def _selected(like: torch.Tensor, dtype: torch.dtype, *shape: int) -> Outputs:
    return like.new_empty(shape, dtype=dtype), like.new_empty(shape, dtype=torch.int64)


def _found(query: torch.Tensor, keys: torch.Tensor, count: int, k: Any, weights: Any, *options: Any) -> Outputs:
    return _selected(query, torch.int32, *rows_of(query, keys, weights is not None, options[9]), count)


RESULTS: dict[str, Callable[..., Outputs]] = {
    "pack": lambda x: (_int32(x, *x.shape[:-1], x.shape[-1] // 32),),
    "quantise": _levels,
    "planes": lambda w, planes, check: (_int32(w, *w.shape[:-1], planes, w.shape[-1] // 32),),
    "group_planes": _group,
    "score": _scores,
    "topk": lambda x, count, *_: _selected(x, x.dtype, *x.shape[:-1], count),
    "search": _found,
}


# ---- CPU -----------------------------------------------------------------------------------------------------------


class Cpu:
    """Writers for CPU tensors: the functions of `hashcore.host`, which use numba."""

    @staticmethod
    def pack(x: torch.Tensor, codes: torch.Tensor) -> None:
        host.pack(x, out=codes)

    @staticmethod
    def quantise(w: torch.Tensor, planes: int, check: bool, levels: torch.Tensor, scales: torch.Tensor) -> None:
        _copy(host.quantise(w, planes, check=check), (levels, scales))

    @staticmethod
    def planes(w: torch.Tensor, planes: int, check: bool, codes: torch.Tensor) -> None:
        codes.copy_(host.planes(w, planes, check=check)[0])

    @staticmethod
    def group_planes(codes: torch.Tensor, planes: torch.Tensor) -> None:
        planes.copy_(host.group_planes(codes)[0])

    @staticmethod
    def score(query: torch.Tensor, keys: torch.Tensor, weights: Sequence[int] | None, scores: torch.Tensor) -> None:
        host.score(query, keys, weights, out=scores)

    @staticmethod
    def topk(
        x: torch.Tensor,
        count: int,
        k: torch.Tensor | None,
        lengths: torch.Tensor | None,
        starts: torch.Tensor | None,
        length: int,
        start: int,
        sink: int,
        recent: int,
        scores: torch.Tensor,
        indices: torch.Tensor,
    ) -> None:
        options = _range(lengths, starts, length, start, sink, recent)
        _copy(host.topk(x, count if k is None else k, **options), (scores, indices))

    @staticmethod
    def search(*inputs: Any) -> None:  # in the order of search_out's schema; `first` and `workspace` are for CUDA
        query, keys, count, k, weights = inputs[:5]
        scores, indices = inputs[15:17]
        _copy(_search(query, keys, count if k is None else k, weights, *inputs[5:15]), (scores, indices))


def _search(
    query: Any, keys: Any, k: Any, weights: Any, lengths: Any, starts: Any, length: int, start: int, sink: int,
    recent: int, best: bool, shortlist: int, first: Any, blocks: Any,
) -> Outputs:  # fmt: skip
    options = _range(lengths, starts, length, start, sink, recent)
    order = "best" if best else "index"
    how: dict[str, Any] = {"order": order, "shortlist": shortlist or None, "blocks": blocks, "out": None}
    return host.search(query, keys, k, weights, **how, **options)


def _found_on_cpu(query: Any, keys: Any, count: int, k: Any, weights: Any, *options: Any) -> Outputs:
    """Search without copying the result if it already has `count` slots."""
    found = _search(query, keys, count if k is None else k, weights, *options)
    if found[0].shape[-1] == count:
        return found
    outputs = _found(query, keys, count, k, weights, *options)
    _copy(found, outputs)
    return outputs


# Operators whose CPU implementation allocates its own results instead of writing to given outputs.
MADE_ON_CPU: dict[str, Callable[..., Any]] = {"score": host.score, "search": _found_on_cpu}


def _range(lengths: Any, starts: Any, length: int, start: int, sink: int, recent: int) -> dict[str, Any]:
    lengths, starts = length if lengths is None else lengths, start if starts is None else starts
    return {"lengths": lengths, "starts": starts, "sink": sink, "recent": recent}


def _copy(results: Outputs, targets: Outputs) -> None:
    """Copy results to targets; the targets of a selection may have more slots than the results."""
    for empty, result, target in zip((0, -1), results, targets, strict=True):
        if target.shape != result.shape:
            target.fill_(empty)
        target[..., : result.shape[-1]] = result


# ---- CUDA ----------------------------------------------------------------------------------------------------------


class Cuda:
    """Writers for CUDA tensors: the kernels."""

    @staticmethod
    def pack(x: torch.Tensor, codes: torch.Tensor) -> None:
        tensors.pack(x, codes)

    @staticmethod
    def group_planes(codes: torch.Tensor, planes: torch.Tensor) -> None:
        tensors.group_planes(codes, planes)

    @staticmethod
    def score(query: torch.Tensor, keys: torch.Tensor, weights: Sequence[int] | None, scores: torch.Tensor) -> None:
        tensors.score(query, keys, weights, scores)

    @staticmethod
    def quantise(w: torch.Tensor, planes: int, check: bool, levels: torch.Tensor, scales: torch.Tensor) -> None:
        if check:
            _refuse_infinite(w)
        wide = levels if levels.dtype == torch.int16 else torch.empty_like(levels, dtype=torch.int16)
        tensors.quantise(w, wide, scales, planes)
        if wide is not levels:
            levels.copy_(wide)

    @staticmethod
    def planes(w: torch.Tensor, planes: int, check: bool, codes: torch.Tensor) -> None:
        if check:
            _refuse_infinite(w)
        tensors.planes(w, codes)

    @staticmethod
    def topk(
        x: torch.Tensor,
        count: int,
        k: torch.Tensor | None,
        lengths: torch.Tensor | None,
        starts: torch.Tensor | None,
        length: int,
        start: int,
        sink: int,
        recent: int,
        scores: torch.Tensor,
        indices: torch.Tensor,
    ) -> None:
        bounds = operands.Bounds(
            length if lengths is None else lengths, start if starts is None else starts, sink, recent
        )
        values = scores if scores.dtype == torch.int32 else torch.empty_like(scores, dtype=torch.int32)
        tensors.topk(x, count if k is None else k, bounds, values, indices)
        if values is not scores:
            scores.copy_(values)

    @staticmethod
    def search(*inputs: Any) -> None:
        query, keys, count, k, weights, lengths, starts, length, start, sink, recent, best, shortlist = inputs[:13]
        first, blocks, scores, indices, *workspace = inputs[13:]
        bounds = operands.Bounds(
            length if lengths is None else lengths, start if starts is None else starts, sink, recent
        )
        how = {"shortlist": shortlist, "first": first, "blocks": blocks}
        tensors.search(query, keys, count if k is None else k, weights, bounds, scores, indices, *workspace, **how)
        if best:  # stable: ties stay in index order, and empty slots, with the lowest score, at the end
            values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
            indices.copy_(indices.gather(-1, order))
            scores.copy_(values)


def _refuse_infinite(w: torch.Tensor) -> None:
    """Raise ValueError if w is not finite in float32. The host waits for the device only here."""
    if w.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("w cannot be checked while a CUDA graph is captured; use planes(..., check=False)")
    peak = w.float().abs().amax() if w.numel() else None
    if peak is not None and not torch.isfinite(peak):
        raise ValueError(f"w must be finite in float32, got {peak.item()} in a row; look for an overflow upstream")


# ---- Registration --------------------------------------------------------------------------------------------------


def _functional(results: Callable[..., Outputs], write: Callable[..., None]) -> Callable[..., Any]:
    def operator(*inputs: Any) -> Any:
        outputs = results(*inputs)
        write(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    return operator


def _shapes(results: Callable[..., Outputs]) -> Callable[..., Any]:
    def fake(*inputs: Any) -> Any:
        outputs = results(*inputs)
        return outputs[0] if len(outputs) == 1 else outputs

    return fake


def _register() -> torch.library.Library:
    """Define all operators; they exist as long as the library object."""
    library = torch.library.Library("hashcore", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        plain = name.removesuffix("_out")
        for key, writers in (("CPU", Cpu), ("CUDA", Cuda)):
            write = getattr(writers, plain)
            made = MADE_ON_CPU.get(name) if key == "CPU" else None
            library.impl(name, write if name != plain else made or _functional(RESULTS[name], write), key)
        fake = _shapes(RESULTS[name]) if name == plain else lambda *_: None
        torch.library.register_fake(f"hashcore::{name}", fake, lib=library)
    return library


LIBRARY = _register()
