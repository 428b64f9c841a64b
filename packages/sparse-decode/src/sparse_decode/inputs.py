"""What a step takes: the arguments that a model's attention gives, and what they must be."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LIKE: dict[int, NDArray[Any]] = {4: np.empty(0, np.uint32), 2: np.empty(0, np.uint16)}
MAX_GROUP = 16
"""Largest number of query heads per index set on CUDA."""


class Inputs(NamedTuple):
    """Queries [B, Hq, Q, D], keys [B, Hkv, N, D], values [B, Hkv, N, Dv], and the options of their attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    """The factor on the logits, usually D^-0.5."""
    softcap: float | None = None
    """The soft cap of the logits (Gemma 2), above 0; None for none."""
    sinks: Tensor | None = None
    """A learned sink logit per query head [Hq]: part of the softmax, without a value (gpt-oss)."""


def require(device: torch.device, dtype: torch.dtype, dims: Collection[int] = (), group: int = 1) -> None:
    """Raise ValueError if no kernel supports this device, dtype and head sizes.

    Args: dims: components of keys and of values; group: query heads that share an index set.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"sparse attention runs on the CPU or on CUDA, got {device}; move the model")
    if dtype not in KINDS:
        raise ValueError(f"sparse attention needs float32, bfloat16 or float16, got {dtype}; convert the model")
    if device.type == "cpu":
        return
    if dtype == torch.float32:
        raise ValueError(f"sparse attention on CUDA needs bfloat16 or float16, got {dtype}; convert the model")
    if group > MAX_GROUP:
        raise ValueError(f"sparse attention on CUDA supports up to {MAX_GROUP} query heads per index set, got {group}")
    if odd := [dim for dim in dims if dim % 16 or not 16 <= dim <= 256]:
        raise ValueError(f"keys and values on CUDA must have a multiple of 16 components, at most 256, got {odd[0]}")


def check(x: Inputs, indices: Tensor) -> None:
    """Raise ValueError if inputs and a selection, int64 [B, Hkv or Hq, Q, K], do not fit together."""
    q, k, v, _, softcap, sinks = x
    far = q.is_cuda and k.device == v.device == torch.device("cpu")  # pinned host memory
    devices = {given.device for given in (q, indices, sinks, *(() if far else (k, v))) if given is not None}
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


def reach(x: Tensor) -> int:
    """Return the extent of a tensor's memory in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
