"""hashcore's operations on torch tensors in device memory: prepares launches from shapes and strides.

A search is in `hashcore.cuda.tensor_search`. torch_ops has checked the arguments. The host never reads device memory,
except where a docstring says so. Tests put the host simulator in place of `launch.run`,
and pass tensors in CPU memory.
"""

import math
from collections.abc import Sequence
from ctypes import c_int32, c_void_p

import torch

from hashcore import quantiser
from hashcore.cuda import kernels, launch, layout
from hashcore.cuda.operands import as_operands, integers
from hashcore.validation import RowLimits

PACKED = {
    **{torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"},
    **{torch.bool: "u8", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16"},
    **{torch.int32: "i32", torch.int64: "i64"},
}
UNSIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
MAX_GRID_Y = 65_535
NO_ENTRY = -(1 << 63)  # below every entry of a selection


def pack(x: torch.Tensor, out: torch.Tensor) -> None:
    """Pack [..., 32 W] numbers into contiguous int32 [..., W] (eq. 1)."""
    if out.numel():
        x = (x.view(UNSIGNED[x.dtype]) != 0 if x.dtype in UNSIGNED else x).contiguous()  # positive means not 0
        launch.run([kernels.pack(PACKED[x.dtype], x.data_ptr(), out.data_ptr(), out.numel())], x.device)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """Return the bits of codes [..., W], bool [..., 32 W]."""
    bits = codes.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=codes.device)
    return (bits & 1).to(torch.bool).flatten(-2)


def planes(w: torch.Tensor, planes: int, check: bool, out: torch.Tensor) -> None:
    """Quantise [..., 32 W] weights into contiguous int32 [..., P, W] (eq. 5)."""
    *lead, _, words = out.shape
    layout.require_rows(rows := math.prod(lead))  # before weights of too many rows are copied
    w = w.float().contiguous()
    if check:
        _refuse_infinite(w)
    if rows:
        launch.run([kernels.planes(w.data_ptr(), out.data_ptr(), rows, words, planes)], w.device)


def quantise(w: torch.Tensor, planes: int, check: bool, levels: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise [..., D] weights into levels [..., D] and float32 scales [..., 1] (eq. 5), by torch's operators.

    No tensor is divided by a number: torch would multiply by its inverse, which is rounded.
    """
    w, limits, most = w.float(), torch.finfo(torch.float32), 2**planes - 1
    if check:
        _refuse_infinite(w)
    finite = w.nan_to_num(0.0, limits.max, limits.min)
    peak = finite.abs().amax(-1, keepdim=True)
    scales.copy_(peak * float(quantiser.clip(planes)) / torch.full_like(peak, most)).clamp_(min=limits.tiny)
    found = ((finite / scales * 0.5).floor() * 2 + 1).clamp(-most, most)
    levels.copy_(found.masked_fill(w.isnan(), -1))


def _refuse_infinite(w: torch.Tensor) -> None:
    """Raise ValueError if w is not finite. The host waits for the device only here."""
    if w.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("w cannot be checked while a CUDA graph is captured; use planes(..., check=False)")
    peak = w.abs().amax() if w.numel() else None
    if peak is not None and not torch.isfinite(peak):
        raise ValueError(f"w must be finite in float32, got {peak.item()} in a row; look for an overflow upstream")


def group_planes(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Merge [..., G, W] codes into contiguous int32 [..., P, W] (eq. 3), as `quantiser.group_planes` does."""
    *regular, last = quantiser.group_weights(codes.shape[-2])
    counts = unpack(codes).sum(-2)
    carry = counts > sum(regular)
    counts = counts - last * carry
    pack(torch.stack([*(counts & weight for weight in regular), carry], -2), out)


def score(query: torch.Tensor, keys: torch.Tensor, weights: Sequence[int] | None, out: torch.Tensor) -> None:
    """Write int32 [..., Q, N], or [..., N] with weights, into contiguous memory (eq. 2, eq. 4)."""
    if not out.numel():
        return
    n, words = keys.shape[-2:]
    layout.require_positions(n)
    if weights is None:  # each of the Q queries is one plane of weight 1
        query, keys, weights = query.unsqueeze(-2), keys.unsqueeze(-3), (1,)
    lead = out.shape[:-1]
    at = as_operands(query, keys, lead)
    addresses = (c_void_p(x.data_ptr()) for x in (at.query, at.keys, out))
    arguments = *addresses, at.map, layout.Weights(tuple(weights)), c_int32(n)
    grid = math.prod(lead), min(-(-n // layout.TILE), MAX_GRID_Y)
    macros = kernels.score_macros(words, weights, launch.counts_bits(out.device))
    launch.run([kernels.make_launch("score.cu", "score_all", grid, layout.THREADS, arguments, macros)], out.device)


def topk(scores: torch.Tensor, rows: RowLimits, values: torch.Tensor, indices: torch.Tensor) -> None:
    """Select from integer scores of at most 32 bits, [..., N], into values and indices [..., K] (eq. 6).

    Score and index make one int64, so no two are equal, and torch's selection has one result.
    """
    n, width = scores.shape[-1], values.shape[-1]
    if not values.numel():
        return
    position = torch.arange(n, dtype=torch.int64, device=scores.device)
    low, high = _each_row(rows.starts, rows.start, n), _each_row(rows.lengths, rows.length, n)
    seen = (position >= low + rows.sink) & (position < high - rows.recent)
    entries = (scores.to(torch.int64) << 32 | (n - position)).masked_fill(~seen, NO_ENTRY)
    best = entries.topk(width, dim=-1).values
    slot = torch.arange(width, dtype=torch.int64, device=scores.device)
    unused = (best == NO_ENTRY) | (slot >= _each_row(rows.k, width, width))
    found = (n - (best & 0xFFFFFFFF)).masked_fill(unused, n).sort(dim=-1).values
    unused = found == n
    values.copy_(scores.gather(-1, found.masked_fill(unused, 0)).masked_fill(unused, 0))
    indices.copy_(found.masked_fill(unused, -1))


def _each_row(values: torch.Tensor | None, number: int, most: int) -> int | torch.Tensor:
    """Return the integer of all rows, or one of each row [..., 1] in 0..most."""
    return number if values is None else integers(values).clamp(0, most).unsqueeze(-1)
