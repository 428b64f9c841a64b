"""The hash functions of our variants for a few tokens on CUDA: one launch, of keys and queries together in a step.

The kernel, kernels/encode.cu, computes the same as the layers in torch and `sparse_decode.cpu.encode` on the CPU.
`encode_weights` has what is found once for a layer, and this file what each call does: call the operator, launch.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from hashcore.cuda import launch
from hashcore.cuda.kept import zeroed
from hashcore.cuda.kernels import make_launch
from hashcore.cuda.source import structure
from torch import Tensor

from sparse_decode.cpu.encode import MAX_TOKENS
from sparse_decode.cuda.encode_weights import (
    MOST_GROUPS,
    Functions,
    How,
    Placed,
    Side,
    describe,
)
from sparse_decode.cuda.gather import KERNELS, OPERATORS, Rows, Run, operator

Tensors = Sequence[Tensor]
THREADS = 512
MOST_TOKENS = 4
"""Tokens that a block hashes: more would not fit its shared memory."""
TICKETS = MAX_TOKENS * MOST_GROUPS
"""Words of zeros in front of the memory where the heads of a group meet."""
Codes: Any = structure(KERNELS, "encode.cu", "Codes")
Planes: Any = structure(KERNELS, "encode.cu", "Planes")
_BF16 = {torch.bfloat16: "1", torch.float16: "0"}


def supports(own: Placed, x: Tensor) -> bool:
    """Whether the CUDA kernel supports tokens x [B, H, T, D] of a layer: few tokens, 16 bits."""
    few = 0 < x.shape[0] * x.shape[2] <= MAX_TOKENS
    return x.device.type == "cuda" and x.dtype in _BF16 and few and own.fits


def write_keys(own: Placed, k: Tensor, codes: Tensor, at: Tensor | None) -> None:
    """Hash keys [B, Hkv, T, D] into codes int32 [B, H, N, W] of `code_shape`, from token `at` on."""
    OPERATORS.hash_keys(k, own.key, own.digits, codes, at)


def queries(own: Placed, q: Tensor, per_query_head: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Hash queries [B, Hq, T, D] to planes [B, H, T, P, W] and their weights: `layer.encode_queries`, without a check.

    A check would make the host wait. NaN weights have level -1; infinite ones count as the largest float32.
    """
    found = OPERATORS.hash_queries(q, own.query, own.digits, *own.hows[per_query_head])
    return found, own.planes[per_query_head]


