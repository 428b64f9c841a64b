"""Launches of kernels/encode.cu: the keys of a few tokens, their queries, or both, in one launch.

Which weights a hash function has is told by their number (`NAMES`), and the other numbers of a call by shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hashcore.cuda import launch
from hashcore.cuda.kept import Table, zeroed
from hashcore.cuda.kernels import Kept, make_launch
from torch import Tensor

from sparse_decode.gather import KERNELS, Run

THREADS = 1024
MOST = 512
"""The largest head_dim, width of the hidden layer and number of bits that the kernel supports."""
MAX_TOKENS = 16
"""Maximal number of tokens in all batch rows together; above, a matrix product per head is faster."""
MOST_GROUPS = 256
"""Maximal number of output heads."""
TICKETS = MAX_TOKENS * MOST_GROUPS
"""Words of zeros in front of the memory where the heads of a group meet."""
NAMES = {
    1: ("r",),
    3: ("w1", "b1", "w2"),
    4: ("w1", "b1", "w2", "b2"),
    5: ("r", "w1", "b1", "w2", "b2"),
}
"""The weights of a hash function by their number: linear; the paper's; the paper's with its residuals; a linear part
and an MLP. R [F, D, C], W1 [F, D, M], b1 [F, 1, M], W2 [F, M, C], b2 [F, 1, C] for F heads."""
MATRICES = ("r", "w1", "w2")
"""Weights that may be float16; the others are float32."""
_BF16 = {torch.bfloat16: "1", torch.float16: "0"}


class Functions(ctypes.Structure):
    """Functions of kernels/encode.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in NAMES[5]),
        *((name, ctypes.c_int32) for name in ("heads", "dim", "hidden", "out", "residual")),
    )


class Digits(ctypes.Structure):
    """Digits of kernels/encode.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("coordinate", "power", "limit")),
        *((name, ctypes.c_int32) for name in ("heads", "bits")),
    )


class Codes(ctypes.Structure):
    """Codes of kernels/encode.cu, field by field."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
        *((name, ctypes.c_void_p) for name in ("at", "first")),
        *((name, ctypes.c_int64) for name in ("first_batch", "first_head")),
        *((name, ctypes.c_int32) for name in ("copies", "join")),
    )


class Planes(ctypes.Structure):
    """Planes of kernels/encode.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "numbers", "tickets")),
        *((name, ctypes.c_int32) for name in ("group", "join", "count", "votes")),
    )


class Side(NamedTuple):
    """The functions of keys or of queries, and their kernel arguments as bytes."""

    weights: Sequence[Tensor]
    digits: Sequence[Tensor]
    functions: bytes
    described: bytes
    form: tuple[Any, ...]


sides: dict[int, Side] = {}
"""Those with fixed addresses, by the identity of their first weight (`encode_cuda.place`)."""


class How(NamedTuple):
    """How the planes of a query come from its heads' functions.

    Attributes:
        bits: of one code; group: query heads whose functions are summed.
        planes: binary digits of the sum's levels; 0: of the number of heads whose function is positive (eq. 3).
        join: groups whose planes lie side by side (eq. 2).
    """

    bits: int
    group: int
    planes: int
    join: int = 1

    @property
    def slots(self) -> int:
        """Planes of a query, P."""
        return self.planes or self.group.bit_length()

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the planes of queries [B, H, T, D]: [B, H / group / join, T, P, join bits / 32]."""
        heads = x.shape[1] // (self.group * self.join)
        return x.shape[0], heads, x.shape[2], self.slots, self.join * self.bits // 32


def hash_keys(
    x: Tensor,
    weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    codes: Tensor,
    at: Tensor | None = None,
    first: Tensor | None = None,
    run: Run | None = None,
) -> None:
    """Hash x [B, Hkv, T, D], not empty, into codes int32 [B, H, N, W], from token `at` on.

    Args:
        weights: see `NAMES`, without gaps.
        digits: int64 coordinate [Hkv, bits], float32 power [Hkv, bits] and limit [Hkv, C]; empty if C is bits.
        codes: their words must be contiguous (stride 1). With more heads than the functions, each code is written to
            as many; with fewer, the codes of several functions lie side by side.
        first: for a copy of the codes' first words, int32 [B, H, N], contiguous along N; None: not wanted.
    """
    _hash((x, side_of(weights, digits), codes, at, first), None, run)


def hash_queries(
    x: Tensor,
    weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    how: How,
    run: Run | None = None,
) -> Tensor:
    """Hash x [B, Hq, T, D], not empty, to planes int32 of shape `how.shape(x)`. Args: as `hash_keys`."""
    return _hash(None, (x, side_of(weights, digits), how), run)


def hash_step(
    k: Tensor,
    key_weights: Sequence[Tensor],
    q: Tensor,
    query_weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    codes: Tensor,
    how: How,
    run: Run | None = None,
) -> Tensor:
    """Do both in one launch: keys k [B, Hkv, T, D] into all of `codes`, and queries q [B, Hq, T, D] to planes."""
    return _hash((k, side_of(key_weights, digits), codes, None, None), (q, side_of(query_weights, digits), how), run)


class _Call(NamedTuple):
    """A prepared launch; each call sets these arguments."""

    k: ctypes.c_void_p
    codes: Codes
    of_keys: bytearray
    q: ctypes.c_void_p
    planes: Planes
    of_queries: bytearray
    digits: bytearray
    words: int
    """Of the memory where the heads of a group meet."""
    like: Tensor
    """A tensor like the result."""
    launches: Kept


