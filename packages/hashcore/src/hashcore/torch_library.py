"""hashcore's operations as torch operators: schemas, result shapes, and implementations per device.

Arguments have been checked by torch_ops. Each operation has a function that allocates outputs, which is also its fake
implementation, and a writer per device. The plain operator allocates and writes; the _out operator only writes. The CPU
writers use numba; the CUDA writers launch kernels on the current stream, and the host reads no device memory, except
when `planes` and `quantise` check weights. Other devices are not supported.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hashcore import arguments, bits, quantiser
from hashcore.cuda import operands, tensor_search, tensors

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
    "Tensor? blocks) -> (Tensor, Tensor)",
}
_WRITTEN = {"pack": "codes", "score": "scores", "topk": "scores indices", "search": "scores indices"}
for _name, _outputs in _WRITTEN.items():
    _targets = "".join(f", Tensor({letter}!) {output}" for letter, output in zip("ab", _outputs.split(), strict=False))
    SCHEMAS[f"{_name}_out"] = SCHEMAS[_name].partition(") ->")[0] + _targets + ") -> ()"


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
    return _selected(query, torch.int32, *rows_of(query, keys, weights is not None, options[7]), count)


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


def _copy(results: tuple[Any, ...], targets: Outputs) -> None:
    """Copy tensors or arrays to targets; the targets of a selection may have more slots than the results."""
    for empty, result, target in zip((0, -1), results, targets, strict=False):
        result = torch.as_tensor(result)
        if target.shape != result.shape:
            target.fill_(empty)
        target[..., : result.shape[-1]] = result


def _view(x: torch.Tensor) -> Any:
    """View a tensor in the host's memory as an array."""
    return arguments.host_arrays(x=x)[0][0]


def _pack_on_cpu(x: torch.Tensor, codes: torch.Tensor) -> None:
    words = arguments.bfloat16_bits(x)
    found = bits.pack(_view(x)) if words is None else bits.pack(_view(words), bits.BFLOAT16_INFINITY)
    _copy((found,), (codes,))


def _planes_on_cpu(w: torch.Tensor, planes: int, check: bool, codes: torch.Tensor) -> None:
    levels, _ = quantiser.quantise(_view(w), planes, check)
    _copy((quantiser.level_planes(levels, planes),), (codes,))


def _score_on_cpu(query: torch.Tensor, keys: torch.Tensor, weights: Any) -> torch.Tensor:
    from hashcore import cpu  # imported late: numba takes half a second

    return torch.from_numpy(cpu.score(_view(query), _view(keys), None if weights is None else tuple(weights)))


def _rows(k: Any, lengths: Any, starts: Any, length: int, start: int, sink: int, recent: int) -> tuple[Any, ...]:
    found = k, length if lengths is None else lengths, start if starts is None else starts
    return *(_view(x) if isinstance(x, torch.Tensor) else x for x in found), sink, recent


def _topk_on_cpu(x: torch.Tensor, count: int, k: torch.Tensor | None, *more: Any) -> None:
    from hashcore import cpu

    *limits, scores, indices = more
    _copy(cpu.topk(_view(x), _rows(count if k is None else k, *limits)), (scores, indices))


def _search_on_cpu(query: Any, keys: Any, count: int, k: Any, weights: Any, *more: Any) -> Outputs:
    """Search; the result may have fewer than `count` slots."""
    from hashcore import cpu

    best, blocks = more[6:]
    rows, weights = _rows(count if k is None else k, *more[:6]), None if weights is None else tuple(weights)
    table = None if blocks is None else _view(blocks)
    scores, indices = cpu.search(_view(query), _view(keys), weights, rows, best, table)
    return torch.from_numpy(scores), torch.from_numpy(indices)


def _found_on_cpu(*inputs: Any) -> Outputs:
    """Search without copying the result if it already has `count` slots."""
    found = _search_on_cpu(*inputs)
    if found[0].shape[-1] == inputs[2]:
        return found
    outputs = _found(*inputs)
    _copy(found, outputs)
    return outputs


CPU: dict[str, Callable[..., None]] = {
    "pack": _pack_on_cpu,
    "quantise": lambda w, planes, check, *out: _copy(quantiser.quantise(_view(w), planes, check), out),
    "planes": _planes_on_cpu,
    "group_planes": lambda codes, planes: _copy(quantiser.group_planes(_view(codes))[:1], (planes,)),
    "score": lambda query, keys, weights, scores: _copy((_score_on_cpu(query, keys, weights),), (scores,)),
    "topk": _topk_on_cpu,
    "search": lambda *given: _copy(_search_on_cpu(*given[:-2]), given[-2:]),
}
"""Functions that write results to the tensors that come last."""
# Operators whose CPU implementation allocates its own results instead of writing to given outputs.
MADE_ON_CPU: dict[str, Callable[..., Any]] = {"score": _score_on_cpu, "search": _found_on_cpu}


# ---- CUDA: the kernels ---------------------------------------------------------------------------------------------


def _bounds(lengths: Any, starts: Any, length: int, start: int, sink: int, recent: int) -> operands.Bounds:
    return operands.Bounds(length if lengths is None else lengths, start if starts is None else starts, sink, recent)


def _quantise_on_cuda(w: torch.Tensor, planes: int, check: bool, levels: torch.Tensor, scales: torch.Tensor) -> None:
    if check:
        _refuse_infinite(w)
    wide = levels if levels.dtype == torch.int16 else torch.empty_like(levels, dtype=torch.int16)
    tensors.quantise(w, wide, scales, planes)
    if wide is not levels:
        levels.copy_(wide)


def _planes_on_cuda(w: torch.Tensor, planes: int, check: bool, codes: torch.Tensor) -> None:
    if check:
        _refuse_infinite(w)
    tensors.planes(w, codes)


def _topk_on_cuda(x: torch.Tensor, count: int, k: torch.Tensor | None, *more: Any) -> None:
    *limits, scores, indices = more
    tensors.topk(x, count if k is None else k, _bounds(*limits), scores, indices)


def _search_on_cuda(query: Any, keys: Any, count: int, k: Any, weights: Any, *more: Any) -> None:
    best, blocks, scores, indices = more[6:]
    bounds = _bounds(*more[:6])
    tensor_search.search(query, keys, count if k is None else k, weights, bounds, scores, indices, blocks=blocks)
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


CUDA: dict[str, Callable[..., None]] = {
    "pack": tensors.pack,
    "quantise": _quantise_on_cuda,
    "planes": _planes_on_cuda,
    "group_planes": tensors.group_planes,
    "score": tensors.score,
    "topk": _topk_on_cuda,
    "search": _search_on_cuda,
}
"""As `CPU`."""


# ---- Registration --------------------------------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    """Write no results: they are fake."""


def _functional(results: Callable[..., Outputs], write: Callable[..., None]) -> Callable[..., Any]:
    def operator(*inputs: Any) -> Any:
        outputs = results(*inputs)
        write(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    return operator


def _register() -> torch.library.Library:
    """Define all operators; they exist as long as the library object."""
    library = torch.library.Library("hashcore", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        plain = name.removesuffix("_out")
        for key, writers in (("CPU", CPU), ("CUDA", CUDA)):
            write = writers[plain]
            made = MADE_ON_CPU.get(name) if key == "CPU" else None
            library.impl(name, write if name != plain else made or _functional(RESULTS[name], write), key)
        fake = _functional(RESULTS[name], _nothing) if name == plain else _nothing
        torch.library.register_fake(f"hashcore::{name}", fake, lib=library)
    return library


LIBRARY = _register()
