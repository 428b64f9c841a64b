"""The `planes` and `transform` hash functions for a few tokens on the CPU, reading each weight once for all tokens.

A decode step hashes one key per KV head and one query per query head, so its time is that of reading the weights: 5.5
MB for 28 query heads of 128 components. torch would need three batched products, and further calls to pack.

    key     f(x) = x R + SiLU(x W1 + b1) W2 + b2,    code = signs of f                            (eq. 1)
    query   w = sum of f_g(q_g) over the group,      planes = binary digits of w's levels         (eq. 5)

`transform` has fewer coordinates than bits: the bits are digits of the coordinates' levels (eq. 19).

One task is one output head. Sums run in the order of the weights' rows for any number of threads, sequences and tokens,
so a token's code does not depend on the tokens that are hashed with it.
"""

# numba is untyped.
# pyright: reportCallIssue=false

from typing import NamedTuple, cast

import numpy as np
import torch
from hashcore.cpu.parts import copy, inner
from hashtrain.layers import LayerHasher
from hashtrain.layers.planes import Planes
from hashtrain.layers.transform import Transform
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sparse_decode.cpu.kernel_threads import run
from sparse_decode.cpu.lanes import prefetch

MAX_TOKENS = 16
"""Maximal number of tokens in all batch rows together; above, a matrix product per head is faster."""
TINY, HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
NAMES = ("r", "w1", "b1", "w2", "b2")

Weights = tuple[NDArray[np.float32], ...]
Digits = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]
"""Of `transform`: coordinate and power of every bit, and limits, per KV head."""
NO_DIGITS: Digits = (np.empty((0, 0), np.int32), np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))


class Views(NamedTuple):
    """The hash functions of a `planes` or `transform` layer in host memory, as arrays of the same memory."""

    key: Weights
    query: Weights
    digits: Digits
    group: int
    """Query heads per KV head."""
    planes: int


def views_of(layer: LayerHasher) -> Views | None:
    """Return a layer's arrays; None if the CPU's kernel does not support the layer."""
    if type(layer) not in (Planes, Transform) or layer.remainder.dtype != torch.float32:
        return None
    own = cast(Planes | Transform, layer)
    if layer.remainder.device.type != "cpu" or isinstance(layer.remainder, FakeTensor):
        return None
    of_keys, of_queries = (
        tuple(getattr(side, name).detach().numpy() for name in NAMES) for side in (own.key, own.query)
    )
    digits = NO_DIGITS
    if isinstance(own, Transform):
        digits = own.coordinate.int().numpy(), own.power.numpy(), own.limit.numpy()
    return Views(of_keys, of_queries, digits, own.group, own.planes)


def supports(x: Tensor) -> bool:
    """Whether the CPU's kernel hashes tokens x [B, H, T, D]: only few."""
    return x.device.type == "cpu" and 0 < x.shape[0] * x.shape[2] <= MAX_TOKENS


def hash_keys(own: Views, k: Tensor) -> Tensor:
    """Hash keys [B, Hkv, T, D] to int32 codes [B, Hkv, T, W]: `layer.encode_keys`."""
    return hash_tokens(own.key, own.digits, k, 1, 0)[..., 0, :]


