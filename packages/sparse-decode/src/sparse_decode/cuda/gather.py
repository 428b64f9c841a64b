"""Attention over selected tokens on CUDA: prepares the two launches of kernels/gather.cu."""

import ctypes
import itertools
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hashcore.cuda import launch
from hashcore.cuda.kept import Table, scratch
from hashcore.cuda.kernels import Kept, Launch, make_launch
from hashcore.cuda.layout import Pages
from hashcore.cuda.operands import Tables, page_tables
from torch import Tensor

from sparse_decode.inputs import MAX_GROUP, require

Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values and indices."""
KERNELS = Path(__file__).parent.parent / "kernels"
THREADS = 128
COMBINE_THREADS = 256
SLOTS = 16
LEAST_SLOTS = THREADS // 32 * SLOTS  # per split: one step for each warp, because each step waits for memory
MOST_SPLITS = 512  # of a task: their weights are in shared memory
BLOCKS_PER_SM = 3
LARGE_BLOCKS_PER_SM = 2  # with more than 8 heads, or 256 components of keys and values together, for their registers
SIMULATED_SMS = 2
_TYPES = {torch.bfloat16: 1, torch.float16: 0}


Run = Callable[[Iterable[Launch], torch.device, Path], None]
"""Executes launches on a device, from a folder of kernels: `hashcore.cuda.launch.run`, or the simulator in tests."""


class Rows(ctypes.Structure):
    """Strides of batch row, head and token in elements: Rows of kernels/gather.cu."""

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


def macros(
    dim: int, value_dim: int, dtype: torch.dtype, paged: bool = False, group: int = 1
) -> tuple[tuple[str, str], ...]:
    """Return the macros that gather.cu is compiled with; group: query heads per index set."""
    named = {"SPARSE_DIM": dim, "SPARSE_VALUE_DIM": value_dim, "SPARSE_BF16": _TYPES[dtype]}
    named |= {"HASHCORE_PAGES": 1} if paged else {}
    named |= {"SPARSE_HEADS": MAX_GROUP} if group > 8 else {}  # 8 need half the registers
    return tuple((name, str(value)) for name, value in named.items())


def check(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> None:
    """Raise ValueError if the kernel does not support these tensors."""
    _check_form(q, k, v, indices)
    for name, x in (("keys", k), ("values", v)):
        if q.is_cuda and not (x.is_cuda or x.is_pinned()):
            raise ValueError(f"{name} in host memory must be pinned for CUDA to read them; call .pin_memory()")
        if x.data_ptr() % 16:
            raise _misplaced(name, x)


def _check_form(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> None:
    """Run the part of `check` that depends on shapes, strides and dtypes only."""
    require(torch.device("cuda"), q.dtype, (k.shape[3], v.shape[3]), q.shape[1] // indices.shape[1])
    for name, x in (("keys", k), ("values", v)):
        if any(step % 8 for step, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1):
            raise _misplaced(name, x)


def _misplaced(name: str, x: Tensor) -> ValueError:
    return ValueError(
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
        coefficients, mean_keys, values: of the remainder, float32 [Hq, 4], [B, Hkv, Q, D] and [B, Hq, Q, Dv], or None;
            visible: number of visible tokens, int64 [B, Q]; None: N.
        sink, recent: numbers of first and last of the N tokens that are read besides `indices`, which must not have
            them; or always: the tokens that all rows of a sequence read besides, int64 [B, E], -1 in unused slots.
        blocks: page tables, int32 or int64 [B, T]. Then k and v are pages [M, Hkv, S, D] and [M, Hkv, S, Dv], S a power
            of two and M above 0; token j of a row is token j % S of page blocks[j // S], and N = T S. Page numbers out
            of range count as M - 1.
    Returns: [B, Q, Hq, Dv]. Indices outside [0, N) are unused. Weights are rounded to q's dtype before they multiply
        values; sums are float32.
    """
    device, left_out = q.device, (coefficients, mean_keys, values, visible)
    if q.is_cuda and not (k.is_cuda and v.is_cuda):
        check(q, k, v, indices)  # shapes do not tell whether host memory is pinned
    more = sinks is None, coefficients is None, None if always is None else always.shape
    tables = None if blocks is None else page_tables(blocks, (q.shape[0],))
    how = scaling, softcap, sink, recent, more, None if tables is None else (tables.blocks.shape[-1], tables.width)
    form = q.shape, k.shape, k.stride(), v.shape, v.stride(), indices.shape, q.dtype, device, how
    call = _calls.found.get(form)
    if call is None:
        given = (q, k, v, indices), (sink, recent), always, scaling, softcap, sinks is None and coefficients is None
        call = _renewed(form, *given) if tables is None else _calls.keep(form, _prepare(*given, tables))
    out = torch.empty_like(call.like)
    if call.launches is None:
        return out.zero_()
    held = _place(call, (q, k, v, indices), out, (sinks, left_out, always))
    if tables is not None:
        call.pages.table = tables.blocks.data_ptr()
    (launch.run if run is None else run)(call.launches, device, KERNELS)
    del held  # kept until the launches are in the stream; from here on the allocator may reuse them
    return out


