"""The `planes` and `transform` hash functions of a few tokens on CUDA: one launch for keys, two for queries.

The kernels are those of kernels/encode.cu; what they compute is what `sparse_decode.encode` does on the CPU.
"""

from __future__ import annotations

import ctypes
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
    found = [getattr(functions, name) for name in NAMES]
    return [x.detach() if x.requires_grad else x for x in found]  # a view costs more than a launch's arguments


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
    x, device = x.contiguous(), x.device
    form = *_form(x, weights, digits, device), codes.size(3), codes.stride()
    call = _keys.found.get(form)
    if call is None:
        call = _keys.keep(form, _prepare_keys(x, weights, digits, codes))
    to = call.codes
    call.x.value, to.words, to.at = x.data_ptr(), codes.data_ptr(), None if at is None else at.data_ptr()
    _place(call.functions, call.digits, weights, digits)
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
    x, device = x.contiguous(), x.device
    form = *_form(x, weights, digits, device), bits, group, planes
    call = _queries.found.get(form)
    if call is None:
        call = _queries.keep(form, _prepare_queries(x, weights, digits, bits, group, planes))
    found = x.new_empty(*call.shape, dtype=torch.int32)
    memory = scratch(call.words, device)
    call.x.value, call.found.value = x.data_ptr(), found.data_ptr()
    call.numbers.value = memory.address + 4 * SAMPLES
    _place(call.functions, call.digits, weights, digits)
    (launch.run if run is None else run)(call.launches, device, KERNELS)
    return found


class _Keys(NamedTuple):
    """Hashing keys, prepared: what changes from call to call is written into these arguments of its launch."""

    x: ctypes.c_void_p
    codes: Codes
    functions: Functions
    digits: Digits
    launches: Kept


class _Queries(NamedTuple):
    """Hashing queries, prepared; words: scratch memory, with the searches'; shape: of the planes."""

    x: ctypes.c_void_p
    numbers: ctypes.c_void_p
    found: ctypes.c_void_p
    functions: Functions
    digits: Digits
    words: int
    shape: tuple[int, ...]
    launches: Kept


_keys: Table[_Keys] = Table()
_queries: Table[_Queries] = Table()


def _form(x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], device: torch.device) -> tuple[Any, ...]:
    """Return what the launches depend on; x, weights and digits have no gaps."""
    return x.shape, x.dtype, device, weights[3].shape, digits[0].size(0) if digits else 0


def _prepare_keys(x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], codes: Tensor) -> _Keys:
    batch, heads, tokens, _ = x.shape
    to, functions = Codes(None, *codes.stride()[:3]), _functions(weights)
    described, at = _digits_of(digits, 32 * codes.shape[3]), ctypes.c_void_p()
    arguments = at, to, functions, described, ctypes.c_int32(tokens)
    step = make_launch("encode.cu", "hash_keys", (batch * tokens, heads), THREADS, arguments, _macros(x))
    return _Keys(at, to, functions, described, Kept([step]))


def _prepare_queries(
    x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], bits: int, group: int, planes: int
) -> _Queries:
    (batch, heads, tokens, _), out = x.shape, weights[0].shape[2]
    at, numbers, found = (ctypes.c_void_p() for _ in range(3))
    functions, described, count = _functions(weights), _digits_of(digits, bits), ctypes.c_int32(tokens)
    sizes = ctypes.c_int32(out), ctypes.c_int32(group), count, ctypes.c_int32(planes)
    first, second = (at, numbers, functions, count), (numbers, found, described, *sizes)
    grids, macros = ((batch * tokens, heads), (batch * tokens, heads // group)), _macros(x)
    launches = Kept(
        [
            make_launch("encode.cu", "apply", grids[0], THREADS, first, macros),
            make_launch("encode.cu", "weigh", grids[1], THREADS, second, macros, programmatic=True),
        ]
    )
    words, shape = SAMPLES + batch * heads * tokens * out, (batch, heads // group, tokens, planes, bits // 32)
    return _Queries(at, numbers, found, functions, described, words, shape, launches)


def _macros(x: Tensor) -> tuple[tuple[str, str]]:
    return (("SPARSE_BF16", _BF16[x.dtype]),)


def _functions(weights: Sequence[Tensor]) -> Functions:
    r, w1 = weights[:2]
    return Functions(*(None,) * 5, r.shape[1], w1.shape[2], r.shape[2])


def _digits_of(digits: Sequence[Tensor], bits: int) -> Digits:
    return Digits(None, None, None, len(digits[0]) if digits else 0, bits)


_address = Tensor.data_ptr


def _place(functions: Functions, described: Digits, weights: Sequence[Tensor], digits: Sequence[Tensor]) -> None:
    """Write where a layer's tensors lie; without digits, their addresses stay null."""
    at = map(_address, weights)
    functions.r, functions.w1, functions.b1, functions.w2, functions.b2 = at
    if digits:
        described.coordinate, described.power, described.limit = map(_address, digits)


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
