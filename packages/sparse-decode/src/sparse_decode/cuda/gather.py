"""Attention over selected tokens on CUDA: prepares the two launches of kernels/gather.cu."""

import ctypes
import functools
import itertools
from collections import namedtuple
from collections.abc import Callable, Iterable
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hashcore.cuda import launch
from hashcore.cuda.kept import Table, scratch
from hashcore.cuda.kernels import Launch, make_launch
from hashcore.cuda.layout import Pages
from hashcore.cuda.operands import Tables, page_tables
from hashcore.cuda.source import structure
from torch import Tensor

from sparse_decode.inputs import MAX_GROUP, require

KERNELS = Path(__file__).parent.parent / "kernels"
THREADS = 128
COMBINE_THREADS = 256
SLOTS = 16
LEAST_SLOTS = THREADS // 32 * SLOTS  # per split: one step for each warp, because each step waits for memory
MOST_SPLITS = 512  # of a task: their weights are in shared memory
BLOCKS_PER_SM = 3
LARGE_BLOCKS_PER_SM = 2  # with more than 8 heads, or 256 components of keys and values together, for their registers
_TYPES = {torch.bfloat16: 1, torch.float16: 0}


Run = Callable[[Iterable[Launch], torch.device, Path], None]
"""Executes launches on a device, from a folder of kernels: `hashcore.cuda.launch.run`, or the simulator in tests."""


Rows: Any = structure(KERNELS, "gather.cu", "Rows")
Shape: Any = structure(KERNELS, "gather.cu", "Shape")
LeftOut: Any = structure(KERNELS, "gather.cu", "LeftOut")


def macros(
    dim: int, value_dim: int, dtype: torch.dtype, paged: bool = False, group: int = 1
) -> tuple[tuple[str, str], ...]:
    """Return the macros that gather.cu is compiled with; group: query heads per index set."""
    named = {"SPARSE_DIM": dim, "SPARSE_VALUE_DIM": value_dim, "SPARSE_BF16": _TYPES[dtype]}
    named |= {"HASHCORE_PAGES": 1} if paged else {}
    named |= {"SPARSE_HEADS": MAX_GROUP} if group > 8 else {}  # 8 need half the registers
    return tuple((name, str(value)) for name, value in named.items())