_ADDRESSES = "q", "k", "v", "indices", "sums", "stats", "counts", "always", "sinks", "out", "lse"
_Arguments = namedtuple("_Arguments", (*_ADDRESSES, "left_out"))
"""The arguments that change from call to call: addresses."""


class _Call(NamedTuple):
    """Prepared launches for one set of shapes, strides and options."""

    at: _Arguments
    like: Tensor  # the result; `empty_like` takes less time than `new_empty`
    stats: int  # bytes from the sums in scratch memory to the statistics, to the counts, and to an unwanted lse
    counts: int
    unused: int
    words: int  # of scratch memory, including that of searches
    alone: bool  # no sinks, no remainder, and no list of tokens that are always read
    launches: Kept | None  # None: there is nothing to read
    shape: Shape
    strides: tuple[Rows, Rows]
    pages: Pages

    def resize(self, given: Given, ends: Sequence[int], always: Tensor | None) -> bool:
        """Adapt the launches to a new number of tokens; False if their grids would have to change."""
        _check_form(*given)
        q, k, v, indices = given
        n, width, shape = v.shape[2], indices.shape[3], self.shape
        sink, recent = _ends(ends, always, n)
        if self.launches is None or not sink + width + recent:
            return False
        tasks, splits = self.launches[0].grid
        slots, wanted = split(tasks, sink + width + recent, _sm_count(q.device), _per_sm(*given))
        if wanted != splits:
            return False
        shape.tokens, shape.width, shape.slots, shape.sink, shape.recent = n, width, slots, sink, recent
        for rows, x in zip(self.strides, (k, v), strict=True):
            rows.batch, rows.head, rows.token = x.stride()[:3]
        return True

    def place(self, address: int) -> None:
        """Set the address of scratch memory, if it has changed."""
        at = self.at
        if at.sums.value != address:
            at.sums.value, at.stats.value, at.counts.value = address, address + self.stats, address + self.counts
            at.lse.value = address + self.unused


_calls: Table[_Call] = Table()


def _renewed(form: tuple[Any, ...], *given: Any) -> _Call:
    """Return the launches for a form: those of the previous length, updated, or new ones; given: of `_prepare`."""
    q, k, v, indices = given[0]
    (*lead, n, dim), value_dim = k.shape, v.shape[3]
    kind = q.shape, *lead, dim, value_dim, indices.shape[:3], *form[6:]
    return _calls.renew(form, kind, n, lambda made: made.resize(*given[:3]), lambda: _prepare(*given))


