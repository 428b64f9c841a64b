"""Softmax attention over selected tokens only.

For query head h of a row, with S the tokens selected for it (eq. 8):

    l_j = scaling q_h . k_j,  or c tanh(scaling q_h . k_j / c) with soft-capping at c
    out_h = sum_{j in S} exp(l_j) v_j / (exp(s_h) + sum_{j in S} exp(l_j)),  exp(s_h) only with a learned sink s_h

    q [B, Hq, Q, D]   k, v [B, Hkv, N, D]   indices [B, H, Q, K], H = Hkv or Hq, -1 unused   out [B, Q, Hq, D]

One task is one (row, index set). It reads each selected key and value once, converts it to float32 in cache and uses it
for every query head of the set. Keys and values are addressed by stride, so nothing of length N is copied, converted or
written. Each task reads |S| (D + Dv) elements, in random rows of 2 D or 4 D bytes.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from typing import Any

import torch
from torch import Tensor

from sparse_decode.cpu.step import Block, CpuStep, Precomputed
from sparse_decode.cuda.gather import OPERATORS
from sparse_decode.inputs import Inputs, check
from sparse_decode.modes import readable


def attend(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, *, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend to the selected tokens only.

    Args:
        q: [B, Hq, Q, D]; k: [B, Hkv, N, D]; v: [B, Hkv, N, Dv]; float32, bfloat16 or float16 of one type, on the CPU
            or, for 16-bit types and up to 16 query heads per index set, on CUDA (kernels/gather.cu), where k and v may
            also be in pinned host memory.
        indices: int64 [B, H, Q, K], H = Hkv or Hq; -1 in unused slots, at any place.
        scaling, softcap, sinks: as in `Inputs`.
    Returns: [B, Q, Hq, Dv] in q's type; zeros for rows without a selected token. Sums are float32.
    Raises: ValueError on other shapes, types or devices, and on an index of N or more; on CUDA, where checking
        would make the host wait, such an index counts as unused.
    Source: docs/algorithm.md, eq. 8.
    """
    x = Inputs(q.detach(), k.detach(), v.detach(), scaling, softcap, sinks)
    check(x, indices)
    if readable(q):
        found = CpuStep(0, None).run(x, Block.whole(len(q) * q.shape[2], k.shape[2]), given=Precomputed(indices))
        assert found is not None
        out = found[0]
    else:
        out = OPERATORS.gather(*x[:3], indices, scaling, softcap, sinks, None, None, None, None, 0, 0, None, None)
    return without_backward(out, q)


def without_backward(out: Tensor, q: Tensor) -> Tensor:
    """Return an output of which a backward pass raises an error instead of dropping the gradient of q."""
    return _NoBackward.apply(out, q) if q.requires_grad else out  # pyright: ignore[reportReturnType]


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("sparse attention has no backward pass; detach the model to train it")