def hash_queries(own: Views, q: Tensor, per_query_head: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Hash queries [B, Hq, T, D] to planes [B, H, T, P, W] and their weights: `layer.encode_queries`."""
    words = hash_tokens(own.query, own.digits, q, 1 if per_query_head else own.group, own.planes)
    return words, tuple(1 << p for p in range(own.planes))


def hash_tokens(weights: Weights, digits: Digits, x: Tensor, group: int, planes: int) -> Tensor:
    """Return words [B, H, T, max(P, 1), W]."""
    r, w1, _, w2, _ = weights
    batch, heads, tokens, _ = x.shape
    shape, bits = (batch, heads // group, tokens), digits[0].shape[1] or r.shape[2]
    numbers = np.empty((*shape, bits), np.float32)
    words = np.empty((*shape, max(planes, 1), bits // 32), np.int32)
    given = x.detach().float().contiguous().numpy()
    work = batch * tokens * (r.size + w1.size + w2.size)
    run(_tasks, shape[1], work, given, *weights, *digits, group, planes, numbers, words)
    return torch.from_numpy(words)


# fastmath without reassoc: these loops vectorise across bits, each of which has its own sum, in program order.
@inner(fastmath={"contract", "nsz"})
def _add_product(x, rows, out):  # pragma: no cover - compiled
    """Add x @ rows to out; eight rows at a time, so that out is read and written an eighth as often."""
    line, width, whole = rows.reshape(rows.size), rows.shape[1], len(x) // 8 * 8
    for i in range(0, whole, 8):
        for j in range((i + 16) * width, (i + 24) * width, 16):  # hardware prefetchers stop at page ends
            prefetch(line, j)
        x0, x1, x2, x3, x4, x5, x6, x7 = x[i], x[i + 1], x[i + 2], x[i + 3], x[i + 4], x[i + 5], x[i + 6], x[i + 7]
        r0, r1, r2, r3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        r4, r5, r6, r7 = rows[i + 4], rows[i + 5], rows[i + 6], rows[i + 7]
        for j in range(len(out)):
            near = out[j] + x0 * r0[j] + x1 * r1[j] + x2 * r2[j] + x3 * r3[j]
            out[j] = near + x4 * r4[j] + x5 * r5[j] + x6 * r6[j] + x7 * r7[j]
    for i in range(whole, len(x)):
        xi, row = x[i], rows[i]
        for j in range(len(out)):
            out[j] += xi * row[j]


@inner
def _silu(x):  # pragma: no cover - compiled
    for j in range(len(x)):
        x[j] /= np.float32(1) + np.exp(-x[j])


@inner
def _pack(x, threshold, words):  # pragma: no cover - compiled
    """Pack the bits [number > threshold], 32 per word."""
    for w in range(len(words)):
        word = np.uint32(0)
        for bit in range(32):
            word |= np.uint32(x[32 * w + bit] > threshold) << np.uint32(bit)
        words[w] = np.int32(word)


@inner
def _quantise(x, planes, levels, words):  # pragma: no cover - compiled
    """Write the planes of eq. 5 with the operations of `hashcore.planes`, also of numbers that are not finite."""
    top, peak = np.float32(2**planes - 1), np.float32(0)
    clip = np.float32(0.8) if planes < 6 else np.float32(1)
    for j in range(len(x)):
        size = abs(x[j])
        if size > peak:  # not of NaN
            peak = min(size, HUGE)
    scale = max(np.float32(clip * peak / top), TINY)
    for j in range(len(x)):
        level = np.float32(-1)
        if not np.isnan(x[j]):
            level = np.floor(min(max(x[j], -HUGE), HUGE) / scale * np.float32(0.5)) * np.float32(2) + np.float32(1)
            level = min(max(level, -top), top)
        levels[j] = (np.int32(level) + np.int32(top)) >> 1
    for p in range(planes):
        for w in range(words.shape[1]):
            word = np.uint32(0)
            for bit in range(32):
                word |= np.uint32((levels[32 * w + bit] >> p) & 1) << np.uint32(bit)
            words[p, w] = np.int32(word)


@inner
def _weigh(x, coordinate, power, out):  # pragma: no cover - compiled
    """Write a query's weight of every bit: the coordinate's weight times the power of the digit."""
    for j in range(len(out)):
        out[j] = x[coordinate[j]] * power[j]


@inner
def _digits(x, coordinate, power, limit, out):  # pragma: no cover - compiled
    """Write the binary digits of a key's levels (eq. 19) as 1 and -1, as `hashtrain.layers.surrogate` does."""
    for j in range(len(out)):
        i = coordinate[j]
        level = -limit[i]
        if not np.isnan(x[i]):
            level = min(max(np.float32(2) * np.floor(x[i] * np.float32(0.5)) + np.float32(1), level), limit[i])
        digit = (np.int32(level + limit[i]) >> 1) // np.int32(power[j]) & 1
        out[j] = np.float32(2 * digit - 1)


@inner
def _hash_head(
    head, x, r, w1, b1, w2, b2, coordinate, power, limit, group, planes, numbers, words
):  # pragma: no cover - compiled
    """Hash the tokens of one output head."""
    hidden = np.empty(w1.shape[2], np.float32)
    levels = np.empty(numbers.shape[3], np.int32)
    spread = coordinate.shape[1] > 0
    sums = np.zeros((x.shape[0], x.shape[2], r.shape[2]), np.float32)
    for g in range(group * head, group * (head + 1)):
        for b in range(x.shape[0]):
            for t in range(x.shape[2]):
                out = sums[b, t]
                copy(b1[g, 0], hidden)
                _add_product(x[b, g, t], w1[g], hidden)
                _silu(hidden)
                _add_product(x[b, g, t], r[g], out)
                _add_product(hidden, w2[g], out)
                for j in range(len(out)):
                    out[j] += b2[g, 0, j]
    for b in range(x.shape[0]):
        for t in range(x.shape[2]):
            kv = head * coordinate.shape[0] // numbers.shape[1]  # the KV head, if codes are per query head
            if not spread:
                copy(sums[b, t], numbers[b, head, t])
            elif planes:
                _weigh(sums[b, t], coordinate[kv], power[kv], numbers[b, head, t])
            else:
                _digits(sums[b, t], coordinate[kv], power[kv], limit[kv], numbers[b, head, t])
            if planes:
                _quantise(numbers[b, head, t], planes, levels, words[b, head, t])
            else:
                _pack(numbers[b, head, t], np.float32(0), words[b, head, t, 0])


def _tasks(  # pragma: no cover - compiled
    first, last, x, r, w1, b1, w2, b2, coordinate, power, limit, group, planes, numbers, words
):
    for head in range(first, last):
        _hash_head(head, x, r, w1, b1, w2, b2, coordinate, power, limit, group, planes, numbers, words)
