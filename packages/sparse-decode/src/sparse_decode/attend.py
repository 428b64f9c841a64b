"""Softmax attention over selected tokens only.

For query head h of a batch row, with S the tokens selected for it (eq. 8):

    l_j = scaling q_h . k_j,  or c tanh(scaling q_h . k_j / c) with soft-capping at c
    out_h = sum_{j in S} exp(l_j) v_j / (exp(s_h) + sum_{j in S} exp(l_j)),  exp(s_h) only with a learned sink s_h

    q [B, Hq, Q, D]   k, v [B, Hkv, N, D]   indices [B, H, Q, K], H = Hkv or Hq, -1 unused   out [B, Q, Hq, D]

One task is one (batch row, index set, query row): it reads each selected key and value once, widens it to float32 in
cache and uses it for every query head of the set. Keys and values are addressed by stride: nothing of length N is ever
copied, converted or written. Bytes read per task: |S| (D + Dv) elements, at random rows of 2 D or 4 D bytes.
What the selection leaves out (eq. 15, 16) is added in the same task.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import numba
import numpy as np
import torch
from torch import Tensor

from sparse_decode.compiled import run
from sparse_decode.intrinsics import pointer, prefetch
from sparse_decode.remainder import with_remainder

INTRINSICS = "1efc3312c11c735c"  # the digest of intrinsics.py: the compiler's cache looks at a kernel's own file only
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TILE = 4
"""Tokens whose dot products run side by side."""
AHEAD = 8
"""Tokens whose rows are on their way from memory: rows of a selection lie far apart, and no processor guesses them."""
LEAST = np.float32(-127 * math.log(2))
"""Its exponential has the exponent bits of 0."""
_LIKE = {4: np.empty(0, np.uint32), 2: np.empty(0, np.uint16)}
_NOTHING = np.empty((0, 5), np.float32), np.empty((0, 0, 0, 0), np.float32), np.empty((0, 0), np.int64)


class LeftOut(NamedTuple):
    """What is known of the tokens that a selection leaves out (eq. 15)."""

    coefficients: Tensor
    """float32 [Hq, 5]: `LayerHasher.remainder`."""
    mean_keys: Tensor
    """Mean of the keys that each row sees, float32 [B, Hkv, Q, D]."""
    mean_values: Tensor
    """Mean of the values that each row sees, float32 [B, Hkv, Q, Dv]."""
    visible: Tensor
    """Tokens that each row sees, int64 [B, Q]."""


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    left_out: LeftOut | None = None,
    facts: Literal[False] = False,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    left_out: LeftOut | None = None,
    facts: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    left_out: LeftOut | None = None,
    facts: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to the selected tokens only.

    Args:
        q: [B, Hq, Q, D]; k: [B, Hkv, N, D]; v: [B, Hkv, N, Dv]; float32, bfloat16 or float16 of one type, on the CPU
            or, for 16-bit types and up to 16 query heads an index set, on CUDA (kernels/gather.cu).
        indices: int64 [B, H, Q, K], H = Hkv or Hq; -1 in unused slots, anywhere.
        scaling: factor on the logits, usually D^-0.5.
        softcap: bound on the logits' size (Gemma 2), above 0; None leaves them as they are.
        sinks: one learned logit per query head [Hq], which takes its share of the softmax and has no value (gpt-oss).
        left_out: add what the selection leaves out, as one token (eq. 16); None leaves it out.
        facts: return what the remainder needs, too (eq. 15).
    Returns: [B, Q, Hq, Dv] in q's type; zeros for rows without a selected token. Sums are float32. With facts also
        float32 [2, B, Q, Hq]: mean and log sum exp of the selected logits, 0 and -inf for rows without one; a sink is
        part of the second.
    Raises: ValueError on other shapes, types or devices, and on an index beyond N; on CUDA, where its value cannot be
        read without waiting, such an index counts as unused.
    Source: docs/algorithm.md, eq. 8.
    """
    _check(q, k, v, indices, softcap, sinks, left_out)
    if k.is_cuda:
        result, logits = _on_device(q, k, v, indices, scaling, softcap, sinks, left_out)
    else:
        result, logits, _ = on_host(q, k, v, indices, scaling, softcap, sinks, left_out)
    if q.requires_grad:
        result = _NoBackward.apply(result, q)  # pyright: ignore[reportAssignmentType]
    return (result, logits) if facts else result  # pyright: ignore[reportReturnType]


