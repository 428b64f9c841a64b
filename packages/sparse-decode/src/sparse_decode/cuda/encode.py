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


def tokens(
    own: Placed, per_query_head: bool, k: Tensor | None = None, codes: Tensor | None = None, at: Tensor | None = None,
    q: Tensor | None = None,
) -> tuple[Tensor, tuple[int, ...]]:  # fmt: skip
    """Hash keys k [B, Hkv, T, D] into codes int32 [B, H, N, W] of `code_shape`, from token `at` on, int64 [] (None: 0),
    or queries q [B, Hq, T, D] to planes [B, H, T, P, W] and their weights, or both.

    Without a check, which would make the host wait: NaN weights have level -1; infinite ones count as the largest
    float32.
    """
    of_keys, of_queries = [] if k is None else own.key, [] if q is None else own.query
    found = OPERATORS.hash_tokens(k, of_keys, codes, at, q, of_queries, own.digits, *own.hows[per_query_head])
    return found, own.planes[per_query_head]


def hash_tokens(
    k: Tensor | None, key_weights: Tensors, to: Tensor | None, at: Tensor | None, q: Tensor | None,
    query_weights: Tensors, digits: Tensors, bits: int, group: int, planes: int, join: int, run: Run | None = None,
) -> Tensor:  # fmt: skip
    """Hash keys or queries, or both with the same number of tokens, none of them empty, in one launch: the operator.

    Args:
        k, to, at, q: as k, codes, at and q of `tokens`; the words of a code must be contiguous (stride 1). With more
            heads of codes than functions, each code is written to as many; with fewer, the codes of several functions
            lie side by side.
        key_weights, query_weights: without gaps, see `encode_weights.NAMES`.
        digits: int64 coordinate [Hkv, bits], float32 power [Hkv, bits] and limit [Hkv, C]; empty if C is bits.
        bits, group, planes, join: those of `How`.
    Returns: planes of the queries, int32 [B, H / group / join, T, P, join bits / 32]; empty without queries.
    """
    how = How(bits, group, planes, join)
    x, found, side = cast(Tensor, k if q is None else q), _empty_planes(k, q, how), cast(Side, None)
    blocks, codes, to_planes, of_k, of_q = 0, Codes(), Planes(), Functions(), Functions()
    if k is not None and to is not None:
        k, side = _readable(k), describe(key_weights, digits)
        own, side_by_side, of_k = _blocks(k, side), to.shape[3] // (side.digits.bits // 32), side.functions
        start = None if at is None else at.data_ptr()
        codes = Codes(to.data_ptr(), *to.stride()[:3], start, to.shape[1] * side_by_side // own, side_by_side)
        blocks += own
    if q is not None:
        q, side = _readable(q), describe(query_weights, digits)
        of_q = side.functions
        to_planes = Planes(found.data_ptr(), None, None, how.group, how.join, found.shape[3], how.planes == 0)
        if how.group > 1:
            to_planes.tickets = zeroed(TICKETS + q[..., 0].numel() * of_q.out, q.device).data_ptr()
            to_planes.numbers = to_planes.tickets + 4 * TICKETS
        blocks += _blocks(q, side)
    every = x.shape[0] * x.shape[2]
    # A block occupies a multiprocessor, and most of its time is that of the weights: no more blocks than fit at once.
    each = min(MOST_TOKENS, every, -(-every * blocks // launch.sm_count(x.device)))
    sizes = (ctypes.c_int32(size) for size in (x.shape[2], every, each))
    arguments = *_tokens(k), codes, of_k, *_tokens(q), to_planes, of_q, side.digits, *sizes
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


def _empty_planes(k: Tensor | None, q: Tensor | None, how: How) -> Tensor:
    if q is None:
        return cast(Tensor, k).new_empty(0, dtype=torch.int32)
    heads, slots = q.shape[1] // (how.group * how.join), how.planes or how.group.bit_length()
    return q.new_empty(q.shape[0], heads, q.shape[2], slots, how.join * how.bits // 32, dtype=torch.int32)


operator(
    "hash_tokens(Tensor? k, Tensor[] key_weights, Tensor(a!)? codes, Tensor? at, Tensor? q, Tensor[] query_weights, "
    "Tensor[] digits, int bits, int group, int planes, int join) -> Tensor",
    lambda k, of_keys, codes, at, q, of_queries, digits, *how: _empty_planes(k, q, How(*how)),
    cuda=hash_tokens,
)
