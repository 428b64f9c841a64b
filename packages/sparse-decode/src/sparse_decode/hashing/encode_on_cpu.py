"""What the operators of `encode_cuda` compute in host memory, so that a compiled step of the CPU is one graph.

The arithmetic is that of the layers in torch, or of `sparse_decode.hashing.encode`: the bits are the same.
"""

from collections.abc import Sequence

import hashcore
from torch import Tensor
from torch.nn import functional as F

from sparse_decode.hashing import encode

Tensors = Sequence[Tensor]


def hash_keys(x: Tensor, weights: Tensors, digits: Tensors, codes: Tensor, at: Tensor | None) -> None:
    if len(weights) == 5:
        found = encode.hash_tokens(*_arrays(weights, digits), x, 1, 0)[0][..., 0, :]
    else:
        found = hashcore.pack(_numbers(x, weights))
    (heads, width), (had, words) = (codes.shape[1], codes.shape[3]), (found.shape[1], found.shape[3])
    found = _joined(found, width // words).repeat_interleave(heads * width // (had * words), 1)
    begin = 0 if at is None else int(at)
    codes[:, :, begin : begin + x.shape[2]] = found


def hash_queries(x: Tensor, weights: Tensors, digits: Tensors, *how: int) -> Tensor:
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


def hash_step(
    k: Tensor, of_keys: Tensors, q: Tensor, of_queries: Tensors, digits: Tensors, codes: Tensor, *how: int
) -> Tensor:
    hash_keys(k, of_keys, digits, codes, None)
    return hash_queries(q, of_queries, digits, *how)


def _numbers(x: Tensor, weights: Tensors) -> Tensor:
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


def _arrays(weights: Tensors, digits: Tensors) -> tuple[encode.Weights, encode.Digits]:
    if not digits:
        return tuple(x.numpy() for x in weights), encode.NO_DIGITS
    coordinate, power, limit = digits
    return tuple(x.numpy() for x in weights), (coordinate.int().numpy(), power.numpy(), limit.numpy())