def check(q: Tensor, k: Tensor, v: Tensor, sets: int) -> None:
    """Raise ValueError if the kernels of this package do not support these tensors; sets: index sets of a row."""
    require(torch.device("cuda"), q.dtype, (k.shape[3], v.shape[3]), q.shape[1] // sets)
    for name, x in (("keys", k), ("values", v)):
        if q.is_cuda and not (x.is_cuda or x.is_pinned()):
            raise ValueError(f"{name} in host memory must be pinned for CUDA to read them; call .pin_memory()")
        odd = any(step % 8 for step, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1)
        if odd or x.data_ptr() % 16:
            raise ValueError(
                f"rows of {name} on CUDA must be aligned to 16 bytes, got strides {x.stride()} and an address that is "
                f"{x.data_ptr() % 16} modulo 16; call .clone()"
            )


def gather(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None,
    coefficients: Tensor | None = None, mean_keys: Tensor | None = None, values: Tensor | None = None,
    visible: Tensor | None = None, sink: int = 0, recent: int = 0, always: Tensor | None = None,
    blocks: Tensor | None = None, run: Run | None = None,
) -> Tensor:  # fmt: skip
    """Attend to selected tokens: the operator `gather` on CUDA; q [B, Hq, Q, D], indices int64 [B, H, Q, K], -1 unused.

    Args:
        coefficients, mean_keys, values: of the remainder, float32 [Hq, 5], [B, Hkv, Q, D] and [B, Hq, Q, Dv], or None;
            visible: number of visible tokens, int64 [B, Q]; None: N.
        sink, recent: numbers of first and last of the N tokens that are read besides `indices`, which must not have
            them; or always: the tokens that all rows of a sequence read besides, int64 [B, E], -1 in unused slots.
        blocks: page tables, int32 or int64 [B, T]. Then k and v are pages [M, Hkv, S, D] and [M, Hkv, S, Dv], S a power
            of two and M above 0; token j of a row is token j % S of page blocks[j // S], and N = T S. Page numbers out
            of range count as M - 1.
    Returns: [B, Q, Hq, Dv]. Indices outside [0, N) are unused. Weights are rounded to q's dtype before they multiply
        values; sums are float32.
    """
    device, strides, tables = q.device, (k.stride(), v.stride()), None
    places = k.data_ptr() | v.data_ptr() | 2 * functools.reduce(or_, (*strides[0][:3], *strides[1][:3]))
    if places % 16 or (q.is_cuda and not (k.is_cuda and v.is_cuda)):
        check(q, k, v, indices.shape[1])
    n, width, kind = v.shape[2], indices.shape[3], (k.shape[1], k.shape[3])
    if blocks is not None:
        tables, kind = page_tables(blocks, (q.shape[0],)), k.shape
        n *= tables.blocks.shape[-1]
    sink, recent = (min(sink, n), min(recent, n - min(sink, n))) if always is None else (always.shape[1], 0)
    if not sink + width + recent or not q.numel() or not n:
        check(q, k, v, indices.shape[1])
        return _empty(q, k, v).zero_()
    tasks = q.shape[0] * indices.shape[1] * q.shape[2]
    slots, splits = split(tasks, sink + width + recent, launch.sm_count(device), _per_sm(q, k, v, indices))
    options = scaling, softcap, sinks is None, coefficients is None, always is None
    paged = None if tables is None else (tables.blocks.shape[-1], tables.width)
    form = q.shape, kind, v.shape[3], indices.shape[1], splits, q.dtype, device, options, paged
    call = _calls.found.get(form)
    call = call or _calls.keep(form, _prepare(q, k, v, indices, n, (tasks, splits), options, tables))
    out, shape = torch.empty_like(call.like), call.shape
    shape.tokens, shape.width, shape.slots, shape.sink, shape.recent = n, width, slots, sink, recent
    for rows, steps in zip(call.strides, strides, strict=True):
        rows.batch, rows.head, rows.token, _ = steps
    q, indices, at = q.contiguous(), indices.contiguous(), call.at
    q = q.clone() if q.data_ptr() % 4 else q
    at.q.value, at.k.value, at.v.value, at.indices.value = (x.data_ptr() for x in (q, k, v, indices))
    memory = scratch(call.words, device)
    at.out.value, address = out.data_ptr(), memory.data_ptr()
    at.sums.value, at.stats.value, at.counts.value = address, address + call.stats, address + call.counts
    if tables is not None:
        call.pages.table = tables.blocks.data_ptr()
    held: list[Tensor | None] = []
    if not all(options[2:]):
        held = [None if x is None else x.contiguous() for x in (coefficients, mean_keys, values, visible, always)]
        held.append(None if sinks is None else sinks.float().contiguous())
        of_rest = at.left_out
        of_rest.coefficients, of_rest.mean_keys, of_rest.values, of_rest.visible, at.always.value, at.sinks.value = (
            None if x is None else x.data_ptr() for x in held
        )
    (launch.run if run is None else run)(call.launches, device, KERNELS)
    del held, memory  # kept until the launches are in the stream; from here on the allocator may reuse them
    return out


_ADDRESSES = "q", "k", "v", "indices", "sums", "stats", "counts", "always", "sinks", "out"
_Arguments = namedtuple("_Arguments", (*_ADDRESSES, "left_out"))
"""The arguments that change from call to call: addresses."""


class _Call(NamedTuple):
    """Prepared launches for one set of shapes and options; each call sets sizes, strides and addresses."""

    at: _Arguments
    like: Tensor  # the result; `empty_like` takes less time than `new_empty`
    stats: int  # bytes from the sums in scratch memory to the statistics, and to the counts
    counts: int
    words: int  # of scratch memory
    launches: list[Launch]
    shape: Any  # Shape
    strides: tuple[Any, Any]  # Rows of keys and of values
    pages: Any


_calls: Table[_Call] = Table()


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, n: int, grid: tuple[int, int], options: tuple[Any, ...],
    tables: Tables | None,
) -> _Call:  # fmt: skip
    """Create the launches for a form, of n tokens; grid: tasks and splits."""
    (batch, hq, queries, dim), hkv, value_dim, sets = q.shape, k.shape[1], v.shape[3], indices.shape[1]
    group, (tasks, splits), (scaling, softcap) = hq // sets, grid, options[:2]
    require(torch.device("cuda"), q.dtype, (dim, value_dim), group)
    pages = Pages() if tables is None else _pages(k, tables)
    at = _Arguments(*(ctypes.c_void_p() for _ in range(10)), left_out=LeftOut())
    rows, like = (Rows(), Rows()), q.new_empty(batch, queries, hq, value_dim)
    shape = Shape(sets, queries, 0, group, hq // hkv, n, 0, 0, 0, scaling, softcap or 0.0)
    first = (*at[:7], *rows, shape, at.always, pages)
    second = (*at[4:7], at.sinks, at.out, ctypes.c_int32(splits), shape, at.q, at.left_out)
    defined = macros(dim, value_dim, q.dtype, tables is not None, group)
    launches = [
        make_launch("gather.cu", "gather", grid, THREADS, first, defined, programmatic=True),
        make_launch("gather.cu", "combine", (tasks, group), COMBINE_THREADS, second, defined, programmatic=True),
    ]
    parts = tasks * splits
    stats, counts, words = itertools.accumulate((parts * group * value_dim, 3 * parts * group, parts))
    return _Call(at, like, 4 * stats, 4 * counts, words, launches, shape, rows, pages)


def _pages(k: Tensor, tables: Tables) -> Any:
    """Return the kernel's argument for keys in pages. Raises: ValueError if it does not support them."""
    count, _, size, _ = k.shape
    if size & (size - 1) or not size or not 0 < count * size < 1 << 31:
        raise ValueError(
            f"pages on CUDA must have a power of two of tokens, below 2^31 in all, got {count} pages of {size}; use "
            "pages of 16 or 32"
        )
    return Pages(None, 0, tables.width, 1, size.bit_length() - 1, count - 1)


def split(tasks: int, width: int, sms: int, per_sm: int = BLOCKS_PER_SM) -> tuple[int, int]:
    """Return the slots per split and the number of splits: one step per warp, or more if one wave needs them."""
    wanted = max(1, min(per_sm * sms // tasks, -(-width // LEAST_SLOTS), MOST_SPLITS))
    slots = -(-width // (wanted * SLOTS)) * SLOTS
    return slots, -(-width // slots)


def _per_sm(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> int:
    small = k.shape[3] + v.shape[3] <= 256 and q.shape[1] // indices.shape[1] <= 8
    return BLOCKS_PER_SM if small else LARGE_BLOCKS_PER_SM


def _empty(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    """Return a tensor of the operator's result shape: its fake implementation."""
    batch, hq, queries, _ = q.shape
    return q.new_empty(batch, queries, hq, v.shape[3])


LIBRARY = torch.library.Library("sparse_decode", "FRAGMENT")
OPERATORS: Any = torch.ops.sparse_decode
"""This package's torch operators, which can be traced, counted and captured."""


def operator(schema: str, fake: Callable[..., Any], **kernels: Callable[..., Any]) -> None:
    """Define a torch operator; kernels: its implementations by the type of device."""
    name = LIBRARY.define(schema)
    for device, kernel in kernels.items():
        LIBRARY.impl(name, kernel, device.upper())
    torch.library.register_fake(f"sparse_decode::{name}", fake, lib=LIBRARY)


operator(
    "gather(Tensor q, Tensor k, Tensor v, Tensor indices, float scaling, float? softcap, Tensor? sinks, "
    "Tensor? coefficients, Tensor? mean_keys, Tensor? values, Tensor? visible, SymInt sink, SymInt recent, "
    "Tensor? always, Tensor? blocks) -> Tensor",
    _empty,
    cuda=gather,
)
