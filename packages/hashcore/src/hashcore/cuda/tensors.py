"""hashcore's operations on torch tensors in device memory: shapes and strides in, launches out.

Nothing is checked here that hashcore.ops checks. Values in device memory are never read by the host, except where a
docstring says so. `run` executes launches, by default on the device; the tests pass the host simulator and tensors in
CPU memory.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from hashcore.cuda import kernels, launch, layout
from hashcore.cuda.kernels import Launch, Output
from hashcore.cuda.layout import Selection, Window, Workspace

Run = Callable[[Iterable[Launch], torch.device], None]
Bound = int | torch.Tensor | None

PACKED = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.bool: "u8",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
QUANTISED = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SIMULATED_PROCESSORS = 3  # of a device that is none: few enough that a row has several chunks, and more than one turn


def pack(x: torch.Tensor, out: torch.Tensor, run: Run | None = None) -> None:
    """Pack [..., 32 W] numbers into contiguous int32 [..., W] (eq. 1)."""
    if out.numel():
        x = (x.view(UNSIGNED[x.dtype]) != 0 if x.dtype in UNSIGNED else x).contiguous()  # all that is not 0 is positive
        _run(run, [kernels.pack(PACKED[x.dtype], x.data_ptr(), out.data_ptr(), out.numel())], x.device)


def planes(w: torch.Tensor, out: torch.Tensor, run: Run | None = None) -> None:
    """Quantise [..., 32 W] weights into contiguous int32 [..., P, W] (eq. 5)."""
    count, words = out.shape[-2:]
    if out.numel():
        rows = out.numel() // (count * words)
        layout.require_rows(rows)
        w = (w if w.dtype in QUANTISED else w.float()).contiguous()
        _run(run, [kernels.planes(QUANTISED[w.dtype], w.data_ptr(), out.data_ptr(), rows, words, count)], w.device)


def quantise(w: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, planes: int, run: Run | None = None) -> None:
    """Quantise [..., D] weights into contiguous int16 levels [..., D] and float32 scales [..., 1] (eq. 5)."""
    if levels.numel():
        size = w.shape[-1]
        layout.require_rows(w.numel() // size)
        w = (w if w.dtype in QUANTISED else w.float()).contiguous()
        addresses = w.data_ptr(), levels.data_ptr(), scales.data_ptr()
        _run(run, [kernels.levels(QUANTISED[w.dtype], *addresses, w.numel() // size, size, planes)], w.device)


def group_planes(codes: torch.Tensor, out: torch.Tensor, run: Run | None = None) -> None:
    """Merge [..., G, W] codes into contiguous int32 [..., P, W] (eq. 3)."""
    group, words = codes.shape[-2:]
    if out.numel():
        rows = codes.numel() // (group * words)
        layout.require_rows(rows)
        codes = codes.contiguous()
        _run(run, [kernels.group_planes(codes.data_ptr(), out.data_ptr(), rows, group, words)], codes.device)


def score(
    query: torch.Tensor, keys: torch.Tensor, weights: Sequence[int] | None, out: torch.Tensor, run: Run | None = None
) -> None:
    """Write int32 [..., Q, N], or [..., N] with weights, into contiguous memory (eq. 2, eq. 4)."""
    if not out.numel():
        return
    n, words = keys.shape[-2:]
    layout.require_positions(n)
    if weights is None:
        lead = out.shape[:-2]
        at = _operands(query, keys, lead)
        batch, queries = math.prod(lead), query.shape[-2]
        pairs = kernels.score_pairs(
            at.query.data_ptr(), at.keys.data_ptr(), out.data_ptr(), batch, queries, n, words, at.map
        )
        return _run(run, [pairs], out.device)
    lead = out.shape[:-1]
    at = _operands(query, keys, lead)
    rows = math.prod(lead)
    scores = kernels.score_all(at.query.data_ptr(), at.keys.data_ptr(), out.data_ptr(), rows, n, words, weights, at.map)
    return _run(run, [scores], out.device)


class Bounds(NamedTuple):
    """Which positions of a row compete: [start + sink, length - recent)."""

    lengths: Bound = None
    starts: Bound = None
    sink: int = 0
    recent: int = 0

    def window(self, lead: Sequence[int], n: int) -> tuple[Window, list[torch.Tensor]]:
        """Return the argument of the kernels, and the tensors that it points at."""
        kept: list[torch.Tensor] = []
        addresses: list[int | None] = []
        values: list[int] = []
        for bound, default in ((self.lengths, n), (self.starts, 0)):
            if isinstance(bound, torch.Tensor):
                kept.append(_int32(bound, n).expand(lead).contiguous())
                addresses.append(kept[-1].data_ptr())
                values.append(default)
            else:
                addresses.append(None)
                values.append(default if bound is None else bound)
        return Window(*addresses, *values, min(self.sink, n), min(self.recent, n), n), kept


def workspace(rows: int, n: int, words: int, weights: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return scratch memory, int32, for searches of `rows` rows of n positions, W words and these weights on a device.

    Such a search leaves it ready for the next; another shape needs its own, and so does a search that may run at the
    same time.
    """
    levels = layout.score_levels(words, weights)
    return _scratch(Workspace.plan(rows, n, levels, _processors(device)), device)


