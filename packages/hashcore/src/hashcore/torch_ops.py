"""The public functions for tensors that numpy cannot view: in CUDA memory, or while a program is traced.

The layouts of tensors go through the checks for arrays; then one operator of torch_library is called. Values of integer
tensors on a device are not checked, because the host would have to wait: the kernels clamp lengths and starts to
[0, N], and k to [0, K].
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hashcore import arguments, quantiser, torch_library, validation

OPERATORS = torch.ops.hashcore
DEVICES = ("cpu", "cuda", "meta")
Tensor = torch.Tensor
Bound = int | Tensor | None


def pack(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Pack signs (ops.pack)."""
    _check_devices(x=x, out=out)
    seen = _layout("x", x)
    validation.real("x", seen, "[..., D]")
    validation.bits("x", seen)
    if out is None:
        return OPERATORS.pack(x)
    _check_output("out", out, (*x.shape[:-1], x.shape[-1] // 32), [np.int32], [x])
    _write(lambda codes: OPERATORS.pack_out(x, codes), out)
    return out


def unpack(codes: Tensor) -> Tensor:
    """Unpack words (ops.unpack)."""
    _check_devices(codes=codes)
    validation.codes("codes", _layout("codes", codes), "[..., W]")
    bits = codes.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=codes.device)
    return (bits & 1).to(torch.bool).flatten(-2)


def quantise(w: Tensor, planes: int = 3, *, check: bool = True) -> tuple[Tensor, Tensor]:
    """Quantise rows to levels (ops.quantise); with check, the host waits for the device."""
    _check_devices(w=w)
    validation.real("w", _layout("w", w), "[..., D]")
    validation.not_empty("w", w.shape)
    return OPERATORS.quantise(w.detach(), validation.plane_count(planes), check)


def planes(w: Tensor, planes: int = 3, *, check: bool = True) -> tuple[Tensor, tuple[int, ...]]:
    """Quantise rows to planes (ops.planes); with check, the host waits for the device."""
    _check_devices(w=w)
    seen = _layout("w", w)
    validation.real("w", seen, "[..., D]")
    validation.bits("w", seen)
    count = validation.plane_count(planes)
    return OPERATORS.planes(w.detach(), count, check), tuple(1 << p for p in range(count))


def group_planes(codes: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Merge a group's codes (ops.group_planes)."""
    _check_devices(codes=codes)
    validation.codes("codes", _layout("codes", codes), "[..., G, W]")
    validation.group(codes.shape)
    return OPERATORS.group_planes(codes), quantiser.group_weights(codes.shape[-2])


def score(query: Tensor, keys: Tensor, weights: Sequence[int] | None = None, *, out: Tensor | None = None) -> Tensor:
    """Score every key (ops.score)."""
    _check_devices(query=query, keys=keys, out=out)
    checked, rows = _comparison(query, keys, weights)
    if out is None:
        return OPERATORS.score(query, keys, checked)
    _check_output("out", out, (*rows, keys.shape[-2]), [np.int32], [query, keys])
    _write(lambda scores: OPERATORS.score_out(query, keys, checked, scores), out)
    return out


def topk(
    scores: Tensor,
    k: int | Tensor,
    *,
    lengths: Bound = None,
    starts: Bound = None,
    sink: int = 0,
    recent: int = 0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the highest scores (ops.topk), integers of at most 32 bits.

    If k is a tensor and `out` is None, the host waits for the largest k.
    """
    values, indices = arguments.pair(out)
    _check_devices(scores=scores, k=k, lengths=lengths, starts=starts, **{"out[0]": values, "out[1]": indices})
    seen = _layout("scores", scores)
    validation.integer_scores(seen)
    if seen.dtype not in (np.dtype(t) for t in ("int8", "uint8", "int16", "int32")) and scores.device.type != "cpu":
        raise TypeError(
            f"scores on {scores.device} must be int8, uint8, int16 or int32, got {seen.dtype}; convert them"
        )
    wanted = _wanted((*scores.shape,), k, lengths, starts, sink, recent, indices)
    if values is None or indices is None:
        return OPERATORS.topk(scores, *wanted)
    shape = *scores.shape[:-1], wanted.width
    _check_outputs(values, indices, shape, seen.dtype, scores.shape[-1], scores, k, lengths, starts)
    _write(lambda *pair: OPERATORS.topk_out(scores, *wanted, *pair), values, indices)
    return values, indices


def search(
    query: Tensor,
    keys: Tensor,
    k: int | Tensor,
    weights: Sequence[int] | None = None,
    *,
    lengths: Bound = None,
    starts: Bound = None,
    sink: int = 0,
    recent: int = 0,
    order: str = "best",
    blocks: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the keys that score highest (ops.search).

    If k is a tensor and `out` is None, the host waits for the largest k. With `out` and order="index"
    only our kernels are launched. On CUDA pages have a power of two of keys, and page
    numbers out of range, which the host does not see, count as the last page.
    """
    values, indices = arguments.pair(out)
    passed = {"query": query, "keys": keys, "k": k, "lengths": lengths, "starts": starts}
    _check_devices(**passed, blocks=blocks, **{"out[0]": values, "out[1]": indices})
    best = arguments.order(order)
    checked, rows = _comparison(query, keys if blocks is None else _first_page(keys, blocks), weights)
    n = keys.shape[-2] * (1 if blocks is None else blocks.shape[-1])
    if blocks is not None and not _broadcasts(blocks.shape[:-1], rows):
        raise validation.not_a_table_per_row(rows, blocks.shape)
    validation.score_bits(checked or (1,), query.shape[-1])
    wanted = _wanted((*rows, n), k, lengths, starts, sink, recent, indices)
    passed_on = query, keys, wanted.width, wanted.k, checked, *wanted[2:], best, blocks
    if values is None or indices is None:
        return OPERATORS.search(*passed_on)
    shape = *rows, wanted.width
    _check_outputs(values, indices, shape, np.int32, n, query, keys, k, lengths, starts, blocks)
    _write(lambda *pair: OPERATORS.search_out(*passed_on, *pair), values, indices)
    return values, indices


# ---- Checks --------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """The selection arguments of an operator."""

    width: int
    k: Tensor | None
    lengths: Tensor | None
    starts: Tensor | None
    length: int
    start: int
    sink: int
    recent: int


def _wanted(
    shape: tuple[int, ...], k: Any, lengths: Bound, starts: Bound, sink: int, recent: int, indices: Tensor | None
) -> Wanted:
    *rows, n = shape
    own = {name: x for name, x in (("k", k), ("lengths", lengths), ("starts", starts)) if isinstance(x, Tensor)}
    length = n if lengths is None or "lengths" in own else arguments.position("lengths", lengths, n)
    start = 0 if starts is None or "starts" in own else arguments.position("starts", starts, n)
    if start > length and "lengths" not in own:
        raise ValueError(
            f"starts must not exceed lengths, got start {start} and length {length}; a row sees [start, length)"
        )
    for name, value in own.items():
        _check_row_tensor(name, value, rows)
    if not isinstance(k, Tensor):
        count = k
    elif indices is not None:
        count = indices.shape[-1] if indices.ndim else 0
    elif torch.compiler.is_compiling():
        raise ValueError("a tensor k needs out in a compiled program, got None; the last dimension of out bounds k")
    else:
        count = int(k.to(torch.int64).max()) if k.numel() and 0 not in rows else 0
    tensors = own.get("k"), own.get("lengths"), own.get("starts")
    ends = arguments.natural("sink", sink, n), arguments.natural("recent", recent, n)
    return Wanted(arguments.position("k", count, n), *tensors, length, start, *ends)


def _comparison(
    query: Tensor, keys: Tensor, weights: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the checked weights and the shape of the rows."""
    seen, against = _layout("query", query), _layout("keys", keys)
    validation.codes("query", seen, "[..., Q, W]" if weights is None else "[..., P, W]")
    validation.codes("keys", against, "[..., N, W]")
    validation.same_words(seen, against)
    try:
        rows = torch_library.rows_of(query, keys, weights is not None)
    except RuntimeError:
        validation.broadcast(query.shape[:-2], keys.shape[:-2])  # raises the error
        raise
    if weights is None:
        return None, rows
    return validation.plane_weights(weights, query.shape[-2], query.shape[-1]), rows


def _first_page(keys: Tensor, blocks: Any) -> Tensor:
    """Check keys in pages [..., M, S, W]; return the first page [..., S, W]."""
    validation.pages(blocks)
    validation.codes("keys", _layout("keys", keys), "[..., M, S, W]")
    pages, size, _ = keys.shape[-3:]
    if keys.device.type != "cpu" and (size < 1 or size & (size - 1)):
        raise ValueError(f"pages on {keys.device} must have a power of two of keys, got {size}; use pages of 16 or 32")
    if not pages:
        raise ValueError("keys in pages must have at least one page, got none")
    return keys[..., 0, :, :]


def _broadcasts(shape: Sequence[int], rows: Sequence[int]) -> bool:
    aligned = zip(reversed(shape), reversed(rows), strict=False)
    return len(shape) <= len(rows) and all(size in (1, row) for size, row in aligned)


def _check_devices(**named: Any) -> None:
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


def _check_row_tensor(name: str, value: Tensor, rows: Sequence[int]) -> None:
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer or an array of integers, got {_dtype(value)}; convert it")
    if value.dtype == torch.uint64 and value.device.type != "cpu":
        raise TypeError(f"{name} on {value.device} must be integers that int64 holds, got uint64; convert it")
    if not _broadcasts(value.shape, rows):
        raise validation.not_per_row(name, rows, value.shape)


def _layout(name: str, x: Any) -> arguments.Layout:
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


def _check_output(name: str, out: Any, shape: tuple[int, ...], dtypes: Sequence[Any], inputs: Sequence[Any]) -> None:
    validation.output(name, _layout(name, out) if isinstance(out, Tensor) else out, shape, dtypes, [])
    if not torch.compiler.is_compiling() and any(_overlap(out, x) for x in inputs if isinstance(x, Tensor)):
        raise validation.shared_memory(name)


def _check_outputs(values: Any, indices: Any, shape: tuple[int, ...], dtype: Any, n: int, *inputs: Any) -> None:
    _check_output("out[0]", values, shape, [dtype], inputs)
    _check_output("out[1]", indices, shape, [np.int64, np.int32], [*inputs, values])
    validation.index_fits("out[1]", _layout("out[1]", indices), n)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory ranges of two tensors, from first to last element, overlap; meta and fake ones have none."""
    if any(not x.numel() or x.untyped_storage().device.type == "meta" for x in (a, b)):
        return False
    last = [sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True)) for x in (a, b)]
    ends = [x.data_ptr() + x.element_size() * (1 + at) for x, at in zip((a, b), last, strict=True)]
    return a.data_ptr() < ends[1] and b.data_ptr() < ends[0]


def _write(operator: Callable[..., None], *outputs: Tensor) -> None:
    """Call an operator that writes contiguous outputs, for outputs of any strides."""
    dense = [
        out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format) for out in outputs
    ]
    operator(*dense)
    for out, written in zip(outputs, dense, strict=True):
        if written is not out:
            out.copy_(written)
