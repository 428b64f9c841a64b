"""Softmax attention over selected tokens only.

For query head h of a batch row, with S the tokens selected for it (eq. 8):

    l_j = scaling q_h . k_j,  or c tanh(scaling q_h . k_j / c) with soft-capping at c
    out_h = sum_{j in S} exp(l_j) v_j / (exp(s_h) + sum_{j in S} exp(l_j)),  exp(s_h) only with a learned sink s_h

    q [B, Hq, Q, D]   k, v [B, Hkv, N, D]   indices [B, H, Q, K], H = Hkv or Hq, -1 unused   out [B, Q, Hq, D]

One task is one (batch row, index set, query row). It reads each selected key and value once, converts it to float32 in
cache and uses it for every query head of the set. Keys and values are addressed by stride, so nothing of length N is
copied, converted or written. Each task reads |S| (D + Dv) elements, in random rows of 2 D or 4 D bytes. The same task
adds the remainder (eq. 15, 16).
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode import attend_kernels, gather
from sparse_decode.compiled import run
from sparse_decode.modes import readable
from sparse_decode.positions import include

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LIKE = {4: np.empty(0, np.uint32), 2: np.empty(0, np.uint16)}
_SIDE_BY_SIDE = np.empty((0, 0), np.int64)
_NOTHING = np.empty((0, 5), np.float32), np.empty((0, 0, 0, 0), np.float32), np.empty((0, 0), np.int64)


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


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    left_out: LeftOut | None = None,
    ends: tuple[int, int] | Tensor = (0, 0),
    values: float = 1.0,
    lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    left_out: LeftOut | None = None,
    ends: tuple[int, int] | Tensor = (0, 0),
    values: float = 1.0,
    lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    left_out: LeftOut | None = None,
    ends: tuple[int, int] | Tensor = (0, 0),
    values: float = 1.0,
    lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to the selected tokens only.

    Args:
        q: [B, Hq, Q, D]; k: [B, Hkv, N, D]; v: [B, Hkv, N, Dv]; float32, bfloat16 or float16 of one type, on the CPU
            or, for 16-bit types and up to 16 query heads per index set, on CUDA (kernels/gather.cu), where k and v may
            also be in pinned host memory.
        indices: int64 [B, H, Q, K], H = Hkv or Hq; -1 in unused slots, at any place.
        scaling: factor on the logits, usually D^-0.5.
        softcap: soft cap of the logits (Gemma 2), above 0; None for none.
        sinks: one learned sink logit per query head [Hq]: part of the softmax, without a value (gpt-oss).
        left_out: the inputs of the remainder, which is added as one token (eq. 16); None for none.
        ends: numbers of first and last tokens of the N that every row reads besides `indices`, which then must not
            contain them or unused slots. Or the tokens that all rows of a sequence read besides, int64 [B, E], -1 in
            unused slots.
        values: share of the selected tokens whose values are read, rounded up (eq. 21): those with the largest sum of
            weights over the set's query heads, ties in the order of `indices`. The others get the remainder's value;
            without `left_out`, weight 0. On CUDA only 1.
        lse: also return the mean and the log-sum-exp of the logits, which calibration of the remainder needs (eq. 15).
    Returns: [B, Q, Hq, Dv] in q's type; zeros for rows without a selected token. Sums are float32. With lse also
        float32 [2, B, Q, Hq]: mean and log-sum-exp of the selected logits, 0 and -inf for rows without one; the
        log-sum-exp includes the learned sink.
    Raises: ValueError on other shapes, types, devices or shares, and on an index of N or more; on CUDA, where checking
        would make the host wait, such an index counts as unused.
    Source: docs/algorithm.md, eq. 8.
    """
    _check(q, k, v, indices, softcap, sinks, left_out)
    require_values(values, q.device)
    rest = (None,) * 4 if left_out is None else left_out
    always = (0, 0, ends) if isinstance(ends, Tensor) else (*ends, None)
    given = q.detach(), k.detach(), v.detach(), indices, scaling, softcap, sinks, *rest, *always
    if readable(q):  # on the CPU, torch's dispatcher would take longer than everything else in the call
        result, logits = _on_cpu(*given, values)
    elif values < 1:
        raise ValueError(f"values below 1 does not work in a compiled graph, got {values}; set it to 1")
    elif lse:
        result, logits = gather.OPERATORS.gather_with_lse(*given)
    else:
        result, logits = gather.OPERATORS.gather(*given), None
    if q.requires_grad:
        result = _NoBackward.apply(result, q)
    return (result, logits) if lse else result  # pyright: ignore[reportReturnType]


