"""Attention over selected tokens on CUDA: shapes and strides in, two launches out (kernels/gather.cu)."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from hashcore.cuda import launch
from hashcore.cuda.kernels import Launch, make_launch
from torch import Tensor

KERNELS = Path(__file__).parent / "kernels"
THREADS = 128
MAX_GROUP = 16
SLOTS = 16
LEAST_SLOTS = 128  # of a split: below that, its sums would be as many bytes as its keys and values
BLOCKS_PER_PROCESSOR = 3
SIMULATED_PROCESSORS = 2
_TYPES = {torch.bfloat16: 1, torch.float16: 0}


class Run(Protocol):
    """What executes launches: `hashcore.cuda.launch.run`, or in the tests the host simulator."""

    def __call__(self, launches: Iterable[Launch], device: torch.device, folder: Path) -> None: ...


class Rows(ctypes.Structure):
    """Numbers from one batch row, head and token to the next: Rows of kernels/gather.cu."""

    _fields_ = (("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64))


class Shape(ctypes.Structure):
    """Shape of kernels/gather.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("sets", "queries", "width", "group", "heads_per_kv", "tokens", "slots")),
        *((name, ctypes.c_int32) for name in ("sink", "recent")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


class LeftOut(ctypes.Structure):
    """LeftOut of kernels/gather.cu: addresses."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("coefficients", "mean_keys", "values", "visible"))


def macros(dim: int, value_dim: int, dtype: torch.dtype) -> tuple[tuple[str, str], ...]:
    """Return what gather.cu is compiled with."""
    named = {"SPARSE_DIM": dim, "SPARSE_VALUE_DIM": value_dim, "SPARSE_BF16": _TYPES[dtype]}
    return tuple((name, str(value)) for name, value in named.items())


def require(dtype: torch.dtype, dims: Collection[int], group: int) -> None:
    """Refuse types, sizes of keys and values, and numbers of query heads an index set that the kernel does not take."""
    if dtype not in _TYPES:
        raise ValueError(f"sparse attention on CUDA takes bfloat16 or float16, got {dtype}; convert the model")
    if group > MAX_GROUP:
        raise ValueError(f"sparse attention on CUDA takes up to {MAX_GROUP} query heads an index set, got {group}")
    if odd := [dim for dim in dims if dim % 16 or not 16 <= dim <= 256]:
        raise ValueError(f"keys and values on CUDA must have a multiple of 16 components, at most 256, got {odd[0]}")


def check(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> None:
    """Refuse, in a sentence, what the kernel is not made for."""
    require(q.dtype, (k.shape[3], v.shape[3]), q.shape[1] // indices.shape[1])
    for name, x in (("keys", k), ("values", v)):
        if q.is_cuda and not (x.is_cuda or x.is_pinned()):
            raise ValueError(f"{name} in host memory must be pinned for CUDA to read them; call .pin_memory()")
        steps = [step for step, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
        if x.data_ptr() % 16 or any(step % 8 for step in steps):
            raise ValueError(
                f"{name} on CUDA must begin at multiples of 16 bytes, got strides {x.stride()} and a "
                f"remainder of {x.data_ptr() % 16}; call .clone()"
            )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    left_out: Sequence[Tensor | None] = (None,) * 4,
    ends: Sequence[int] = (0, 0),
    always: Tensor | None = None,
    run: Run | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `sparse_decode.attend.attend` returns with facts, of arguments that were checked.

    Args: as there; left_out: the fields of its `LeftOut`, or None four times; always: its `ends`, if that is a tensor.

    Weights are rounded to q's type before they multiply values; sums are float32. Indices outside [0, N) are unused.
    """
    batch, hq, queries, dim = q.shape
    value_dim, sets, width = v.shape[3], indices.shape[1], indices.shape[3]
    out, facts = _empty(q, k, v)
    sink = min(ends[0], k.shape[2])
    recent = min(ends[1], k.shape[2] - sink)
    if always is not None:
        (sink, recent), always = (always.shape[1], 0), always.contiguous()
    slots_used = sink + width + recent
    if not slots_used or not out.numel() or not k.shape[2]:
        facts[0], facts[1] = 0, -torch.inf
        return out.zero_(), facts
    group, tasks = hq // sets, batch * sets * queries
    slots, splits = split(tasks, slots_used, _processors(q.device))
    sums = q.new_empty(tasks, splits, group, value_dim, dtype=torch.float32)
    stats = q.new_empty(tasks, splits, group, 3, dtype=torch.float32)
    counts = q.new_empty(tasks, splits, dtype=torch.int32)
    q, indices = q.contiguous(), indices.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    heads_per_kv, n = hq // k.shape[1], k.shape[2]
    shape = Shape(sets, queries, width, group, heads_per_kv, n, slots, sink, recent, scaling, softcap or 0.0)
    addresses = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, indices, sums, stats, counts)]
    defined = macros(dim, value_dim, q.dtype)
    listed = ctypes.c_void_p(None if always is None else always.data_ptr())
    gather = (*addresses, Rows(*k.stride()[:3]), Rows(*v.stride()[:3]), shape, listed)
    sink_logits = ctypes.c_void_p(None if sinks is None else sinks.data_ptr())
    results = ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(facts.data_ptr())
    rest = [None if x is None else x.contiguous() for x in left_out]
    given = LeftOut(*(None if x is None else x.data_ptr() for x in rest))
    combine = (
        *addresses[4:],
        sink_logits,
        *results,
        ctypes.c_int32(splits),
        ctypes.c_int32(tasks),
        shape,
        addresses[0],
        given,
    )
    launches = [
        make_launch("gather.cu", "gather", (tasks, splits), THREADS, gather, defined),
        make_launch("gather.cu", "combine", (tasks, group), THREADS, combine, defined, programmatic=True),
    ]
    (launch.run if run is None else run)(launches, q.device, KERNELS)
    return out, facts


def split(tasks: int, width: int, processors: int) -> tuple[int, int]:
    """Return the slots of a split and how many splits there are: enough blocks to fill the device, none too small."""
    wanted = max(1, min(BLOCKS_PER_PROCESSOR * processors // tasks, -(-width // LEAST_SLOTS)))
    slots = -(-width // (wanted * SLOTS)) * SLOTS
    return slots, -(-width // slots)


def _processors(device: torch.device) -> int:
    return launch.processors(device) if device.type == "cuda" else SIMULATED_PROCESSORS


def _empty(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes that `attend` returns: what a compiler and a fake device see."""
    batch, hq, queries, _ = q.shape
    return q.new_empty(batch, queries, hq, v.shape[3]), q.new_empty(2, batch, queries, hq, dtype=torch.float32)


def _checked(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    check(q, k, v, indices)
    return attend(q, k, v, indices, *how[:3], left_out=how[3:7], ends=how[7:9], always=how[9])


_NAME = "gather"
LIBRARY = torch.library.Library("sparse_decode", "FRAGMENT")
LIBRARY.define(
    f"{_NAME}(Tensor q, Tensor k, Tensor v, Tensor indices, float scaling, float? softcap, Tensor? sinks, "
    "Tensor? coefficients, Tensor? mean_keys, Tensor? values, Tensor? visible, SymInt sink, SymInt recent, "
    "Tensor? always) -> (Tensor, Tensor)"
)
LIBRARY.impl(_NAME, _checked, "CUDA")
torch.library.register_fake(f"sparse_decode::{_NAME}", _empty, lib=LIBRARY)
OPERATOR: Any = torch.ops.sparse_decode.gather
"""`attend` as an operator, so that it can be traced, counted and captured."""
