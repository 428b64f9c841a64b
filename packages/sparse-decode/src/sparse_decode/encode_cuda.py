"""The `planes` and `transform` hash functions of a few tokens on CUDA: one launch for keys, two for queries.

The kernels are those of kernels/encode.cu; what they compute is what `sparse_decode.encode` does on the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import hashcore
import torch
from hashcore.cuda import launch
from hashcore.cuda.kernels import make_launch
from hashtrain.layers import LayerHasher
from hashtrain.layers.planes import Planes
from hashtrain.layers.transform import Transform
from torch import Tensor, nn

from sparse_decode import encode
from sparse_decode.gather import KERNELS, Run

THREADS = 256
MOST = 512
"""The largest head_dim, width of the hidden layer and number of bits that the kernels take."""
MAX_TOKENS = 16
"""Of all batch rows together: for more, a matrix product per head is faster."""
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


def takes(layer: LayerHasher, x: Tensor) -> bool:
    """Say whether these functions hash tokens x [B, H, T, D] of a layer: few, in 16 bits, on CUDA."""
    return x.device.type == "cuda" and x.dtype in _BF16 and fits(layer, x)


def fits(layer: LayerHasher, x: Tensor) -> bool:
    """Say whether the operators below hash tokens x [B, H, T, D] of a layer, but for their type: few, small enough."""
    if not 0 < x.shape[0] * x.shape[2] <= MAX_TOKENS or type(layer) not in (Planes, Transform):
        return False
    if layer.remainder.dtype != torch.float32:
        return False
    return max(layer.d, layer.bits, cast(Planes, layer).key.w1.shape[2]) <= MOST


def write_keys(layer: Planes | Transform, k: Tensor, codes: Tensor, at: Tensor | None) -> None:
    """Hash keys [B, Hkv, T, D] into codes int32 [B, Hkv, N, W], from token `at` on; None: into all."""
    OPERATORS.hash_keys(k, _weights(layer.key), _digits(layer), codes, at)


def queries(layer: Planes | Transform, q: Tensor, per_query_head: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Hash queries [B, Hq, T, D] to planes [B, H, T, P, W] and their weights: `layer.encode_queries`, without a check.

    A check would wait for the device: a weight that is NaN has level -1, one that is infinite counts as the largest.
    """
    group = 1 if per_query_head else layer.group
    found = OPERATORS.hash_queries(q, _weights(layer.query), _digits(layer), layer.bits, group, layer.planes)
    return found, tuple(1 << p for p in range(layer.planes))


def _weights(functions: nn.Module) -> list[Tensor]:
    return [getattr(functions, name).detach() for name in NAMES]


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
        codes: the words of a code side by side.
    """
    x, (batch, heads, tokens, _) = x.contiguous(), x.shape
    to = Codes(codes.data_ptr(), *codes.stride()[:3], None if at is None else at.data_ptr())
    described = _described(digits, 32 * codes.shape[3])
    arguments = _pointer(x), to, _functions(weights), described, ctypes.c_int32(tokens)
    _launch([("hash_keys", (batch * tokens, heads), arguments)], x, run)


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
    x, (batch, heads, tokens, _) = x.contiguous(), x.shape
    out = weights[0].shape[2]
    numbers = x.new_empty(batch, heads, tokens, out, dtype=torch.float32)
    found = _empty_planes(x, weights, digits, bits, group, planes)
    described, count = _described(digits, bits), ctypes.c_int32(tokens)
    sizes = ctypes.c_int32(out), ctypes.c_int32(group), count, ctypes.c_int32(planes)
    first = _pointer(x), _pointer(numbers), _functions(weights), count
    second = _pointer(numbers), _pointer(found), described, *sizes
    grids = (batch * tokens, heads), (batch * tokens, heads // group)
    _launch([("apply", grids[0], first), ("weigh", grids[1], second)], x, run)
    return found


def _launch(calls: Sequence[tuple[str, tuple[int, int], Sequence[Any]]], x: Tensor, run: Run | None) -> None:
    macros = (("SPARSE_BF16", _BF16[x.dtype]),)
    launches = [
        make_launch("encode.cu", name, grid, THREADS, arguments, macros, programmatic=number > 0)
        for number, (name, grid, arguments) in enumerate(calls)
    ]
    (launch.run if run is None else run)(launches, x.device, KERNELS)


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _functions(weights: Sequence[Tensor]) -> Functions:
    r, w1 = weights[:2]
    return Functions(*(x.data_ptr() for x in weights), r.shape[1], w1.shape[2], r.shape[2])


def _described(digits: Sequence[Tensor], bits: int) -> Digits:
    places = [x.data_ptr() for x in digits] or [None] * 3
    return Digits(*places, len(digits[0]) if digits else 0, bits)


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
        hashcore.planes(numbers, planes)  # says what is wrong
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
"""Both as operators, so that they can be traced, counted and captured."""