def step(own: Placed, k: Tensor, codes: Tensor, q: Tensor, per_query_head: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Do both at once: keys [B, Hkv, T, D] into all of `codes`, queries [B, Hq, T, D] to planes and their weights."""
    found = OPERATORS.hash_step(k, own.key, q, own.query, own.digits, codes, *own.hows[per_query_head])
    return found, own.planes[per_query_head]


def hash_tokens(
    of_keys: tuple[Tensor, Tensors, Tensor, Tensor | None] | None, of_queries: tuple[Tensor, Tensors, How] | None,
    digits: Tensors, run: Run | None = None,
) -> Any:  # fmt: skip
    """Hash keys or queries, or both with the same number of tokens, none of them empty, in one launch.

    Args:
        of_keys: k [B, Hkv, T, D], weights, codes int32 [B, H, N, W] to write to, and the token to start at, int64 [];
            None: the first. Weights are without gaps, see `encode_weights.NAMES`. The words of a code must be
            contiguous (stride 1). With more heads of codes than functions, each code is written to as many; with fewer,
            the codes of several functions lie side by side.
        of_queries: q [B, Hq, T, D], weights, and how planes come from them.
        digits: int64 coordinate [Hkv, bits], float32 power [Hkv, bits] and limit [Hkv, C]; empty if C is bits.
    Returns: planes of the queries, int32 of shape `planes_shape(q, how)`.
    """
    k = q = found = side = None
    blocks, codes, planes, of_k, of_q = 0, Codes(), Planes(), Functions(), Functions()
    if of_keys is not None:
        k, weights, to, at = of_keys
        k, side = _readable(k), describe(weights, digits)
        own, join, of_k = _blocks(k, side), to.shape[3] // (side.digits.bits // 32), side.functions
        start = None if at is None else at.data_ptr()
        codes = Codes(to.data_ptr(), *to.stride()[:3], start, to.shape[1] * join // own, join)
        blocks += own
    if of_queries is not None:
        q, weights, how = of_queries
        q, side = _readable(q), describe(weights, digits)
        found, of_q = _empty_planes(q, how), side.functions
        planes = Planes(found.data_ptr(), None, None, how.group, how.join, found.shape[3], how.planes == 0)
        if how.group > 1:
            planes.tickets = zeroed(TICKETS + q[..., 0].numel() * of_q.out, q.device).data_ptr()
            planes.numbers = planes.tickets + 4 * TICKETS
        blocks += _blocks(q, side)
    x, side = cast(Tensor, k if q is None else q), cast(Side, side)
    every = x.shape[0] * x.shape[2]
    # A block occupies a multiprocessor, and most of its time is that of the weights: no more blocks than fit at once.
    each = min(MOST_TOKENS, every, -(-every * blocks // launch.sm_count(x.device)))
    sizes = (ctypes.c_int32(size) for size in (x.shape[2], every, each))
    arguments = *_tokens(k), codes, of_k, *_tokens(q), planes, of_q, side.digits, *sizes
    macros, grid = (("SPARSE_BF16", _BF16[x.dtype]), ("SPARSE_NARROW", side.narrow)), (-(-every // each), blocks)
    one = make_launch("encode.cu", "hash_tokens", grid, THREADS, arguments, macros, programmatic=True)
    (launch.run if run is None else run)([one], x.device, KERNELS)
    return found


def _readable(x: Tensor) -> Tensor:
    """Return x [B, H, T, D] with contiguous components, which is all that the kernel needs."""
    return x if x.stride(3) == 1 else x.contiguous()


def _tokens(x: Tensor | None) -> tuple[Any, Any, Any]:
    """Return the kernel's arguments for tokens x [B, H, T, D]: their address, their strides, and H."""
    if x is None:
        return ctypes.c_void_p(), Rows(), ctypes.c_int32()
    return ctypes.c_void_p(x.data_ptr()), Rows(*x.stride()[:3]), ctypes.c_int32(x.shape[1])


def _blocks(x: Tensor, side: Side) -> int:
    """Return the number of blocks that hash a token: of heads of x or of functions, whichever are more."""
    return max(x.shape[1], side.functions.heads)


def planes_shape(x: Tensor, how: How) -> tuple[int, ...]:
    """Return the shape of the planes of queries [B, H, T, D]: [B, H / group / join, T, P, join bits / 32]."""
    heads, slots = x.shape[1] // (how.group * how.join), how.planes or how.group.bit_length()
    return x.shape[0], heads, x.shape[2], slots, how.join * how.bits // 32


def _empty_planes(x: Tensor, how: How) -> Tensor:
    return x.new_empty(*planes_shape(x, how), dtype=torch.int32)


_HOW = "int bits, int group, int planes, int join"
operator(
    "hash_keys(Tensor x, Tensor[] weights, Tensor[] digits, Tensor(a!) codes, Tensor? at) -> ()",
    lambda *_: None,
    cuda=lambda x, weights, digits, codes, at: hash_tokens((x, weights, codes, at), None, digits),
)
operator(
    f"hash_queries(Tensor x, Tensor[] weights, Tensor[] digits, {_HOW}) -> Tensor",
    lambda x, weights, digits, *how: _empty_planes(x, How(*how)),
    cuda=lambda x, weights, digits, *how: hash_tokens(None, (x, weights, How(*how)), digits),
)
operator(
    "hash_step(Tensor k, Tensor[] key_weights, Tensor q, Tensor[] query_weights, Tensor[] digits, "
    f"Tensor(a!) codes, {_HOW}) -> Tensor",
    lambda k, of_keys, q, of_queries, digits, codes, *how: _empty_planes(q, How(*how)),
    cuda=lambda k, of_k, q, of_q, digits, codes, *how: hash_tokens(
        (k, of_k, codes, None), (q, of_q, How(*how)), digits
    ),
)
