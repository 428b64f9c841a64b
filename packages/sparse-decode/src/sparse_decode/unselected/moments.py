"""The arguments of kernels/moments.cu, and the same computation in host memory (`moment_kernels`)."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_decode.attention.gather import macros
from sparse_decode.attention.kernel_threads import run
from sparse_decode.unselected import moment_kernels
from sparse_decode.unselected.sums import FOLD, Moments, Rounded

THREADS = 256
MAX_GROUP = 16
"""Largest supported number of query heads per KV head."""


def defined(dim: int, value_dim: int, dtype: torch.dtype) -> tuple[tuple[str, str], ...]:
    """Return the macros that moments.cu is compiled with."""
    return (*macros(dim, value_dim, dtype), ("SPARSE_FOLD", str(FOLD)))


class Token(ctypes.Structure):
    """Token of kernels/moments.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("key", "value") for step in ("batch", "head", "token")),
        *((name, ctypes.c_void_p) for name in ("q", "slopes")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "group", "tokens", "summed")),
    )


class Padding(ctypes.Structure):
    """Padding of kernels/moments.cu, field by field."""

    _fields_ = (
        ("visible", ctypes.c_void_p),
        *(
            field
            for name in ("shown", "before")
            for field in ((name, ctypes.c_void_p), (f"{name}_batch", ctypes.c_int64))
        ),
        *((name, ctypes.c_void_p) for name in ("length", "summed")),
    )


class Sums(ctypes.Structure):
    """Sums of kernels/moments.cu: addresses."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("keys", "values", "spread", "levels", "scales"))


STATE = "tokens", "keys", "values", "spread", "levels", "scales"


class Results(ctypes.Structure):
    """Results of kernels/moments.cu: addresses."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("mean_keys", "rest", *STATE))


def on_cpu(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """Like `remainder.add_token`; the caller has checked that the sums cover the right tokens."""
    keys, values, spread, levels, scales, summed, visible, shown, _ = rest
    n = k.shape[2]
    means = _lean(q, slopes, k, v, (summed, n), (keys, values, levels, scales), visible, shown)
    if n != summed + FOLD:
        return list(means)
    sums = _folded(k, v, (summed, n), Moments(keys, keys, values, spread), visible, shown)
    return [*means, *sums, *Rounded.of(sums.spread)]


def on_cpu_in_place(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Like `static_moments.add_in_place`."""
    tokens, keys, values, spread, levels, scales, before, summed, visible, shown, length = rest
    n, first = int(length), int(summed[0, 0])
    if not first < n <= first + FOLD or not torch.equal(before[:, :first], shown[:, :first]):
        raise ValueError(
            "a compiled step must see the tokens of the step before and a new one, got a mask that changed for earlier "
            "tokens; call the model once without the compiler, or attach with remainder=False"
        )
    means = _lean(q, slopes, k, v, (first, n), (keys, values, levels, scales), visible, shown)
    if n == first + FOLD:
        sums = _folded(k, v, (first, n), Moments(tokens, keys, values, spread), visible, shown)
        for room, found in zip(rest[:6], (*sums, *Rounded.of(sums.spread)), strict=True):
            room.copy_(found)
        before[:, first:n] = shown[:, first:n]
        summed.fill_(n)
    return means


def _folded(
    k: Tensor, v: Tensor, new: tuple[int, int], sums: Moments, visible: Tensor | None, shown: Tensor | None
) -> Moments:
    """Return the sums with the `new` tokens added; the number of tokens before them is found anew."""
    first, n = new
    if visible is None or shown is None:
        tokens = sums.keys.new_full((len(k),), first)
    else:
        tokens = (visible[:, 0] - shown[:, first:n].sum(-1)).double()
    return sums._replace(tokens=tokens).join(Moments.of(k, v, shown, first, n, k.device))


def _lean(
    q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, new: tuple[int, int], sums: Sequence[Tensor], *rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return mean keys and values of eq. 16; new: first of the tokens not in the sums, and end."""
    (batch, hkv), (first, n), (visible, shown) = k.shape[:2], new, rows
    sizes = sums[0].shape, (*q.shape[:2], v.shape[-1])
    means = q.new_empty(sizes[0], dtype=torch.float32), q.new_empty(sizes[1], dtype=torch.float32)
    counts = torch.full((batch,), n) if visible is None else visible[:, 0]
    joins = torch.ones(batch, n - first, dtype=torch.bool) if shown is None else shown[:, first:n].contiguous()
    new_k, new_v, queries = (x.float().contiguous().numpy() for x in (k[:, :, first:n], v[:, :, first:n], q))
    arrays = *(x.numpy() for x in sums), queries, slopes.numpy(), *(x.numpy() for x in means)
    work = sums[2].numel() * q.shape[1] // hkv
    run(moment_kernels.tasks, batch * hkv, work, counts.double().numpy(), joins.numpy(), new_k, new_v, *arrays)
    return means
