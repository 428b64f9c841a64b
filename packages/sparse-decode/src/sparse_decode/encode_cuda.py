"""The `planes` and `transform` hash functions for a few tokens on CUDA: one launch for keys, two for queries.

The kernels are in kernels/encode.cu and compute the same as `sparse_decode.encode` on the CPU.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import hashcore
import torch
from hashcore.cuda import launch
from hashcore.cuda.kept import Table, scratch
from hashcore.cuda.kernels import Kept, make_launch
from hashcore.cuda.layout import SAMPLES
from hashtrain.layers import LayerHasher
from hashtrain.layers.planes import Planes
from hashtrain.layers.transform import Transform
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sparse_decode import encode
from sparse_decode.gather import KERNELS, Run

THREADS = 256
MOST = 512
"""The largest head_dim, width of the hidden layer and number of bits that the kernels support."""
MAX_TOKENS = 16
"""Maximal number of tokens in all batch rows together; above, a matrix product per head is faster."""
NAMES = ("r", "w1", "b1", "w2", "b2")
_BF16 = {torch.bfloat16: "1", torch.float16: "0"}


class Functions(ctypes.Structure):
    """Functions of kernels/encode.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in NAMES),
        *((name, ctypes.c_int32) for name in ("dim", "hidden", "out")),
    )


class Codes(ctypes.Structure):
    """Codes of kernels/encode.cu, field by field."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
        ("at", ctypes.c_void_p),
    )


class Digits(ctypes.Structure):
    """Digits of kernels/encode.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("coordinate", "power", "limit")),
        *((name, ctypes.c_int32) for name in ("heads", "bits")),
    )


class Placed(NamedTuple):
    """The tensors of a layer whose addresses are fixed: weights of keys and of queries, and digits."""

    key: list[Tensor]
    query: list[Tensor]
    digits: list[Tensor]
    fits: bool


class _Side(NamedTuple):
    """The functions of keys or of queries with fixed addresses, and their kernel arguments as bytes."""

    weights: Sequence[Tensor]
    digits: Sequence[Tensor]
    functions: bytes
    described: bytes
    form: tuple[Any, ...]


_placed: dict[int, Placed] = {}
_sides: dict[int, _Side] = {}


def place(layer: LayerHasher) -> None:
    """Cache the addresses of a layer's tensors from now on; the tensors must never be replaced."""
    if type(layer) in (Planes, Transform):
        own = cast(Planes | Transform, layer)
        known = _placed[id(layer)] = Placed(_weights(own.key), _weights(own.query), _digits(own), _fits(own))
        weakref.finalize(layer, _forget, id(layer), id(known.key[0]), id(known.query[0]))
        if not isinstance(known.key[0], FakeTensor):
            for weights in known[:2]:
                _sides[id(weights[0])] = _describe(weights, known.digits)


def _forget(layer: int, *sides: int) -> None:
    for side in sides:
        _sides.pop(side, None)
    del _placed[layer]


def supports(layer: LayerHasher, x: Tensor) -> bool:
    """Whether the CUDA kernels support tokens x [B, H, T, D] of a layer: few tokens, 16 bits."""
    return x.device.type == "cuda" and x.dtype in _BF16 and fits(layer, x)


def fits(layer: LayerHasher, x: Tensor) -> bool:
    """Whether the operators below support tokens x [B, H, T, D] of a layer, apart from their dtype and device."""
    known = _placed.get(id(layer))
    return 0 < x.shape[0] * x.shape[2] <= MAX_TOKENS and (_fits(layer) if known is None else known.fits)


def _fits(layer: LayerHasher) -> bool:
    if type(layer) not in (Planes, Transform) or layer.remainder.dtype != torch.float32:
        return False
    return max(layer.d, layer.bits, cast(Planes, layer).key.w1.shape[2]) <= MOST


def write_keys(layer: Planes | Transform, k: Tensor, codes: Tensor, at: Tensor | None) -> None:
    """Hash keys [B, Hkv, T, D] into codes int32 [B, Hkv, N, W], from token `at` on; None: into all of them."""
    known = _placed.get(id(layer))
    weights, digits = (_weights(layer.key), _digits(layer)) if known is None else (known.key, known.digits)
    OPERATORS.hash_keys(k, weights, digits, codes, at)


