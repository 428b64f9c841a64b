"""The hash functions of our variants for a few tokens on CUDA: one launch, of keys and queries together in a step.

The kernel, kernels/encode.cu, computes the same as the layers in torch and `sparse_decode.encode` on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import hashcore
import torch
from hashcore.quantiser import group_weights
from hashtrain.layers import LayerHasher
from hashtrain.layers.paper import Paper
from hashtrain.layers.planes import Planes
from hashtrain.layers.rotations import Linear, Lsh
from hashtrain.layers.transform import Transform
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from sparse_decode import encode, encode_launches
from sparse_decode.encode_launches import MATRICES, MAX_TOKENS, MOST, MOST_GROUPS, NAMES, How

_DTYPES = torch.bfloat16, torch.float16
_VARIANTS = Planes, Transform, Lsh, Linear, Paper


class Placed(NamedTuple):
    """What the operators need of a layer whose tensors stay where they are.

    Attributes:
        key, query: weights of the functions of keys and of queries; digits: those of `transform`.
        hows: how planes come from them, per KV head and per query head; fits: whether the kernel supports them.
    """

    key: list[Tensor]
    query: list[Tensor]
    digits: list[Tensor]
    hows: tuple[How, How]
    fits: bool


_placed: dict[int, Placed] = {}


def place(layer: LayerHasher, original: LayerHasher | None = None) -> None:
    """Cache the addresses of a layer's tensors from now on; the tensors must never be replaced.

    Args:
        original: the layer in host memory that it is a copy of. If all matrices are float16 numbers, the kernel reads
            them as such, half the bytes, and computes the same.
    """
    if type(layer) not in _VARIANTS:
        return
    known = _described(layer)
    if original is not None and _is_narrow(original):
        known = known._replace(key=_narrowed(known.key), query=_narrowed(known.query))
    _placed[id(layer)] = known
    weakref.finalize(layer, _forget, id(layer), id(known.key[0]), id(known.query[0]))
    if not isinstance(known.key[0], FakeTensor):
        for weights in known[:2]:
            encode_launches.sides[id(weights[0])] = encode_launches.describe(weights, known.digits)


def _forget(layer: int, *sides: int) -> None:
    for side in sides:
        encode_launches.sides.pop(side, None)
    del _placed[layer]


def _is_narrow(layer: LayerHasher) -> bool:
    """Whether all matrices of a layer in host memory are float16 numbers; False for fake ones."""
    found = [x for weights in (key_weights(layer), query_weights(layer)) for x in _matrices(weights)]
    if any(isinstance(x, FakeTensor) or x.device.type != "cpu" for x in found):
        return False
    rounded = [x.half().float() for x in found]
    if any(isinstance(x, FakeTensor) for x in rounded):  # in a mode that makes all results fake
        return False
    return all(map(torch.equal, found, rounded))


def _matrices(weights: Sequence[Tensor]) -> list[Tensor]:
    return [x for name, x in zip(NAMES[len(weights)], weights, strict=True) if name in MATRICES]


def _narrowed(weights: Sequence[Tensor]) -> list[Tensor]:
    return [x.half() if name in MATRICES else x for name, x in zip(NAMES[len(weights)], weights, strict=True)]


def supports(layer: LayerHasher, x: Tensor) -> bool:
    """Whether the CUDA kernel supports tokens x [B, H, T, D] of a layer: few tokens, 16 bits."""
    return x.device.type == "cuda" and x.dtype in _DTYPES and fits(layer, x)


def fits(layer: LayerHasher, x: Tensor) -> bool:
    """Whether the operators below support tokens x [B, H, T, D] of a layer, apart from their dtype and device."""
    known = _placed.get(id(layer))
    return 0 < x.shape[0] * x.shape[2] <= MAX_TOKENS and (_fits(layer) if known is None else known.fits)


def _fits(layer: LayerHasher) -> bool:
    if type(layer) not in _VARIANTS or layer.remainder.dtype != torch.float32:
        return False
    hidden = (
        0 if isinstance(layer, Lsh) else (layer if isinstance(layer, Paper) else cast(Planes, layer).key).w1.shape[2]
    )
    return max(layer.d, layer.bits, hidden) <= MOST and layer.hkv <= MOST_GROUPS


def code_shape(layer: LayerHasher, per_query_head: bool) -> tuple[int, int]:
    """Return the heads and int32 words of a key's codes."""
    words = layer.bits // 32
    if per_query_head:
        return layer.hq, words
    return layer.hkv, words * (layer.group if isinstance(layer, Paper) else 1)


