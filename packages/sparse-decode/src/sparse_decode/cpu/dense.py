"""Dense softmax attention of decode steps on the CPU: each key and value is read once, for all heads that share it.

    out_h = sum_{j visible} exp(l_j) v_j / (exp(s_h) + sum_{j visible} exp(l_j)),  l_j = scaling q_h . k_j, soft-capped

    q [B, Hq, R, D]   k, v [B, Hkv, N, D]   an interval for each row   out [B, R, Hq, Dv]

The equation is that of `sparse_decode.attend` with all visible tokens selected, without a list of indices. torch's own
attention repeats the keys for each query head, or uses too few threads for so few rows.
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

from sparse_decode.cpu import bfloat_kernels, dense_kernels
from sparse_decode.cpu.bfloat_lanes import BLOCK, supported
from sparse_decode.cpu.kernel_threads import run
from sparse_decode.cpu.lanes import LANES, WIDTH
from sparse_decode.inputs import KINDS, LIKE
from sparse_decode.intervals import causal


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
    limit = np.full((hkv, group), -np.inf, np.float32)
    if sinks is not None:
        limit[:] = sinks.detach().float().numpy().reshape(hkv, group)
    (k_address, k_reach, k_at), (v_address, v_reach, v_at) = place(k), place(v)
    where = k_address, k_reach, (*k_at, dim), v_address, v_reach, (*v_at, dim_v), LIKE[k.element_size()]
    kind = 0 if paired else KINDS[k.dtype]  # of the order of components in sums
    factors = np.float32(scaling), np.float32(softcap or 0), *(() if paired else (kind,))
    work = batch * hq * n_rows * n * (dim + dim_v)
    run(kernels.tasks, math.prod(lines[:3]), work, queries, *where, bounds.numpy(), *factors, sums, stats)
    compiled(dense_kernels.combine)(0, batch, sums, stats, limit, out, kind)
    return torch.from_numpy(out.reshape(batch, n_rows, hq, dim_v)).to(q.dtype)


def _queries(q: Tensor, hkv: int, paired: bool) -> NDArray[Any]:
    """Return q as the kernels read it, [B, Hkv, R G, D rounded up]: float32 or, if paired, words of two components."""
    batch, hq, n_rows, dim = q.shape
    group, wide = hq // hkv, -(-dim // WIDTH) * WIDTH
    plain = q.detach() if q.requires_grad else q
    rows = (plain.view(torch.int16) if paired else plain.float()).numpy()
    queries = np.zeros((batch, hkv, n_rows, group, wide), rows.dtype)
    queries[..., :dim] = rows.reshape(batch, hkv, group, n_rows, dim).swapaxes(2, 3)
    if paired:
        queries = queries.view(np.uint32)
    elif q.dtype == torch.bfloat16:  # the order of `lanes.place`
        queries = np.ascontiguousarray(queries.reshape(*queries.shape[:4], -1, LANES, 2).swapaxes(-1, -2))
    return queries.reshape(batch, hkv, n_rows * group, -1)


def place(x: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return the address of x [B, Hkv, N, D], its extent in elements, and its strides and sizes."""
    (batch, heads, tokens, width), (row, head, token, component) = x.shape, x.stride()
    extent = 1 + (batch - 1) * row + (heads - 1) * head + (tokens - 1) * token + (width - 1) * component
    return x.data_ptr(), extent, (row, head, token, heads, tokens)
