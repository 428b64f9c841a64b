"""One decode step of the remainder's sums on CUDA: shapes and strides in, one launch out (kernels/moments.cu)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from hashcore.cuda import launch
from hashcore.cuda.kernels import make_launch
from torch import Tensor

from sparse_decode.gather import KERNELS, Run, macros, require

THREADS = 256
MAX_GROUP = 16
"""Query heads a KV head."""

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Token(ctypes.Structure):
    """Token of kernels/moments.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((name, ctypes.c_int64) for name in ("key_batch", "key_head", "value_batch", "value_head")),
        *((name, ctypes.c_void_p) for name in ("q", "slopes")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "group", "count")),
    )


class Sums(ctypes.Structure):
    """Sums of kernels/moments.cu: addresses."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("keys", "values", "spread"))


class Results(ctypes.Structure):
    """Results of kernels/moments.cu: addresses."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("keys", "values", "spread", "mean_keys", "rest"))


def add_token(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    spread: Tensor,
    count: int,
    run: Run | None = None,
) -> Outputs:
    """Add token number `count` of each sequence to its sums (eq. 16).

    Args:
        q: its queries, [B, Hq, D]; slopes: float32 [Hq], times the factor on the logits; k, v: its key [B, Hkv, D] and
            value [B, Hkv, Dv], bfloat16 or float16 like q, their components side by side.
        keys, values, spread: the sums before it, as in `sparse_decode.remainder.Moments`.
    Returns: the three sums with it, mean keys float32 [B, Hkv, D] and the values of eq. 16, float32 [B, Hq, Dv].
    """
    outputs = _empty(q, slopes, k, v, keys, values, spread, count)
    (batch, hq, dim), (hkv, value_dim) = q.shape, v.shape[1:]
    if batch:
        q = q.contiguous()
        strides = *k.stride()[:2], *v.stride()[:2]
        addresses = (x.data_ptr() for x in (k, v)), (x.data_ptr() for x in (q, slopes))
        token = Token(*addresses[0], *strides, *addresses[1], hkv, hq // hkv, count)
        before = Sums(*(x.data_ptr() for x in (keys, values, spread)))
        arguments = token, before, Results(*(x.data_ptr() for x in outputs))
        step = make_launch(
            "moments.cu", "add_token", (batch * hkv, 1), THREADS, arguments, macros(dim, value_dim, q.dtype)
        )
        (launch.run if run is None else run)([step], q.device, KERNELS)
    return outputs


def _empty(
    q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, spread: Tensor, count: int
) -> Outputs:
    """Return tensors of the shapes that `add_token` returns: what a compiler and a fake device see."""
    before = (x.new_empty(x.shape) for x in (keys, values, spread))
    means = spread.new_empty(keys.shape)
    return (*before, means, spread.new_empty(*q.shape[:2], v.shape[2]))  # pyright: ignore[reportReturnType]


def _checked(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *sums: Any) -> Outputs:
    require(q.dtype, (k.shape[2], v.shape[2]), q.shape[1] // k.shape[1])
    return add_token(q, slopes, k, v, *sums)


LIBRARY = torch.library.Library("sparse_decode", "FRAGMENT")
LIBRARY.define(
    "add_token(Tensor q, Tensor slopes, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor spread, SymInt count) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("add_token", _checked, "CUDA")
torch.library.register_fake("sparse_decode::add_token", _empty, lib=LIBRARY)
OPERATOR: Any = torch.ops.sparse_decode.add_token
"""`add_token` as an operator, so that it can be traced, counted and captured."""
