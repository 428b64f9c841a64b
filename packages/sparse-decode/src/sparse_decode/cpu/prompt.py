"""Dense softmax attention of prompts on the CPU.

    out_h = sum_{j visible} exp(l_j) v_j / (exp(s_h) + sum_{j visible} exp(l_j)),  l_j = scaling q_h . k_j, soft-capped

    q [B, Hq, Q, D]   k, v [B, Hkv, N, D]   an interval for each row   out [B, Q, Hq, Dv]

The same as `dense.attend_all`, for many rows: products take most of the time, not reading keys.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode.cpu import granule_kernels, prompt_kernels, tiles
from sparse_decode.cpu.bfloat_lanes import BLOCK, supported
from sparse_decode.cpu.dense import attend_all, place
from sparse_decode.cpu.kernel_threads import run
from sparse_decode.cpu.lanes import WIDTH
from sparse_decode.inputs import LIKE
from sparse_decode.intervals import causal


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, interval: Tensor | None = None, *,
    softcap: float | None = None, sinks: Tensor | None = None, fraction: float | None = None,
) -> Tensor:  # fmt: skip
    """Attend to all visible tokens, for any number of rows, or to a fraction of them.

    Args, returns and source: those of `dense.attend_all`. In bfloat16, if the processor has AVX512_BF16, keys and
    values are laid out once for all rows; otherwise, rows go through `attend_all` in blocks, whatever the fraction.
    fraction: of the tokens before the recent ones, that a block of rows reads (see granule_kernels.py); None: all.
    """
    (batch, hq, rows, dim), (hkv, n), dim_v = q.shape, k.shape[1:3], v.shape[3]
    bounds = causal(batch, rows, n, q.device) if interval is None else interval.expand(batch, -1, -1)
    if q.dtype != torch.bfloat16 or not supported() or not scaling > 0:
        return torch.cat([_block(q, k, v, scaling, bounds, r, softcap, sinks) for r in range(0, rows, BLOCK)], 1)
    seen = torch.stack([bounds[..., 0].amin(1), bounds[..., 1].amax(1)], 1).clamp(0, n).numpy()
    limit = np.full((hkv, hq // hkv), -np.inf, np.float32)
    if sinks is not None:
        limit[:] = sinks.detach().float().numpy().reshape(limit.shape)
    out, (address, reach, at) = torch.empty(batch, rows, hq, dim_v, dtype=q.dtype), place(q)
    laid_out = _laid_out(k, seen, True), _laid_out(v, seen, False)
    given = tiles.granted(), tiles.CONFIGURATION, address, reach, (*at, dim), LIKE[2], *laid_out
    how, found = (np.float32(scaling), np.float32(softcap or 0), limit), out.view(torch.int16).numpy().view(np.uint16)
    bounds, work = bounds.contiguous().numpy(), batch * hq * rows * n * (dim + dim_v)
    if fraction is None:
        each = max(1, prompt_kernels.LINES // (hq // hkv))
        run(prompt_kernels.attend, batch * hkv * -(-rows // each), work, *given, bounds, each, *how, found)
    else:
        read = np.empty((batch, hkv, -(-rows // granule_kernels.ROWS)), np.int64)
        run(granule_kernels.attend_some, read.size, work, *given, bounds, np.float32(fraction), *how, found, read)
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


def _laid_out(x: Tensor, seen: NDArray[np.int64], turned: bool) -> NDArray[np.uint32]:
    """Return x [B, H, N, D] as the kernel reads it: [B, H, blocks, words of a block]."""
    (batch, heads, n, width), (address, reach, at) = x.shape, place(x)
    step = WIDTH if turned else BLOCK
    lines = batch, heads, -(-n // BLOCK)
    make = torch.zeros if width % step else torch.empty
    out = make(*lines, -(-width // step) * step * BLOCK // 2, dtype=torch.int32).numpy().view(np.uint32)
    like: Any = LIKE[2]
    run(prompt_kernels.lay_out, math.prod(lines), x.numel() * 16, address, reach, (*at, width), like, seen, turned, out)
    return out
