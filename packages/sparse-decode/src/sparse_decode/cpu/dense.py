"""Dense softmax attention on the CPU: of decode steps, and of prompts, which may read a fraction of the tokens.

The equation is that of `sparse_decode.attend` with all visible tokens selected, without a list of indices. For few rows
each key and value is read once, for all heads that share it: torch's own attention repeats the keys for each query
head, or uses too few threads. For many rows products take most of the time, not reading keys.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import math
from typing import Any

import numpy as np
import torch
from hashcore.cpu.threads import compiled
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode.cpu import bfloat_kernels, dense_kernels, prompt_kernels
from sparse_decode.cpu.bfloat_lanes import CONFIGURATION, granted, supported
from sparse_decode.cpu.kernel_threads import run
from sparse_decode.cpu.lanes import BLOCK, WIDTH
from sparse_decode.inputs import KINDS, LIKE, reach
from sparse_decode.intervals import causal

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Torch's kernel: it also returns the logarithm of each row's sum of weights."""


def attend_all(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, interval: Tensor | None = None, *,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend to all visible tokens.

    Args:
        q: [B, Hq, R, D], few rows; k: [B, Hkv, N, D]; v: [B, Hkv, N, Dv]; float32, bfloat16 or float16 of one type, on
            the CPU; components must be contiguous (stride 1), all other strides are free.
        scaling: factor on the logits, usually D^-0.5.
        interval: first and last (exclusive) of the tokens that each row sees, int64 [B or 1, R, 2]; None: the last of
            the R rows sees all N tokens, and each row before it one fewer.
        softcap: soft cap of the logits, above 0; None for none.
        sinks: one learned sink logit per query head [Hq]: part of the softmax, without a value.
    Returns: [B, R, Hq, Dv] in q's type, zeros for a row that sees no token; sums are float32, bit for bit the same for
        any number of threads.
    Source: docs/algorithm.md, eq. 8, with all visible tokens selected.
    """
    (batch, hq, n_rows, dim), (hkv, n), dim_v = q.shape, k.shape[1:3], v.shape[3]
    group, paired = hq // hkv, k.dtype == torch.bfloat16 and supported()
    kernels, part = (bfloat_kernels, bfloat_kernels.SPAN) if paired else (dense_kernels, dense_kernels.CHUNK)
    queries = _queries(q, hkv, paired)
    bounds = (causal(batch, n_rows, n, q.device) if interval is None else interval.expand(batch, -1, -1)).contiguous()
    lines, step = (batch, hkv, -(-n // part), n_rows * group), BLOCK if paired else WIDTH
    sums, stats = np.empty((*lines, -(-dim_v // step) * step), np.float32), np.empty((*lines, 2), np.float32)
    out = np.empty((batch, n_rows, hkv, group, dim_v), np.float32)
    where = *_place(k), *_place(v), LIKE[k.element_size()]
    factors = np.float32(scaling), np.float32(softcap or 0), *(() if paired else (KINDS[k.dtype],))
    work = batch * hq * n_rows * n * (dim + dim_v)
    run(kernels.tasks, math.prod(lines[:3]), work, queries, *where, bounds.numpy(), *factors, sums, stats)
    compiled(dense_kernels.combine)(0, batch, sums, stats, _of_heads(sinks, hkv, group), out)
    return torch.from_numpy(out.reshape(batch, n_rows, hq, dim_v)).to(q.dtype)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, interval: Tensor | None = None, *,
    softcap: float | None = None, sinks: Tensor | None = None, fraction: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend to all visible tokens, for any number of rows, or to a fraction of them.

    Args, returns and source: those of `attend_all`. In bfloat16, if the processor has AVX512_BF16, keys and values are
    laid out once for all rows; otherwise, rows go through `attend_all` in blocks, whatever the fraction.
    fraction: of the tokens before the recent ones, that a block of rows reads (see prompt_kernels.py); None: all.
    """
    (batch, hq, rows, dim), (hkv, n), dim_v = q.shape, k.shape[1:3], v.shape[3]
    bounds = causal(batch, rows, n, q.device) if interval is None else interval.expand(batch, -1, -1)
    if q.dtype != torch.bfloat16 or not supported() or not scaling > 0:
        return torch.cat([_block(q, k, v, scaling, bounds, r, softcap, sinks) for r in range(0, rows, BLOCK)], 1)
    seen = torch.stack([bounds[..., 0].amin(1), bounds[..., 1].amax(1)], 1).clamp(0, n).numpy()
    out, group = torch.empty(batch, rows, hq, dim_v, dtype=q.dtype, device=q.device), hq // hkv
    laid_out = _laid_out(k, seen, True), _laid_out(v, seen, False)
    each = max(1, prompt_kernels.LINES // group) if fraction is None else prompt_kernels.ROWS
    how = () if fraction is None else (np.float32(fraction),), np.float32(scaling), np.float32(softcap or 0)
    tasks, work = batch * hkv * -(-rows // each), batch * hq * rows * n * (dim + dim_v)
    bits = out.view(torch.int16).numpy().view(np.uint16)
    given = *_place(q), LIKE[2], *laid_out, bounds.contiguous().numpy(), each, *how, _of_heads(sinks, hkv, group), bits
    run(prompt_kernels.attend, tasks, work, granted(), CONFIGURATION, *given)
    return out


def attend_in_parts(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, starts: list[int]) -> Tensor:
    """Attend with the last R of N tokens by torch's kernel: to those before them, then among themselves.

    One pass over all tokens would need a mask, and compute what it hides.

    Args: starts: the first token that the rows of each sequence see.
    Returns: [B, R, Hq, D], zeros for a row that sees no token.
    """
    (batch, hq, rows, dim), hkv, n = query.shape, key.shape[1], key.shape[2]
    out = torch.zeros(batch, rows, hq, dim, dtype=query.dtype, device=query.device)
    for b, start in enumerate(starts):
        first = max(start, n - rows)
        if first == n:
            continue
        q, k, v = (x[b : b + 1, :, first - n :] for x in (query, key, value))
        own, log_sum = _flash(q, *(x.repeat_interleave(hq // hkv, 1) for x in (k, v)), 0.0, True, scale=scaling)
        if start < first:
            earlier = (x[b : b + 1, :, start:first] for x in (key, value))
            found, before = _flash(q.reshape(1, hkv, -1, dim), *earlier, 0.0, False, scale=scaling)
            share = torch.sigmoid(before.reshape(log_sum.shape) - log_sum)[..., None]
            own = torch.lerp(own.float(), found.reshape(own.shape).float(), share)
        out[b, first - n :] = own[0].transpose(0, 1)
    return out


def _block(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, bounds: Tensor, first: int, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend for BLOCK rows from `first` on, to the part of the tokens that they see."""
    own = bounds[:, first : first + BLOCK]
    low, high = int(own[..., 0].min()), max(int(own[..., 1].max()), int(own[..., 0].min()) + 1)
    part = k[:, :, low:high], v[:, :, low:high]
    return attend_all(q[:, :, first : first + BLOCK], *part, scaling, own - low, softcap=softcap, sinks=sinks)


def _queries(q: Tensor, hkv: int, paired: bool) -> NDArray[Any]:
    """Return q as the kernels read it, [B, Hkv, R G, D rounded up]: float32 or, if paired, words of two components."""
    batch, hq, n_rows, dim = q.shape
    group, wide = hq // hkv, -(-dim // WIDTH) * WIDTH
    plain = q.detach() if q.requires_grad else q
    rows = (plain.view(torch.int16) if paired else plain.float()).numpy()
    queries = np.zeros((batch, hkv, n_rows, group, wide), rows.dtype)
    queries[..., :dim] = rows.reshape(batch, hkv, group, n_rows, dim).swapaxes(2, 3)
    return queries.view(np.uint32 if paired else np.float32).reshape(batch, hkv, n_rows * group, -1)


def _laid_out(x: Tensor, seen: NDArray[np.int64], turned: bool) -> NDArray[np.uint32]:
    """Return x [B, H, N, D] as the kernel of prompts reads it: [B, H, blocks, words of a block]."""
    batch, heads, n, width = x.shape
    step, lines = WIDTH if turned else BLOCK, (batch, heads, -(-n // BLOCK))
    make = torch.zeros if width % step else torch.empty
    out = make(*lines, -(-width // step) * step * BLOCK // 2, dtype=torch.int32).numpy().view(np.uint32)
    run(prompt_kernels.lay_out, math.prod(lines), x.numel() * 16, *_place(x), LIKE[2], seen, turned, out)
    return out


def _place(x: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return the address of x [B, H, N, D], its extent in elements, and its first three strides and last sizes."""
    return x.data_ptr(), reach(x), (*x.stride()[:3], *x.shape[1:])


def _of_heads(sinks: Tensor | None, hkv: int, group: int) -> NDArray[np.float32]:
    """Return the sink of each query head, [Hkv, G], -inf without learned sinks."""
    if sinks is None:
        return np.full((hkv, group), -np.inf, np.float32)
    return np.ascontiguousarray(sinks.detach().float().numpy().reshape(hkv, group))