def plane_weights(layer: LayerHasher, per_query_head: bool) -> tuple[int, ...]:
    """Return the weights of a query's planes."""
    how = hows(layer)[per_query_head]
    return tuple(1 << p for p in range(how.planes)) or group_weights(how.group)


def write_keys(layer: LayerHasher, k: Tensor, codes: Tensor, at: Tensor | None, first: Tensor | None = None) -> None:
    """Hash keys [B, Hkv, T, D] into codes int32 [B, H, N, W], from token `at` on; None: into all of them.

    H and W: `code_shape`, which also tells whether codes are per query head.

    Args: first: for a copy of the codes' first words, int32 [B, H, N], or None.
    """
    known = _described(layer)
    OPERATORS.hash_keys(k, known.key, known.digits, codes, at, first)


def queries(layer: LayerHasher, q: Tensor, per_query_head: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Hash queries [B, Hq, T, D] to planes [B, H, T, P, W] and their weights: `layer.encode_queries`, without a check.

    A check would make the host wait. NaN weights have level -1; infinite ones count as the largest float32.
    """
    known = _described(layer)
    found = OPERATORS.hash_queries(q, known.query, known.digits, *known.hows[per_query_head])
    return found, plane_weights(layer, per_query_head)


def step(
    layer: LayerHasher, k: Tensor, codes: Tensor, q: Tensor, per_query_head: bool
) -> tuple[Tensor, tuple[int, ...]]:
    """Do both at once: keys [B, Hkv, T, D] into all of `codes`, queries [B, Hq, T, D] to planes and their weights."""
    known = _described(layer)
    how = known.hows[per_query_head]
    found = OPERATORS.hash_step(k, known.key, q, known.query, known.digits, codes, *how)
    return found, plane_weights(layer, per_query_head)


def _described(layer: LayerHasher) -> Placed:
    known = _placed.get(id(layer))
    if known is not None:
        return known
    return Placed(key_weights(layer), query_weights(layer), digits_of(layer), hows(layer), _fits(layer))


def hows(layer: LayerHasher) -> tuple[How, How]:
    """Return how planes come from a layer's functions, per KV head and per query head."""
    planes = getattr(layer, "planes", 0)
    together = How(layer.bits, 1, 0, layer.group) if isinstance(layer, Paper) else How(layer.bits, layer.group, planes)
    return together, How(layer.bits, 1, planes)


def key_weights(layer: LayerHasher) -> list[Tensor]:
    """Return the weights of the functions of keys, as `encode_launches.NAMES` has them."""
    return _weights(layer, "key")


def query_weights(layer: LayerHasher) -> list[Tensor]:
    """Return the weights of the functions of queries."""
    return _weights(layer, "query")


def _weights(layer: LayerHasher, side: str) -> list[Tensor]:
    if isinstance(layer, Lsh):
        found = [layer.rotation]
    else:
        owner: nn.Module = layer if isinstance(layer, Paper) else getattr(layer, side)
        names = NAMES[3 + layer.residual] if isinstance(layer, Paper) else NAMES[5]
        found = [getattr(owner, name) for name in names]
    return [x.detach() if x.requires_grad else x for x in found]  # avoid views, which are slow


def digits_of(layer: LayerHasher) -> list[Tensor]:
    """Return coordinate, power and limit of `transform`; nothing for other variants."""
    return list(layer.layout()) if isinstance(layer, Transform) else []


def _hash_queries(x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], *how: int) -> Tensor:
    return encode_launches.hash_queries(x, weights, digits, How(*how))


def _hash_step(
    k: Tensor,
    key_weights: Sequence[Tensor],
    q: Tensor,
    query_weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    codes: Tensor,
    *how: int,
) -> Tensor:
    return encode_launches.hash_step(k, key_weights, q, query_weights, digits, codes, How(*how))


def _fake_queries(x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], *how: int) -> Tensor:
    return x.new_empty(How(*how).shape(x), dtype=torch.int32)


def _fake_step(
    k: Tensor,
    key_weights: Sequence[Tensor],
    q: Tensor,
    query_weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    codes: Tensor,
    *how: int,
) -> Tensor:
    return _fake_queries(q, query_weights, digits, *how)


