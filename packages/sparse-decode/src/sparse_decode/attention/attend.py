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

from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode.attention import attend_kernels, gather
from sparse_decode.attention.attend_inputs import KINDS, LIKE, LeftOut, check
from sparse_decode.attention.kernel_threads import run
from sparse_decode.modes import readable
from sparse_decode.positions import include

_SIDE_BY_SIDE = np.empty((0, 0), np.int64)
_NOTHING = np.empty((0, 5), np.float32), np.empty((0, 0, 0, 0), np.float32), np.empty((0, 0), np.int64)


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, *, softcap: float | None = None,
    sinks: Tensor | None = None, left_out: LeftOut | None = None, ends: tuple[int, int] | Tensor = (0, 0),
    lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, *, softcap: float | None = None,
    sinks: Tensor | None = None, left_out: LeftOut | None = None, ends: tuple[int, int] | Tensor = (0, 0),
    lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
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
            contain them. Or the tokens that all rows of a sequence read besides, int64 [B, E], -1 in
            unused slots.
        lse: also return the mean and the log-sum-exp of the logits, which calibration of the remainder needs (eq. 15).
    Returns: [B, Q, Hq, Dv] in q's type; zeros for rows without a selected token. Sums are float32. With lse also
        float32 [2, B, Q, Hq]: mean and log-sum-exp of the selected logits, 0 and -inf for rows without one; the
        log-sum-exp includes the learned sink.
    Raises: ValueError on other shapes, types or devices, and on an index of N or more; on CUDA, where checking
        would make the host wait, such an index counts as unused.
    Source: docs/algorithm.md, eq. 8.
    """
    check(q, k, v, indices, softcap, sinks, left_out)
    rest = (None,) * 4 if left_out is None else left_out
    always = (0, 0, ends) if isinstance(ends, Tensor) else (*ends, None)
    given = q.detach(), k.detach(), v.detach(), indices, scaling, softcap, sinks, *rest, *always
    if readable(q):  # on the CPU, torch's dispatcher would take longer than everything else in the call
        result, logits = _on_cpu(*given)
    elif lse:
        result, logits = gather.OPERATORS.gather_with_lse(*given)
    else:
        result, logits = gather.OPERATORS.gather(*given), None
    if q.requires_grad:
        result = _NoBackward.apply(result, q)
    return (result, logits) if lse else result  # pyright: ignore[reportReturnType]


def on_host(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None,
    left_out: LeftOut | None, blocks: NDArray[np.int64] = _SIDE_BY_SIDE,
) -> tuple[Tensor, Tensor, NDArray[np.int64]]:  # fmt: skip
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
        where = *place(k), *place(v), LIKE[k.element_size()], blocks
        sink = np.full(hq, -np.inf, np.float32) if sinks is None else _floats(sinks)
        factors = np.float32(scaling), np.float32(softcap or 0), sink, KINDS[k.dtype]
        rest = _rest(left_out, (batch, n_rows), k.shape[2])
        given = _floats(q), *where, indices.contiguous().numpy(), out, logits, used, *factors, *rest
        run(attend_kernels.tasks, tasks, work, *given)
        if used.min() < 0:
            limit = k.shape[2] * max(1, blocks.shape[1])
            raise ValueError(f"indices must be below N = {limit}, got {int(indices.max())}")
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


class _NoBackward(torch.autograd.Function):
    """Allow a forward pass without `no_grad`; a backward pass raises an error instead of dropping the gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("sparse attention has no backward pass; detach the model to train it")


def reach(x: Tensor) -> int:
    """Return the extent of a tensor's memory in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def place(x: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return the address of x [B, Hkv, N, D], its extent in elements, and its strides and sizes."""
    (batch, heads, tokens, width), (row, head, token, component) = x.shape, x.stride()
    reach = 1 + (batch - 1) * row + (heads - 1) * head + (tokens - 1) * token + (width - 1) * component
    return x.data_ptr(), reach, (row, head, token, heads, tokens)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    scaling, softcap, sinks, *left, sink, recent, always = rest
    left_out = None if left[0] is None else LeftOut(*left)
    indices = include(indices, k.shape[2], (sink, recent) if always is None else always)
    return on_host(q, k, v, indices, scaling, softcap, sinks, left_out)[:2]


def _alone_on_cpu(*given: Any) -> Tensor:
    return _on_cpu(*given)[0]


gather.LIBRARY.impl("gather", _alone_on_cpu, "CPU")
gather.LIBRARY.impl("gather_with_lse", _on_cpu, "CPU")