def search(
    query: torch.Tensor,
    keys: torch.Tensor,
    k: int | torch.Tensor,
    weights: Sequence[int] | None,
    bounds: Bounds,
    scores: torch.Tensor,
    indices: torch.Tensor,
    scratch: torch.Tensor | None = None,
    run: Run | None = None,
) -> None:
    """Score and select in two launches, in ascending index order (eq. 4, eq. 6).

    Args:
        query: planes [..., P, W], or without weights codes [..., Q, W].
        keys: [..., N, W].
        k: one count, or an integer tensor on the device that expands to the rows.
        scores, indices: contiguous int32, and int32 or int64, [rows..., K]; slots that are not filled get 0 and -1.
        scratch: of `workspace`; by default it is allocated, and cleared by a third launch.
    """
    n, words = keys.shape[-2:]
    lead = scores.shape[:-1]
    if not scores.numel():
        return
    if weights is None:  # each of the Q queries is one plane of weight 1
        query, keys, weights = query.unsqueeze(-2), keys.unsqueeze(-3), (1,)
    rows, device = math.prod(lead), scores.device
    plan = Workspace.plan(rows, n, layout.score_levels(words, weights), _processors(device))
    at = _operands(query, keys, lead)
    if scratch is None:
        scratch = _scratch(plan, device)
    elif scratch.numel() != plan.words:
        raise ValueError(
            f"the workspace must hold {plan.words} words for {rows} rows of {n} positions, got {scratch.numel()}; "
            "make it with hashcore.cuda.tensors.workspace"
        )
    window, kept = bounds.window(lead, n)
    selection, counts = _selection(k, lead, scores.shape[-1])
    output = Output(scores.data_ptr(), indices.data_ptr(), 8 * indices.element_size())
    addresses = at.query.data_ptr(), at.keys.data_ptr()
    launches = kernels.search(
        *addresses, at.map, words, weights, rows, window, selection, output, scratch.data_ptr(), plan
    )
    _run(run, launches, device)
    del kept, counts  # the allocator may reuse them from here on: the launches are in the stream


def topk(
    scores: torch.Tensor,
    k: int | torch.Tensor,
    bounds: Bounds,
    values: torch.Tensor,
    indices: torch.Tensor,
    run: Run | None = None,
) -> None:
    """Select from integer scores of at most 32 bits, [..., N], into int32 values and indices [..., K] (eq. 6)."""
    n, lead = scores.shape[-1], scores.shape[:-1]
    if not values.numel():
        return
    rows, device = math.prod(lead), scores.device
    plan = Workspace.plan(rows, n, layout.INT32_LEVELS, _processors(device), scores=False)
    stride = -(-n // layout.VECTOR) * layout.VECTOR
    aligned = scores.to(torch.int32).reshape(rows, n)
    if stride != n or aligned.data_ptr() % 16 or not aligned.is_contiguous():
        aligned = torch.nn.functional.pad(aligned, (0, stride - n))
        aligned = aligned.clone() if aligned.data_ptr() % 16 else aligned.contiguous()
    scratch = _scratch(plan, device)
    window, kept = bounds.window(lead, n)
    selection, counts = _selection(k, lead, values.shape[-1])
    output = Output(values.data_ptr(), indices.data_ptr(), 8 * indices.element_size())
    _run(
        run, kernels.topk(aligned.data_ptr(), stride, rows, window, selection, output, scratch.data_ptr(), plan), device
    )
    del kept, counts


def _run(run: Run | None, launches: Iterable[Launch], device: torch.device) -> None:
    (launch.run if run is None else run)(launches, device)


class _Operands(NamedTuple):
    query: torch.Tensor
    keys: torch.Tensor
    map: layout.RowMap


def _operands(query: torch.Tensor, keys: torch.Tensor, lead: Sequence[int]) -> _Operands:
    """Return the operands in a form the kernels can address, copied only where they are not."""
    layout.require_rows(math.prod(lead))
    query, keys = _rows(query), _rows(keys)
    for attempt in range(3):
        query_lead, keys_lead = query.expand(*lead, *query.shape[-2:]), keys.expand(*lead, *keys.shape[-2:])
        found = layout.collapse(lead, query_lead.stride()[:-2], keys_lead.stride()[:-2])
        if found is not None:
            return _Operands(query, keys, found)
        if attempt == 0:
            query = query_lead.contiguous()  # small; keys are copied only if that does not help
        else:
            keys = keys_lead.contiguous()
    raise AssertionError("contiguous operands collapse to one dimension")


def _rows(codes: torch.Tensor) -> torch.Tensor:
    """Return codes whose last two dimensions lie close together, aligned to the loads of the kernels."""
    rows, words = codes.shape[-2:]
    unit = math.gcd(words, 4)
    dense = (codes.stride(-1) == 1 or words == 1) and (codes.stride(-2) == words or rows == 1)
    aligned = codes.data_ptr() % (4 * unit) == 0 and not any(
        step % unit for step, size in zip(codes.stride()[:-2], codes.shape[:-2], strict=True) if size > 1
    )
    return codes if dense and aligned else codes.clone(memory_format=torch.contiguous_format)


def _selection(k: int | torch.Tensor, lead: Sequence[int], width: int) -> tuple[Selection, torch.Tensor | None]:
    if isinstance(k, int):
        return Selection(None, k, width), None
    counts = _int32(k, width).expand(lead).contiguous()
    return Selection(counts.data_ptr(), 0, width), counts


def _int32(values: torch.Tensor, most: int) -> torch.Tensor:
    """Return integers as int32; wider ones are clamped to 0..most here, before they could wrap."""
    if values.element_size() < 4 or values.dtype == torch.int32:
        return values.to(torch.int32)  # clamped by the kernels
    return values.to(torch.int64).clamp(0, most).to(torch.int32)


def _scratch(plan: Workspace, device: torch.device) -> torch.Tensor:
    scratch = torch.empty(plan.words, dtype=torch.int32, device=device)
    scratch[: plan.zeros].zero_()
    return scratch


def _processors(device: torch.device) -> int:
    return launch.processors(device) if device.type == "cuda" else SIMULATED_PROCESSORS