def _on_device(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    left_out: LeftOut | None,
) -> tuple[Tensor, Tensor]:
    from sparse_decode import gather

    gather.check(q, k, v, indices)
    out, facts = gather.attend(q.detach(), k.detach(), v.detach(), indices, scaling, softcap, sinks)
    if left_out is None:
        return out, facts
    coefficients, *means, visible = left_out
    used = (indices >= 0).sum(-1).repeat_interleave(q.shape[1] // indices.shape[1], 1).transpose(1, 2)
    return with_remainder(out, facts, q, (means[0], means[1]), coefficients, visible, used, scaling), facts


def on_host(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    left_out: LeftOut | None,
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Attend on the CPU to arguments that agree: the result, the facts, and tokens used, int64 [B, H, Q].

    Raises: ValueError on an index beyond N; no memory there is read.
    """
    batch, hq, n_rows, dim = q.shape
    sets = indices.shape[1]
    out = np.zeros((batch, n_rows, hq, v.shape[3]), dtype=np.float32)
    logits = np.zeros((2, batch, n_rows, hq), dtype=np.float32)
    logits[1] = -np.inf
    used = np.zeros((batch, sets, n_rows), dtype=np.int64)
    if indices.numel() and out.size:
        tasks = batch * sets * n_rows
        work = tasks * indices.shape[3] * (hq // sets) * (dim + v.shape[3])
        chosen = indices.contiguous().numpy()
        sink = np.full(hq, -np.inf, np.float32) if sinks is None else _floats(sinks)
        factors, kind = (np.float32(scaling), np.float32(softcap or 0)), _KINDS[k.dtype]
        rest = _rest(left_out)
        where = *_place(k), *_place(v), _LIKE[k.element_size()]
        run(_tasks, tasks, work, _floats(q), *where, chosen, out, logits, used, *factors, sink, kind, *rest)
        if used.min() < 0:
            raise ValueError(f"indices must be below N = {k.shape[2]}, got {int(indices.max())}")
    result = torch.from_numpy(out)
    return result if q.dtype == torch.float32 else result.to(q.dtype), torch.from_numpy(logits), used


def _rest(left_out: LeftOut | None) -> tuple[np.ndarray, ...]:
    """Return arrays of what is left out, empty ones of nothing."""
    if left_out is None:
        coefficients, means, visible = _NOTHING
        return coefficients, means, means, visible
    coefficients, keys, values, visible = left_out
    return _floats(coefficients), _floats(keys), _floats(values), visible.contiguous().numpy()


def _floats(x: Tensor) -> np.ndarray:
    """View, or copy, as contiguous float32."""
    return x.detach().float().contiguous().numpy()


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Do what `attend` does, in torch and in the simplest way: the oracle of the tests."""
    hq, hkv = q.shape[1], k.shape[1]
    wanted = indices.repeat_interleave(hq // indices.shape[1], 1)  # [B, Hq, Q, K]
    batch = torch.arange(q.shape[0])[:, None, None, None]
    head = (torch.arange(hq) // (hq // hkv))[:, None, None]
    dead = wanted < 0
    keys = k[batch, head, wanted.clamp(min=0)].float().masked_fill(dead[..., None], 0)
    values = v[batch, head, wanted.clamp(min=0)].float().masked_fill(dead[..., None], 0)
    logits = (q.float()[..., None, :] * keys).sum(-1).mul(scaling)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(dead, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    p = logits.softmax(-1)[..., : dead.shape[-1]].masked_fill(dead, 0)
    return (p[..., None] * values).sum(-2).transpose(1, 2).to(q.dtype)


class _NoBackward(torch.autograd.Function):
    """Let a forward pass run without `no_grad`, and stop a backward pass instead of dropping its gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor) -> Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("sparse attention has no backward pass; detach the model to train it")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
    left_out: LeftOut | None,
) -> None:
    devices = {x.device for x in (q, k, v, indices, *([] if sinks is None else [sinks]), *(left_out or []))}
    if len(devices) > 1 or k.device.type not in ("cpu", "cuda"):
        got = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"sparse attention runs on the CPU or on one CUDA device, got tensors on {got}; move the model"
        )
    if k.dtype not in _KINDS or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must all be float32, bfloat16 or float16, got {q.dtype}, {k.dtype} and {v.dtype}")
    hq, hkv, sets = q.shape[1], k.shape[1], indices.shape[1]
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or hq % hkv:
        raise ValueError(
            f"q [B, Hq, Q, D], k [B, Hkv, N, D] and v [B, Hkv, N, Dv] must agree, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if indices.dtype != torch.int64 or sets not in (hkv, hq) or indices.shape[::2] != q.shape[::2]:
        raise ValueError(
            f"indices must be int64 [B, Hkv or Hq, Q, K], got {indices.dtype} {tuple(indices.shape)} "
            f"for q {tuple(q.shape)}"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0 or None, got {softcap}")
    if sinks is not None and sinks.shape != (hq,):
        raise ValueError(f"sinks must be one logit per query head, shape ({hq},), got {tuple(sinks.shape)}")
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("the components of each key and value must lie side by side (stride 1); call .contiguous()")
    if left_out is not None:
        _check_left_out(q, v, hkv, left_out)


def _check_left_out(q: Tensor, v: Tensor, hkv: int, left_out: LeftOut) -> None:
    batch, hq, n_rows, dim = q.shape
    wanted = (hq, 5), (batch, hkv, n_rows, dim), (batch, hkv, n_rows, v.shape[3]), (batch, n_rows)
    if (got := tuple(tuple(x.shape) for x in left_out)) != wanted or left_out.visible.dtype != torch.int64:
        raise ValueError(
            "what is left out must be [Hq, 5], [B, Hkv, Q, D], [B, Hkv, Q, Dv] and int64 [B, Q], expected shapes "
            f"{wanted}, got {got} and {left_out.visible.dtype}"
        )


def _place(x: Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Say where [B, Hkv, N, D] lies: its address, the numbers from its first to its last, and how to address them."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), reach, (*x.stride()[:3], x.shape[1], x.shape[2])


@numba.njit(inline="always")
def _widen(row, kind, bits, floats):  # pragma: no cover - compiled
    """Write one row as float32; `bits` and `floats` are the same memory."""
    if kind == 0:
        for i in range(len(row)):
            bits[i] = row[i]
    elif kind == 1:  # bfloat16 is the upper half of a float32
        for i in range(len(row)):
            bits[i] = np.uint32(row[i]) << np.uint32(16)
    else:  # float16: move sign, exponent and mantissa; 2^112 corrects the exponent, subnormals included
        for i in range(len(row)):
            h = np.uint32(row[i])
            bits[i] = ((h & np.uint32(0x8000)) << np.uint32(16)) | ((h & np.uint32(0x7FFF)) << np.uint32(13))
        for i in range(len(row)):
            floats[i] *= np.float32(2.0**112)
        for i in range(len(row)):
            if np.uint32(row[i]) & np.uint32(0x7C00) == np.uint32(0x7C00):  # infinity and NaN
                bits[i] |= np.uint32(0x7F800000)


@numba.njit(inline="always")
def _fetch(line, at, count):  # pragma: no cover - compiled
    """Ask for the cache lines of a row, one for each 64 bytes."""
    step = 64 // line.itemsize
    for i in range(at, at + count, step):
        prefetch(line, i)


@numba.njit(inline="always")
def _read_tile(x, base, stride, tokens, j, count, kind, bits, floats):  # pragma: no cover - compiled
    """Write rows tokens[j : j + TILE] as float32, zeros behind the last; ask for those that come AHEAD tokens later."""
    for t in range(TILE):
        if j + t + AHEAD < len(tokens):
            _fetch(x, base + tokens[j + t + AHEAD] * stride, count)
        if j + t < len(tokens):
            at = base + tokens[j + t] * stride
            _widen(x[at : at + count], kind, bits[t], floats[t])
        else:
            bits[t, :count] = 0


# NaN and infinity keep their meaning: only the order of sums is free, so that they vectorise.
@numba.njit(fastmath={"reassoc", "contract", "nsz"})
def _exp(x, top, out, bits):  # pragma: no cover - compiled
    """Write exp(x - top), x - top <= 0, to a relative error of 2e-7; `out` and `bits` share memory.

    exp(y) = 2^n exp(r), n = round(y / log 2): a polynomial of degree 7 and n added to the exponent. libm takes one
    number at a time, six times as long. NaN stays NaN; what float32 holds only as a subnormal becomes 0.
    """
    for i in range(len(x)):
        y = x[i] - top
        y = LEAST if y < LEAST else y
        n = np.floor(y * np.float32(1.44269504) + np.float32(0.5))
        r = y - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        p = np.float32(1.0 / 5040)
        p = p * r + np.float32(1.0 / 720)
        p = p * r + np.float32(1.0 / 120)
        p = p * r + np.float32(1.0 / 24)
        p = p * r + np.float32(1.0 / 6)
        p = p * r + np.float32(0.5)
        p = p * r + np.float32(1)
        p = p * r + np.float32(1)
        x[i] = p
        bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
    for i in range(len(x)):
        out[i] *= x[i]


@numba.njit(fastmath={"reassoc", "contract", "nsz"})
def _task(
    task, q, k, k_at, v, v_at, indices, out, facts, counts, scaling, softcap, sinks, kind,
    coefficients, mean_keys, mean_values, visible,
):  # pragma: no cover - compiled  # fmt: skip
    sets, n_rows = indices.shape[1:3]
    hq, dim, dim_v = q.shape[1], q.shape[3], out.shape[3]
    heads = hq // sets  # query heads that share this index set
    b, s, r = task // (sets * n_rows), task // n_rows % sets, task % n_rows
    first = s * heads
    kv = first // (hq // k_at[3])
    chosen = indices[b, s, r]
    tokens = chosen[chosen >= 0]
    used = len(tokens)
    if used == 0:
        return
    for j in range(used):
        if tokens[j] >= k_at[4]:
            counts[b, s, r] = -1
            return
    counts[b, s, r] = used
    padded = (used + TILE - 1) // TILE * TILE
    bits = np.empty((TILE, max(dim, dim_v)), dtype=np.uint32)
    floats = bits.view(np.float32)
    logits = np.empty((heads, padded), dtype=np.float32)

    # 1. logits: TILE keys at once, so that a query is read once for all of them
    base = b * k_at[0] + kv * k_at[1]
    for j in range(min(AHEAD, used)):
        _fetch(k, base + tokens[j] * k_at[2], dim)
    for j in range(0, used, TILE):
        _read_tile(k, base, k_at[2], tokens, j, dim, kind, bits, floats)
        k0, k1, k2, k3 = floats[0, :dim], floats[1, :dim], floats[2, :dim], floats[3, :dim]
        for g in range(heads):
            query = q[b, first + g, r]
            x0, x1, x2, x3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(dim):
                x = query[i]
                x0 += x * k0[i]
                x1 += x * k1[i]
                x2 += x * k2[i]
                x3 += x * k3[i]
            logits[g, j], logits[g, j + 1], logits[g, j + 2], logits[g, j + 3] = x0, x1, x2, x3

    # 2. softmax
    scratch = np.empty(used, dtype=np.int32)
    for g in range(heads):
        line = logits[g, :used]
        total = np.float32(0)
        for j in range(used):
            line[j] *= scaling
        if softcap > 0:
            for j in range(used):
                line[j] = softcap * np.float32(math.tanh(line[j] / softcap))
        top = sinks[first + g]  # -inf without a learned sink
        for j in range(used):
            top = max(top, line[j])
            total += line[j]
        facts[0, b, r, first + g] = total / np.float32(used)
        _exp(line, top, scratch.view(np.float32), scratch)
        total = np.float32(0)
        weights = scratch.view(np.float32)
        for j in range(used):  # nothing is written here: a loop that writes runs in this order or in another, as the
            total += weights[j]  # addresses of its arrays allow, and the sum would differ from thread to thread
        total += np.float32(math.exp(sinks[first + g] - top))
        facts[1, b, r, first + g] = top + np.float32(math.log(total))
        for j in range(used):
            line[j] = weights[j] / total
        logits[g, used:] = 0

    # 3. weighted sum of values
    base = b * v_at[0] + kv * v_at[1]
    for j in range(min(AHEAD, used)):
        _fetch(v, base + tokens[j] * v_at[2], dim_v)
    for j in range(0, used, TILE):
        _read_tile(v, base, v_at[2], tokens, j, dim_v, kind, bits, floats)
        v0, v1, v2, v3 = floats[0, :dim_v], floats[1, :dim_v], floats[2, :dim_v], floats[3, :dim_v]
        for g in range(heads):
            p0, p1, p2, p3 = logits[g, j], logits[g, j + 1], logits[g, j + 2], logits[g, j + 3]
            line = out[b, r, first + g]
            for i in range(dim_v):
                line[i] += p0 * v0[i] + p1 * v1[i] + p2 * v2[i] + p3 * v3[i]

    # 4. what was left out, as one token
    rest = visible[b, r] - used if len(coefficients) else 0
    if rest > 0:
        sizes = np.float32(math.log(visible[b, r])), np.float32(math.log(used)), np.float32(math.log(rest))
        for g in range(heads):
            h = first + g
            known = facts[0, b, r, h], facts[1, b, r, h]
            share = _share(coefficients[h], known, q[b, h, r], mean_keys[b, kv, r], scaling, sizes)
            line, mean = out[b, r, h], mean_values[b, kv, r]
            for i in range(dim_v):
                line[i] += share * (mean[i] - line[i])


@numba.njit(fastmath={"reassoc", "contract", "nsz"})
def _share(c, known, query, mean_key, scaling, sizes):  # pragma: no cover - compiled
    """Return the share of what was left out in the softmax (eq. 15 and 16), of selected weight exp(total)."""
    (mean, total), (log_visible, log_used, log_rest) = known, sizes
    product = np.float32(0)
    for i in range(len(query)):
        product += query[i] * mean_key[i]
    typical = c[0] + c[1] * mean + c[2] * (product * scaling) + c[3] * log_visible + c[4] * log_used
    weight = min(typical, total - log_used) + log_rest
    return np.float32(1) / (np.float32(1) + np.float32(math.exp(total - weight)))


def _tasks(
    first, last, q, k_address, k_reach, k_at, v_address, v_reach, v_at, like, indices, out, facts, counts,
    scaling, softcap, sinks, kind, coefficients, mean_keys, mean_values, visible,
):  # pragma: no cover - compiled  # fmt: skip
    k = numba.carray(pointer(k_address), k_reach, like.dtype)
    v = numba.carray(pointer(v_address), v_reach, like.dtype)
    for task in range(first, last):
        _task(
            task, q, k, k_at, v, v_at, indices, out, facts, counts, scaling, softcap, sinks, kind,
            coefficients, mean_keys, mean_values, visible,
        )  # fmt: skip