def queries(layer: Planes | Transform, q: Tensor, per_query_head: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Hash queries [B, Hq, T, D] to planes [B, H, T, P, W] and their weights: `layer.encode_queries`, without a check.

    A check would make the host wait. NaN weights have level -1; infinite ones count as the largest float32.
    """
    known, group = _placed.get(id(layer)), 1 if per_query_head else layer.group
    weights, digits = (_weights(layer.query), _digits(layer)) if known is None else (known.query, known.digits)
    found = OPERATORS.hash_queries(q, weights, digits, layer.bits, group, layer.planes)
    return found, tuple(1 << p for p in range(layer.planes))


def _weights(functions: nn.Module) -> list[Tensor]:
    found = [getattr(functions, name) for name in NAMES]
    return [x.detach() if x.requires_grad else x for x in found]  # avoid views, which are slow


def _digits(layer: Planes | Transform) -> list[Tensor]:
    """Return coordinate, power and limit of `transform`; nothing for `planes`."""
    return [] if isinstance(layer, Planes) else list(layer.layout())


def hash_keys(
    x: Tensor,
    weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    codes: Tensor,
    at: Tensor | None = None,
    run: Run | None = None,
) -> None:
    """Hash x [B, H, T, D], not empty, into codes int32 [B, H, N, bits / 32], from token `at` on.

    Args:
        weights: float32 R [H, D, C], W1 [H, D, M], b1 [H, 1, M], W2 [H, M, C], b2 [H, 1, C], without gaps.
        digits: int64 coordinate [H, bits], float32 power [H, bits] and limit [H, C]; empty if C is bits.
        codes: their words must be contiguous (stride 1).
    """
    x, device, side = x.contiguous(), x.device, _side(weights, digits)
    form = x.shape, x.dtype, device, side.form, codes.shape[3], codes.stride()
    call = _keys.found.get(form)
    if call is None:
        call = _keys.keep(form, _prepare_keys(x, weights, digits, codes))
    to = call.codes
    call.x.value, to.words, to.at = x.data_ptr(), codes.data_ptr(), None if at is None else at.data_ptr()
    call.functions[:], call.digits[:] = side.functions, side.described
    (launch.run if run is None else run)(call.launches, device, KERNELS)


def hash_queries(
    x: Tensor,
    weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    bits: int,
    group: int,
    planes: int,
    run: Run | None = None,
) -> Tensor:
    """Hash x [B, H, T, D], not empty, to planes int32 [B, H / group, T, planes, bits / 32]. Args: as `hash_keys`."""
    x, device, side = x.contiguous(), x.device, _side(weights, digits)
    form = x.shape, x.dtype, device, side.form, bits, group, planes
    call = _queries.found.get(form)
    if call is None:
        call = _queries.keep(form, _prepare_queries(x, weights, digits, bits, group, planes))
    found, memory = torch.empty_like(call.like), scratch(call.words, device)
    call.x.value, call.found.value = x.data_ptr(), found.data_ptr()
    call.numbers.value = memory.address + 4 * SAMPLES
    call.functions[:], call.digits[:] = side.functions, side.described
    (launch.run if run is None else run)(call.launches, device, KERNELS)
    return found


class _Keys(NamedTuple):
    """A prepared launch that hashes keys; each call sets these arguments."""

    x: ctypes.c_void_p
    codes: Codes
    functions: bytearray
    digits: bytearray
    launches: Kept


class _Queries(NamedTuple):
    """Prepared launches that hash queries. words: scratch memory, including that of searches; like: as the result."""

    x: ctypes.c_void_p
    numbers: ctypes.c_void_p
    found: ctypes.c_void_p
    functions: bytearray
    digits: bytearray
    words: int
    like: Tensor
    launches: Kept


_keys: Table[_Keys] = Table()
_queries: Table[_Queries] = Table()


def _prepare_keys(x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], codes: Tensor) -> _Keys:
    batch, heads, tokens, _ = x.shape
    to, at, (functions, described) = Codes(None, *codes.stride()[:3]), ctypes.c_void_p(), _room()
    arguments = at, to, Functions.from_buffer(functions), Digits.from_buffer(described), ctypes.c_int32(tokens)
    step = make_launch("encode.cu", "hash_keys", (batch * tokens, heads), THREADS, arguments, _macros(x))
    return _Keys(at, to, functions, described, Kept([step]))


def _prepare_queries(
    x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], bits: int, group: int, planes: int
) -> _Queries:
    (batch, heads, tokens, _), out = x.shape, weights[0].shape[2]
    at, numbers, found = (ctypes.c_void_p() for _ in range(3))
    (functions, described), count = _room(), ctypes.c_int32(tokens)
    sizes = ctypes.c_int32(out), ctypes.c_int32(group), count, ctypes.c_int32(planes)
    first = at, numbers, Functions.from_buffer(functions), count
    second = numbers, found, Digits.from_buffer(described), *sizes
    grids, macros = ((batch * tokens, heads), (batch * tokens, heads // group)), _macros(x)
    launches = Kept(
        [
            make_launch("encode.cu", "apply", grids[0], THREADS, first, macros),
            make_launch("encode.cu", "weigh", grids[1], THREADS, second, macros, programmatic=True),
        ]
    )
    words, shape = SAMPLES + batch * heads * tokens * out, (batch, heads // group, tokens, planes, bits // 32)
    like = x.new_empty(*shape, dtype=torch.int32)
    return _Queries(at, numbers, found, functions, described, words, like, launches)


def _macros(x: Tensor) -> tuple[tuple[str, str]]:
    return (("SPARSE_BF16", _BF16[x.dtype]),)


def _room() -> tuple[bytearray, bytearray]:
    """Allocate memory for Functions and Digits."""
    return bytearray(ctypes.sizeof(Functions)), bytearray(ctypes.sizeof(Digits))


def _side(weights: Sequence[Tensor], digits: Sequence[Tensor]) -> _Side:
    """Return the kernel arguments of contiguous weights and digits, cached for layers passed to `place`."""
    known = _sides.get(id(weights[0]))
    # Comparing lists compares identities first, so no tensor contents are compared here.
    return known if known and known.weights == weights and known.digits == digits else _describe(weights, digits)


def _describe(weights: Sequence[Tensor], digits: Sequence[Tensor]) -> _Side:
    (heads, dim, hidden), out = weights[1].shape, weights[0].shape[2]
    of_digits = digits[0].shape if digits else (0, out)
    functions = Functions(*(x.data_ptr() for x in weights), dim, hidden, out)
    described = Digits(*([x.data_ptr() for x in digits] or (None,) * 3), *of_digits)
    form = heads, dim, hidden, out, *of_digits
    return _Side(weights, digits, bytes(functions), bytes(described), form)


def _empty_planes(
    x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], bits: int, group: int, planes: int
) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // group, x.shape[2], planes, bits // 32, dtype=torch.int32)


def _keys_on_cpu(
    x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], codes: Tensor, at: Tensor | None
) -> None:
    first = 0 if at is None else int(at)
    found = encode.hash_tokens(*_arrays(weights, digits), x, 1, 0)[0][..., 0, :]
    codes[:, :, first : first + x.shape[2]] = found


def _queries_on_cpu(
    x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], bits: int, group: int, planes: int
) -> Tensor:
    words, numbers = encode.hash_tokens(*_arrays(weights, digits), x, group, planes)
    if not words.numel():
        hashcore.planes(numbers, planes)  # raises the error
    return words


def _arrays(weights: Sequence[Tensor], digits: Sequence[Tensor]) -> tuple[encode.Weights, encode.Digits]:
    if not digits:
        return tuple(x.numpy() for x in weights), encode.NO_DIGITS
    coordinate, power, limit = digits
    return tuple(x.numpy() for x in weights), (coordinate.int().numpy(), power.numpy(), limit.numpy())


LIBRARY = torch.library.Library("sparse_decode", "FRAGMENT")
_MORE = {
    "hash_keys": ("Tensor(a!) codes, Tensor? at) -> ()", hash_keys, _keys_on_cpu, lambda *_: None),
    "hash_queries": ("int bits, int group, int planes) -> Tensor", hash_queries, _queries_on_cpu, _empty_planes),
}
for _name, (_rest, _cuda, _cpu, _fake) in _MORE.items():
    LIBRARY.define(f"{_name}(Tensor x, Tensor[] weights, Tensor[] digits, {_rest}")
    LIBRARY.impl(_name, _cuda, "CUDA")
    LIBRARY.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"sparse_decode::{_name}", _fake, lib=LIBRARY)
OPERATORS: Any = torch.ops.sparse_decode
"""Both as torch operators, which can be traced, counted and captured."""