def _keys_on_cpu(
    x: Tensor,
    weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    codes: Tensor,
    at: Tensor | None,
    first: Tensor | None = None,
) -> None:
    if len(weights) == 5:
        found = encode.hash_tokens(*_arrays(weights, digits), x, 1, 0)[0][..., 0, :]
    else:
        found = hashcore.pack(_numbers(x, weights))
    (heads, width), (had, words) = (codes.shape[1], codes.shape[3]), (found.shape[1], found.shape[3])
    found = _joined(found, width // words).repeat_interleave(heads * width // (had * words), 1)
    begin = 0 if at is None else int(at)
    tokens = slice(begin, begin + x.shape[2])
    codes[:, :, tokens] = found
    if first is not None:
        first[:, :, tokens] = found[..., 0]


def _queries_on_cpu(x: Tensor, weights: Sequence[Tensor], digits: Sequence[Tensor], *how: int) -> Tensor:
    _, group, planes, join = how
    if not planes:
        codes = hashcore.pack(_numbers(x, weights))
        if group == 1:
            return _joined(codes, join)[..., None, :]
        return hashcore.group_planes(codes.unflatten(1, (-1, group)).transpose(2, 3))[0]
    words, numbers = encode.hash_tokens(*_arrays(weights, digits), x, group, planes)
    if not words.numel():
        hashcore.planes(numbers, planes)  # raises the error
    return words


def _step_on_cpu(
    k: Tensor,
    key_weights: Sequence[Tensor],
    q: Tensor,
    query_weights: Sequence[Tensor],
    digits: Sequence[Tensor],
    codes: Tensor,
    *how: int,
) -> Tensor:
    _keys_on_cpu(k, key_weights, digits, codes, None)
    return _queries_on_cpu(q, query_weights, digits, *how)


def _numbers(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Apply `lsh` or `paper` to x [B, H, T, D] as its layer does, so that the bits are the same: [B, H or F, T, C]."""
    x, heads = x.float(), len(weights[0])
    if len(weights) == 1:
        if x.shape[1] == heads:
            return x @ weights[0]
        return (x.unflatten(1, (heads, -1)) @ weights[0][:, None]).flatten(1, 2)
    (w1, b1, w2), b2 = weights[:3], weights[3] if len(weights) == 4 else None
    x = x.repeat_interleave(heads // x.shape[1], 1)
    h = F.silu(x @ w1 + b1)
    if b2 is None:
        return h @ w2
    h = h + x if h.shape == x.shape else h
    y = h @ w2 + b2
    return y + h if y.shape == h.shape else y


def _joined(codes: Tensor, join: int) -> Tensor:
    """Put the codes [B, H, T, W] of `join` adjacent heads side by side: [B, H / join, T, join W]."""
    return codes if join == 1 else codes.unflatten(1, (-1, join)).transpose(2, 3).flatten(-2)


def _arrays(weights: Sequence[Tensor], digits: Sequence[Tensor]) -> tuple[encode.Weights, encode.Digits]:
    if not digits:
        return tuple(x.numpy() for x in weights), encode.NO_DIGITS
    coordinate, power, limit = digits
    return tuple(x.numpy() for x in weights), (coordinate.int().numpy(), power.numpy(), limit.numpy())


LIBRARY = torch.library.Library("sparse_decode", "FRAGMENT")
_HOW = "int bits, int group, int planes, int join"
_OPERATORS = {
    "hash_keys(Tensor x, Tensor[] weights, Tensor[] digits, Tensor(a!) codes, Tensor? at, Tensor(b!)? first=None) "
    "-> ()": (*(encode_launches.hash_keys, _keys_on_cpu, lambda *_: None),),
    f"hash_queries(Tensor x, Tensor[] weights, Tensor[] digits, {_HOW}) -> Tensor": (
        *(_hash_queries, _queries_on_cpu, _fake_queries),
    ),
    "hash_step(Tensor k, Tensor[] key_weights, Tensor q, Tensor[] query_weights, Tensor[] digits, "
    f"Tensor(a!) codes, {_HOW}) -> Tensor": (_hash_step, _step_on_cpu, _fake_step),
}
for _schema, (_cuda, _cpu, _fake) in _OPERATORS.items():
    _name = LIBRARY.define(_schema)
    LIBRARY.impl(_name, _cuda, "CUDA")
    LIBRARY.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"sparse_decode::{_name}", _fake, lib=LIBRARY)
OPERATORS: Any = torch.ops.sparse_decode
"""All three as torch operators, which can be traced, counted and captured."""