def _prepare(
    given: Given, ends: Sequence[int], always: Tensor | None, scaling: float, softcap: float | None, plain: bool,
    tables: Tables | None = None,
) -> _Call:  # fmt: skip
    """Create the launches for a form; plain: without sinks and remainder."""
    _check_form(*given)
    q, k, v, indices = given
    (batch, hq, queries, dim), (hkv, n, value_dim) = q.shape, v.shape[1:]
    pages = Pages()
    if tables is not None:
        pages, n = _pages(k, tables), n * tables.blocks.shape[1]
    sets, width = indices.shape[1], indices.shape[3]
    at = _Arguments(*(ctypes.c_void_p() for _ in range(11)), left_out=LeftOut())
    like = q.new_empty(batch, queries, hq, value_dim)
    (sink, recent), rows, shape = _ends(ends, always, n), (Rows(*k.stride()[:3]), Rows(*v.stride()[:3])), Shape()
    if not sink + width + recent or not q.shape.numel() or not n:
        return _Call(at, like, 0, 0, 0, 0, True, None, shape, rows, pages)
    group, tasks = hq // sets, batch * sets * queries
    slots, splits = split(tasks, sink + width + recent, _sm_count(q.device), _per_sm(*given))
    shape = Shape(sets, queries, width, group, hq // hkv, n, slots, sink, recent, scaling, softcap or 0.0)
    first = (*at[:7], *rows, shape, at.always, *(() if tables is None else (pages,)))
    counts = ctypes.c_int32(splits), ctypes.c_int32(tasks)
    second = (*at[4:7], at.sinks, at.out, at.lse, *counts, shape, at.q, at.left_out)
    defined = macros(dim, value_dim, q.dtype, tables is not None, group)
    launches = [
        make_launch("gather.cu", "gather", (tasks, splits), THREADS, first, defined, programmatic=True),
        make_launch("gather.cu", "combine", (tasks, group), COMBINE_THREADS, second, defined, programmatic=True),
    ]
    scratch = _scratch_at(tasks, splits, group, value_dim)
    return _Call(at, like, *scratch, plain and always is None, Kept(launches), shape, rows, pages)


def _scratch_at(tasks: int, splits: int, group: int, value_dim: int) -> tuple[int, int, int, int]:
    """Return where statistics, counts and an unused lse lie behind the sums, in bytes, and the words of all memory."""
    parts = tasks * splits
    stats, counts, lse, end = itertools.accumulate(
        (parts * group * value_dim, 3 * parts * group, parts, 2 * tasks * group)
    )
    return 4 * stats, 4 * counts, 4 * lse, end


def _pages(k: Tensor, tables: Tables) -> Pages:
    """Return the kernel's argument for keys in pages. Raises: ValueError if it does not support them."""
    count, _, size, _ = k.shape
    if size & (size - 1) or not size or not 0 < count * size < 1 << 31:
        raise ValueError(
            f"pages on CUDA must have a power of two of tokens, below 2^31 in all, got {count} pages of {size}; use "
            "pages of 16 or 32"
        )
    return Pages(None, 0, tables.width, 1, size.bit_length() - 1, count - 1)


def _ends(ends: Sequence[int], always: Tensor | None, n: int) -> tuple[int, int]:
    """Return the numbers of slots of sink (or listed) tokens and of recent tokens."""
    sink = min(ends[0], n)
    return (sink, min(ends[1], n - sink)) if always is None else (always.shape[1], 0)


def _place(call: _Call, given: Given, out: Tensor, more: tuple[Any, ...]) -> list[Tensor | None]:
    """Set all addresses; return the tensors that were made, which must stay alive until the launch.

    Args: more: sinks, the inputs of the remainder, and always.
    """
    q, k, v, indices = given
    q, indices, at, keys, values = q.contiguous(), indices.contiguous(), call.at, k.data_ptr(), v.data_ptr()
    if (keys | values) % 16:
        check(q, k, v, indices)
    at.q.value, at.k.value, at.v.value, at.indices.value = q.data_ptr(), keys, values, indices.data_ptr()
    at.out.value = out.data_ptr()
    call.place(scratch(call.words, q.device).address)
    return [q, indices] if call.alone else [q, indices, *_place_more(at, *more)]


def _place_more(
    at: _Arguments, sinks: Tensor | None, left_out: Sequence[Tensor | None], always: Tensor | None
) -> list[Tensor | None]:
    """Set the addresses of the optional tensors; return the tensors, which must stay alive until the launch."""
    sinks = None if sinks is None else sinks.float().contiguous()
    found = [None if x is None else x.contiguous() for x in (always, *left_out)]
    at.sinks.value, given = None if sinks is None else sinks.data_ptr(), at.left_out
    at.always.value, given.coefficients, given.mean_keys, given.values, given.visible = (
        None if x is None else x.data_ptr() for x in found
    )
    return [sinks, *found]


def split(tasks: int, width: int, sms: int, per_sm: int = BLOCKS_PER_SM) -> tuple[int, int]:
    """Return the slots per split and the number of splits: one step per warp, or more if one wave needs them."""
    wanted = max(1, min(per_sm * sms // tasks, -(-width // LEAST_SLOTS), MOST_SPLITS))
    slots = -(-width // (wanted * SLOTS)) * SLOTS
    return slots, -(-width // slots)


def _per_sm(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> int:
    small = k.shape[3] + v.shape[3] <= 256 and q.shape[1] // indices.shape[1] <= 8
    return BLOCKS_PER_SM if small else LARGE_BLOCKS_PER_SM


def _sm_count(device: torch.device) -> int:
    return launch.sm_count(device) if device.type == "cuda" else SIMULATED_SMS


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
