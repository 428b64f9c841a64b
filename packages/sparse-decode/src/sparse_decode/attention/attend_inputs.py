"""What attention over selected tokens takes: its arguments, and what they must be."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode.attention import gather

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LIKE: dict[int, NDArray[Any]] = {4: np.empty(0, np.uint32), 2: np.empty(0, np.uint16)}


class Inputs(NamedTuple):
    """The arguments of `attend` that a model gives: q, k, v, the factor on the logits, soft cap and learned sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None


class LeftOut(NamedTuple):
    """The inputs of the remainder (eq. 15)."""

    coefficients: Tensor
    """float32 [Hq, 5]: the first five of `LayerHasher.remainder`."""
    mean_keys: Tensor
    """Mean of each row's visible keys, float32 [B, Hkv, Q, D]."""
    values: Tensor
    """The remainder's value in each query head (eq. 16), float32 [B, Hq, Q, Dv]."""
    visible: Tensor | None
    """Number of visible tokens of each row, int64 [B, Q]; None if all rows see all N."""


def require(device: torch.device, dtype: torch.dtype, dims: Collection[int] = (), group: int = 1) -> None:
    """Raise ValueError if no kernel supports this device, dtype and head sizes.

    Args: dims: components of keys and of values; group: query heads that share an index set.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"sparse attention runs on the CPU or on CUDA, got {device}; move the model")
    if dtype not in KINDS:
        raise ValueError(f"sparse attention needs float32, bfloat16 or float16, got {dtype}; convert the model")
    if device.type == "cuda":
        gather.require(dtype, dims, group)


def check(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, softcap: float | None, sinks: Tensor | None, rest: LeftOut | None
) -> None:
    far = q.is_cuda and k.device == v.device == torch.device("cpu")  # pinned host memory
    devices = {x.device for x in (q, indices, sinks, *(rest or ()), *(() if far else (k, v))) if x is not None}
    if len(devices) > 1 or q.device.type not in ("cpu", "cuda"):
        got = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"sparse attention runs on the CPU or on one CUDA device, got tensors on {got}; move the model"
        )
    if k.dtype not in KINDS or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must all be float32, bfloat16 or float16, got {q.dtype}, {k.dtype} and {v.dtype}")
    hq, hkv, sets = q.shape[1], k.shape[1], indices.shape[1]
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or hq % hkv:
        raise ValueError(
            f"q [B, Hq, Q, D], k [B, Hkv, N, D] and v [B, Hkv, N, Dv] must agree, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if indices.dtype != torch.int64 or sets not in (hkv, hq) or indices.shape[::2] != q.shape[::2]:
        raise ValueError(
            f"indices must be int64 [B, Hkv or Hq, Q, K], got {indices.dtype} {tuple(indices.shape)} "
            f"for q {tuple(q.shape)}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0 or None, got {softcap}")
    if sinks is not None and sinks.shape != (hq,):
        raise ValueError(f"sinks must be one logit per query head, shape ({hq},), got {tuple(sinks.shape)}")
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("the components of each key and value must be contiguous (stride 1); call .contiguous()")
    if rest is not None:
        _check_left_out(q, v, hkv, rest)


def _check_left_out(q: Tensor, v: Tensor, hkv: int, left_out: LeftOut) -> None:
    (batch, hq, n_rows, dim), visible = q.shape, left_out.visible
    wanted = (hq, 5), (batch, hkv, n_rows, dim), (batch, hq, n_rows, v.shape[3]), (batch, n_rows)
    got = tuple(tuple(wanted[3] if x is None else x.shape) for x in left_out)
    if got != wanted or (visible is not None and visible.dtype != torch.int64):
        kind = torch.int64 if visible is None else visible.dtype
        raise ValueError(
            "left_out must be [Hq, 5], [B, Hkv, Q, D], [B, Hq, Q, Dv] and int64 [B, Q], expected shapes "
            f"{wanted}, got {got} and {kind}"
        )
