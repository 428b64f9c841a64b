"""hashcore's operations on torch tensors in device memory: prepares launches from shapes and strides.

A search is in `hashcore.cuda.tensor_search`. torch_ops has checked the arguments. The host never reads device memory,
except where a docstring says so. `run` executes launches, by default on the device; tests pass the host simulator and
tensors in CPU memory.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from hashcore.cuda import kernels, launch, layout
from hashcore.cuda.kernels import Launch, Output
from hashcore.cuda.layout import Selection, Window, Workspace
from hashcore.cuda.operands import Bounds, set_selection, supported

Run = Callable[[Iterable[Launch], torch.device], None]

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
SIMULATED_SMS = 3  # SMs of the simulated device; small, so that tests cover several chunks and turns


def pack(x: torch.Tensor, out: torch.Tensor, run: Run | None = None) -> None:
    """Pack [..., 32 W] numbers into contiguous int32 [..., W] (eq. 1)."""
    if out.numel():
        x = (x.view(UNSIGNED[x.dtype]) != 0 if x.dtype in UNSIGNED else x).contiguous()  # positive means not 0
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
        at = supported(query, keys, lead)
        batch, queries = math.prod(lead), query.shape[-2]
        pairs = kernels.score_pairs(
            at.query.data_ptr(), at.keys.data_ptr(), out.data_ptr(), batch, queries, n, words, at.map
        )
        return _run(run, [pairs], out.device)
    lead = out.shape[:-1]
    at = supported(query, keys, lead)
    rows = math.prod(lead)
    scores = kernels.score_all(at.query.data_ptr(), at.keys.data_ptr(), out.data_ptr(), rows, n, words, weights, at.map)
    return _run(run, [scores], out.device)


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
    plan = Workspace.plan(rows, n, layout.INT32_LEVELS, sm_count(device))
    stride = -(-n // layout.VECTOR) * layout.VECTOR
    aligned = scores.to(torch.int32).reshape(rows, n)
    if stride != n or aligned.data_ptr() % 16 or not aligned.is_contiguous():
        aligned = torch.nn.functional.pad(aligned, (0, stride - n))
        aligned = aligned.clone() if aligned.data_ptr() % 16 else aligned.contiguous()
    scratch = torch.empty(plan.words, dtype=torch.int32, device=device)
    scratch[: plan.zeros].zero_()
    window, selection = Window(), Selection()
    held = bounds.window(window, lead, n), set_selection(selection, k, lead, values.shape[-1])
    output = Output(values.data_ptr(), indices.data_ptr(), 8 * indices.element_size())
    _run(
        run, kernels.topk(aligned.data_ptr(), stride, rows, window, selection, output, scratch.data_ptr(), plan), device
    )
    del held


def _run(run: Run | None, launches: Iterable[Launch], device: torch.device) -> None:
    (launch.run if run is None else run)(launches, device)


def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, or of the simulated one."""
    return launch.sm_count(device) if device.type == "cuda" else SIMULATED_SMS