def require(device: torch.device, dtype: torch.dtype, dims: Collection[int] = (), group: int = 1) -> None:
    """Raise ValueError if no kernel supports this device, dtype and head sizes.

    Args:
        dims: components of keys and of values; group: query heads that share an index set.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"sparse attention runs on the CPU or on CUDA, got {device}; move the model")
    if dtype not in KINDS:
        raise ValueError(f"sparse attention needs float32, bfloat16 or float16, got {dtype}; convert the model")
    if device.type == "cuda":
        gather.require(dtype, dims, group)


def require_values(share: float, device: torch.device) -> None:
    """Raise ValueError if `Budget.values` is out of range, or below 1 on a device other than the CPU."""
    if not 0 < share <= 1:
        raise ValueError(f"values must be above 0 and at most 1, got {share}; 0.5 reads every second value")
    if share < 1 and device.type != "cpu":
        raise ValueError(f"values below 1 needs the CPU, got {share} on {device}; set it to 1")


def on_host(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    left_out: LeftOut | None,
    blocks: NDArray[np.int64] = _SIDE_BY_SIDE,
    values: float = 1.0,
) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Attend on the CPU, without checking shapes: `attend` with lse, and the number of tokens used, int64 [B, H, Q].

    With blocks, int64 [B, T], k and v are pages [M, Hkv, S, D]: token j of a row is token j % S of page blocks[j // S],
    which must be a valid page for every token that a row attends to.

    Raises: ValueError on an index of N or more; no memory there is read.
    """
    batch, hq, n_rows, dim = q.shape
    sets = indices.shape[1]
    out = np.zeros((batch, n_rows, hq, v.shape[3]), dtype=np.float32)
    logits = np.zeros((2, batch, n_rows, hq), dtype=np.float32)
    logits[1] = -np.inf
    used = np.zeros((batch, sets, n_rows), dtype=np.int64)
    if indices.numel() and out.size:
        tasks = batch * sets * n_rows
        work = tasks * indices.shape[3] * (hq // sets) * (dim + v.shape[3])
        chosen = indices.contiguous().numpy()
        sink = np.full(hq, -np.inf, np.float32) if sinks is None else _floats(sinks)
        factors, kind = (np.float32(scaling), np.float32(softcap or 0)), KINDS[k.dtype]
        rest = _rest(left_out, (batch, n_rows), k.shape[2])
        where = *_place(k), *_place(v), LIKE[k.element_size()]
        run(
            attend_kernels.tasks,
            tasks,
            work,
            _floats(q),
            *where,
            blocks,
            chosen,
            out,
            logits,
            used,
            *factors,
            sink,
            kind,
            *rest,
            float(values),
        )
        if used.min() < 0:
            raise ValueError(
                f"indices must be below N = {k.shape[2] * max(1, blocks.shape[1])}, got {int(indices.max())}"
            )
    result = torch.from_numpy(out)
    return result if q.dtype == torch.float32 else result.to(q.dtype), torch.from_numpy(logits), used


def _rest(left_out: LeftOut | None, rows: tuple[int, int], n: int) -> tuple[NDArray[Any], ...]:
    """Return the remainder's inputs as arrays, empty ones without a remainder."""
    if left_out is None:
        coefficients, means, visible = _NOTHING
        return coefficients, means, means, visible
    coefficients, keys, values, visible = left_out
    seen = np.full(rows, n, np.int64) if visible is None else visible.contiguous().numpy()
    return _floats(coefficients), _floats(keys), _floats(values), seen


def _floats(x: Tensor) -> NDArray[np.float32]:
    """View, or copy, as contiguous float32."""
    return x.detach().float().contiguous().numpy()


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    values: float = 1.0,
    stand_in: Tensor | None = None,
) -> Tensor:
    """Compute `attend` with plain torch operations: the oracle of the tests.

    Args: those of `attend`; stand_in: the value of selected tokens whose own values are not read, [B, Hq, Q, Dv].
    """
    hq, hkv = q.shape[1], k.shape[1]
    wanted = indices.repeat_interleave(hq // indices.shape[1], 1)  # [B, Hq, Q, K]
    batch = torch.arange(q.shape[0])[:, None, None, None]
    head = (torch.arange(hq) // (hq // hkv))[:, None, None]
    dead = wanted < 0
    keys = k[batch, head, wanted.clamp(min=0)].float().masked_fill(dead[..., None], 0)
    read = v[batch, head, wanted.clamp(min=0)].float().masked_fill(dead[..., None], 0)
    logits = (q.float()[..., None, :] * keys).sum(-1).mul(scaling)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(dead, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    every = logits.softmax(-1)
    p, of_sinks = every[..., : dead.shape[-1]].masked_fill(dead, 0), every[..., dead.shape[-1] :].sum(-1, keepdim=True)
    both = cast(Tensor, p.nan_to_num(0).unflatten(1, (indices.shape[1], -1))).sum(2).masked_fill(indices < 0, -1)
    rank = both.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    keep = ((indices >= 0).sum(-1, keepdim=True) * values).ceil()
    kept = torch.where((rank < keep).repeat_interleave(hq // indices.shape[1], 1), p, 0)
    out, left = (kept[..., None] * read).sum(-2), kept.sum(-1, keepdim=True) + of_sinks
    stood_in = 0 if stand_in is None else (p - kept).sum(-1, keepdim=True) * stand_in
    out = torch.where(left == 0, 0, out / left) if stand_in is None else out + stood_in
    return out.transpose(1, 2).to(q.dtype)


def attention_weights(
    q: Tensor, k: Tensor, indices: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the attention weights of `attend`, [B, Hq, Q, N] in q's type.

    Args: as those of `attend`; k may be on another device.
    """
    hq, hkv, n = q.shape[1], k.shape[1], k.shape[2]
    wanted = indices.repeat_interleave(hq // indices.shape[1], 1)  # [B, Hq, Q, K]
    here = wanted.clamp(min=0).to(k.device)
    batch = torch.arange(q.shape[0], device=k.device)[:, None, None, None]
    head = (torch.arange(hq, device=k.device) // (hq // hkv))[:, None, None]
    logits = (q.float()[..., None, :] * k[batch, head, here].to(q.device).float()).sum(-1) * scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(wanted < 0, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    weights = logits.softmax(-1)[..., : wanted.shape[-1]].nan_to_num(0)  # no token, no weight
    found = weights.new_zeros(*q.shape[:3], n + 1)  # unused slots write to column N
    found.scatter_(-1, torch.where(wanted < 0, n, wanted), weights)
    return found[..., :n].to(q.dtype)


class _NoBackward(torch.autograd.Function):
    """Allow a forward pass without `no_grad`; a backward pass raises an error instead of dropping the gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("sparse attention has no backward pass; detach the model to train it")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
    left_out: LeftOut | None,
) -> None:
    far = q.is_cuda and k.device == v.device == torch.device("cpu")  # pinned host memory
    devices = {x.device for x in (q, indices, sinks, *(left_out or ()), *(() if far else (k, v))) if x is not None}
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
    if left_out is not None:
        _check_left_out(q, v, hkv, left_out)


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


def _place(x: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return the address of x [B, Hkv, N, D], its extent in elements, and its strides and sizes."""
    (batch, heads, tokens, width), (row, head, token, component) = x.shape, x.stride()
    reach = 1 + (batch - 1) * row + (heads - 1) * head + (tokens - 1) * token + (width - 1) * component
    return x.data_ptr(), reach, (row, head, token, heads, tokens)


def _on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    left_out, always = None if rest[0] is None else LeftOut(*rest[:4]), rest[6]
    indices = include(indices, k.shape[2], rest[4:6] if always is None else always)  # pyright: ignore[reportArgumentType]
    share = rest[7] if len(rest) > 7 else 1.0
    return on_host(q, k, v, indices, scaling, softcap, sinks, left_out, values=share)[:2]


def _alone_on_cpu(*given: Any) -> Tensor:
    return _on_cpu(*given)[0]


gather.LIBRARY.impl("gather", _alone_on_cpu, "CPU")
gather.LIBRARY.impl("gather_with_lse", _on_cpu, "CPU")