_calls: Table[_Call] = Table()
_Keys = tuple[Tensor, Side, Tensor, Tensor | None, Tensor | None]
_Queries = tuple[Tensor, Side, How]


def _hash(keys: _Keys | None, queries: _Queries | None, run: Run | None) -> Any:
    """Launch one side, or both with the same number of tokens; return the planes of queries."""
    k, of_keys, q, of_queries = None, None, None, None
    if keys is not None:
        k = keys[0].contiguous()
        of_keys = k.shape, keys[1].form, keys[2].shape, keys[2].stride()
    if queries is not None:
        q = queries[0].contiguous()
        of_queries = q.shape, queries[1].form, queries[2]
    x = k if q is None else q
    assert x is not None
    form = of_keys, of_queries, x.dtype, x.device
    call = _calls.found.get(form)
    if call is None:
        call = _calls.keep(form, _prepare(keys, queries))
    found = None
    if keys is not None and k is not None:
        to, (codes, at, first) = call.codes, keys[2:]
        call.k.value, to.words, to.at = k.data_ptr(), codes.data_ptr(), None if at is None else at.data_ptr()
        to.first = None if first is None else first.data_ptr()
        to.first_batch, to.first_head = (0, 0) if first is None else first.stride()[:2]
        call.of_keys[:], call.digits[:] = keys[1].functions, keys[1].described
    if queries is not None and q is not None:
        found, planes = torch.empty_like(call.like), call.planes
        call.q.value, planes.words = q.data_ptr(), found.data_ptr()
        call.of_queries[:], call.digits[:] = queries[1].functions, queries[1].described
        if call.words:
            planes.tickets = address = zeroed(call.words, x.device).address
            planes.numbers = address + 4 * TICKETS
    (launch.run if run is None else run)(call.launches, x.device, KERNELS)
    return found


def _prepare(keys: _Keys | None, queries: _Queries | None) -> _Call:
    x, side = keys[:2] if queries is None else queries[:2]  # pyright: ignore[reportOptionalSubscript]
    batch, _, tokens, _ = x.shape
    codes, planes, k, q = Codes(), Planes(), ctypes.c_void_p(), ctypes.c_void_p()
    blocks, heads, words, like = [0, 0], [0, 0], 0, x.new_empty(0)
    if keys is not None:
        heads[0], blocks[0] = keys[0].shape[1], _blocks(keys[0], keys[1])
        to = keys[2]
        join = to.shape[3] // (keys[1].form[-1] // 32)
        codes = Codes(None, *to.stride()[:3], None, None, 0, 0, to.shape[1] * join // blocks[0], join)
    if queries is not None:
        how, heads[1], blocks[1] = queries[2], x.shape[1], _blocks(x, side)
        planes = Planes(None, None, None, how.group, how.join, how.slots, how.planes == 0)
        words = TICKETS + batch * heads[1] * tokens * side.form[3] if how.group > 1 else 0
        like = x.new_empty(*how.shape(x), dtype=torch.int32)
    of_keys, of_queries = (bytearray(ctypes.sizeof(Functions)) for _ in range(2))
    digits = bytearray(ctypes.sizeof(Digits))
    arguments = (
        *(k, ctypes.c_int32(heads[0]), codes, Functions.from_buffer(of_keys)),
        *(q, ctypes.c_int32(heads[1]), planes, Functions.from_buffer(of_queries)),
        *(Digits.from_buffer(digits), ctypes.c_int32(tokens)),
    )
    macros = ("SPARSE_BF16", _BF16[x.dtype]), ("SPARSE_NARROW", side.form[5])
    step = make_launch("encode.cu", "hash_tokens", (batch * tokens, sum(blocks)), THREADS, arguments, macros)
    return _Call(k, codes, of_keys, q, planes, of_queries, digits, words, like, Kept([step]))


def _blocks(x: Tensor, side: Side) -> int:
    """Return the number of blocks that hash a token: of heads of x or of functions, whichever are more."""
    return max(x.shape[1], side.form[0])


def side_of(weights: Sequence[Tensor], digits: Sequence[Tensor]) -> Side:
    """Return the kernel arguments of contiguous weights and digits, cached for layers passed to `place`."""
    known = sides.get(id(weights[0]))
    # Comparing lists compares identities first, so no tensor contents are compared here.
    return known if known and known.weights == weights and known.digits == digits else describe(weights, digits)


def describe(weights: Sequence[Tensor], digits: Sequence[Tensor]) -> Side:
    """Return the kernel arguments of weights and digits; form: heads, D, M, C, residual, 16 bits, digits' shape."""
    named = dict(zip(NAMES[len(weights)], weights, strict=True))
    first, last = named.get("w1", weights[0]), named.get("w2", weights[0])
    (heads, dim), out, hidden = first.shape[:2], last.shape[2], first.shape[2] if "w1" in named else 0
    sizes = heads, dim, hidden, out, len(weights) == 4
    narrow = "1" if first.dtype == torch.float16 else "0"
    of_digits = digits[0].shape if digits else (0, out)
    addresses = (named[name].data_ptr() if name in named else None for name in NAMES[5])
    described = Digits(*([x.data_ptr() for x in digits] or (None,) * 3), *of_digits)
    return Side(weights, digits, bytes(Functions(*addresses, *sizes)), bytes(described), (*sizes, narrow, *of_digits))
