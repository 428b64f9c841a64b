"""The paper's set-up on CUDA: keys and values gathered by torch, and attention over them with flash-attn.

Dense calls use `flash_attn_func`. A sparse call gathers the selected rows and calls `flash_attn_with_kvcache` with one
sequence per index set, whose length excludes unused slots:

    q [B, Hq, Q, D] -> [B H Q, 1, Hq / H, D]      k, v [B, Hkv, N, D] -> [B H Q, K, 1, D]

flash-attn is the extra `sparse-decode[flash]`. This module is used only with backend="flash".
"""

import importlib.util
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from sparse_decode.attention.attend_torch import gathered

DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)


MOST_HEAD_DIM = 256  # and a multiple of 8


def require(device: torch.device, dtype: torch.dtype, head_dims: Collection[int] = ()) -> None:
    """Raise ValueError if flash-attn is missing or does not support this device, dtype and head sizes."""
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            'backend="flash" needs the package flash-attn, which is not installed; in the checkout '
            "`uv pip install './packages/sparse-decode[flash]'` where there is a CUDA compiler, or "
            'use backend="gather"'
        )
    if device.type not in DEVICES:
        raise ValueError(
            f'backend="flash" needs a model on a CUDA device, got {device}; move it, or use backend="gather"'
        )
    if dtype not in DTYPES:
        raise ValueError(f'backend="flash" needs a model in bfloat16 or float16, got {dtype}; convert it')
    if odd := sorted({dim for dim in head_dims if dim % 8 or dim > MOST_HEAD_DIM}):
        raise ValueError(
            f'backend="flash" needs heads of a multiple of 8 and at most {MOST_HEAD_DIM}, got {odd[0]}; '
            'use backend="gather"'
        )


def refuse(mask: Tensor | None, sinks: Tensor | None, dropout: float) -> None:
    """Raise ValueError on masks, learned sinks and dropout, which flash-attn does not support."""
    if mask is not None:
        raise ValueError(
            f'backend="flash" does not support masks or padding, got a mask of shape {tuple(mask.shape)}; use '
            'backend="gather"'
        )
    if sinks is not None:
        raise ValueError('backend="flash" does not support learned sinks; use backend="gather"')
    if dropout:
        raise ValueError(f"sparse attention has no dropout, got {dropout}; call model.eval() first")


def dense(q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Attend causally: q [B, Hq, Q, D] of the last tokens, k and v [B, Hkv, N, D] -> [B, Q, Hq, D]."""
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

    by_token = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(*by_token, softmax_scale=scaling, causal=True, softcap=softcap or 0.0)


def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """Attend to the selected tokens only.

    Args:
        q: [B, Hq, Q, D]; k, v: [B, Hkv, N, D].
        indices: int64 [B, H, Q, K], H = Hkv or Hq, with -1 only at the end of a row, as selectors return them.
    Returns: [B, Q, Hq, D] in q's type; zeros for rows without a selected token.
    Source: docs/algorithm.md, eq. 8.
    """
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    (batch, hq, n_rows, dim), sets = q.shape, indices.shape[1]
    if not indices.numel():
        return q.new_zeros(batch, n_rows, hq, dim)
    keys, values = (gathered(x, indices).flatten(0, 2).unsqueeze(2) for x in (k, v))
    used = (indices >= 0).sum(-1, dtype=torch.int32)
    queries = q.unflatten(1, (sets, -1)).transpose(2, 3).reshape(batch * sets * n_rows, 1, hq // sets, dim)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    out = flash_attn_with_kvcache(queries, keys, values, cache_seqlens=used.flatten(), **options)
    out = out.view(batch, sets, n_rows, hq // sets, dim).masked_fill(used[..., None, None] == 0, 0)
    return out.transpose(1, 2).reshape(batch, n_rows, hq, dim)
