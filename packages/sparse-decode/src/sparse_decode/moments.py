"""torch operators that compute a decode step's means from the remainder's sums, and add its tokens to them.

On CUDA they run kernels/moments.cu, on the CPU `moment_kernels`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hashcore.cuda import launch
from hashcore.cuda.kept import Table
from hashcore.cuda.kernels import Kept, make_launch
from torch import Tensor

from sparse_decode import compiled, moment_kernels
from sparse_decode.gather import KERNELS, Run, macros, require
from sparse_decode.sums import FOLD, Moments, Rounded

THREADS = 256
MAX_GROUP = 16
"""Largest supported number of query heads per KV head."""


def defined(dim: int, value_dim: int, dtype: torch.dtype) -> tuple[tuple[str, str], ...]:
    """Return the macros that moments.cu is compiled with."""
    return (*macros(dim, value_dim, dtype), ("SPARSE_FOLD", str(FOLD)))


class Token(ctypes.Structure):
    """Token of kernels/moments.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("key", "value") for step in ("batch", "head", "token")),
        *((name, ctypes.c_void_p) for name in ("q", "slopes")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "group", "tokens", "summed")),
    )


class Padding(ctypes.Structure):
    """Padding of kernels/moments.cu, field by field."""

    _fields_ = (
        ("visible", ctypes.c_void_p),
        *(
            field
            for name in ("shown", "before")
            for field in ((name, ctypes.c_void_p), (f"{name}_batch", ctypes.c_int64))
        ),
        *((name, ctypes.c_void_p) for name in ("length", "summed")),
    )


class Sums(ctypes.Structure):
    """Sums of kernels/moments.cu: addresses."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("keys", "values", "spread", "levels", "scales"))


_STATE = "tokens", "keys", "values", "spread", "levels", "scales"


class Results(ctypes.Structure):
    """Results of kernels/moments.cu: addresses."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("mean_keys", "rest", *_STATE))


def add_token(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    spread: Tensor,
    levels: Tensor,
    scales: Tensor,
    summed: int,
    visible: Tensor | None = None,
    shown: Tensor | None = None,
    before: Tensor | None = None,
    run: Run | None = None,
) -> list[Tensor]:
    """Return the means of the last token's row (eq. 16), and the sums after it if `FOLD` tokens are new.

    Args:
        q: its queries, [B, Hq, D]; slopes: float32 [Hq], times the factor on the logits; k [B, Hkv, N, D] and v
            [B, Hkv, N, Dv], bfloat16 or float16 like q, with contiguous components.
        keys, values, spread: sums over the first `summed` tokens, as in `Moments`; levels, scales: as in `Rounded`.
        visible: number of visible tokens, int64 [B, 1]; shown: the visible tokens, bool [B, N]; None: all.
        before: the tokens that the sums cover, bool [B, `summed` or more]; None: all.
    Returns: mean keys float32 [B, Hkv, D] and the values of eq. 16, float32 [B, Hq, Dv]; with `FOLD` new tokens also
        the sums over all, in the order of `Moments` and `Rounded`. On CUDA, if the sums do not cover the visible
        tokens of a row, all of these are NaN in at least one KV head.
    """
    outputs = _empty(q, slopes, k, v, keys, values, spread, levels, scales, summed)
    sums = keys, values, spread, levels, scales
    _launch(q, slopes, k, v, sums, outputs, (visible, shown, before, None, None), summed, run)
    return outputs


def add_in_place(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Sequence[Tensor],
    visible: Tensor,
    shown: Tensor,
    length: Tensor,
    run: Run | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `add_token`, for token `length` - 1 of a static cache, in place.

    Args: as in `add_token`; sums: those of a `StaticMoments`; length: number of tokens in the cache, int64 [].
    """
    *state, before, summed = sums
    means = _empty_means(q, v, state[1])
    _launch(q, slopes, k, v, state[1:], (*means, *state), (visible, shown, before, length, summed), 0, run)
    return means


def _launch(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Sequence[Tensor],
    outputs: Sequence[Tensor],
    rows: tuple[Tensor | None, ...],
    covered: int,
    run: Run | None,
) -> None:
    if not len(q):
        return
    q, device = q.contiguous(), q.device
    visible, shown, before, length, summed = rows
    shown, before = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (shown, before))
    form = q.shape, q.dtype, device, k.shape, k.stride(), v.shape, v.stride(), _step(shown), _step(before)
    call = _calls.found.get(form)
    if call is None:
        call = _renewed(form, q, k, v, k.stride(), v.stride(), _step(shown), _step(before))
    token, padding, into, to = call.token, call.padding, call.sums, call.results
    token.k, token.v, token.q, token.slopes = k.data_ptr(), v.data_ptr(), q.data_ptr(), slopes.data_ptr()
    token.summed = covered
    padding.visible, padding.shown, padding.before = _at(visible), _at(shown), _at(before)
    padding.length, padding.summed = _at(length), _at(summed)
    into.keys, into.values, into.spread, into.levels, into.scales = (x.data_ptr() for x in sums)
    to.mean_keys, to.rest, *state = (x.data_ptr() for x in outputs)
    to.tokens, to.keys, to.values, to.spread, to.levels, to.scales = state or (None,) * len(_STATE)
    (launch.run if run is None else run)(call.launches, device, KERNELS)


class _Call(NamedTuple):
    """A prepared launch for one set of shapes and strides; each call only sets the addresses in its arguments."""

    token: Token
    padding: Padding
    sums: Sums
    results: Results
    launches: Kept

    def resize(self, n: int, keys: Sequence[int], values: Sequence[int], shown: int | None, before: int | None) -> bool:
        """Set the number of tokens and the strides, which do not change the grid; return True."""
        token, padding = self.token, self.padding
        token.tokens, padding.shown_batch, padding.before_batch = n, shown or 0, before or 0
        token.key_batch, token.key_head, token.key_token = keys[:3]
        token.value_batch, token.value_head, token.value_token = values[:3]
        return True


_calls: Table[_Call] = Table()


def _renewed(form: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *strides: Any) -> _Call:
    """Return the launch for a form: that of the previous length, updated, or a new one."""
    (*lead, n, dim), value_dim = k.shape, v.shape[3]
    kind = *form[:3], *lead, dim, value_dim
    return _calls.renew(form, kind, n, lambda made: made.resize(n, *strides), lambda: _prepare(q, k, v, *strides))


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, keys: Sequence[int], values: Sequence[int], shown: int | None, before: int | None
) -> _Call:
    (batch, hq, dim), (hkv, n, value_dim) = q.shape, v.shape[1:]
    arguments = Token(kv_heads=hkv, group=hq // hkv), Padding(), Sums(), Results()
    named = defined(dim, value_dim, q.dtype)
    step = make_launch("moments.cu", "add_token", (batch * hkv, 1), THREADS, arguments, named)
    call = _Call(*arguments, Kept([step]))
    call.resize(n, keys, values, shown, before)
    return call


def _step(x: Tensor | None) -> int | None:
    """Return the stride from one row to the next, in elements."""
    return None if x is None else x.stride(0)


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _empty(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *sums: Any) -> list[Tensor]:
    """Return tensors of the shapes that `add_token` returns; also its fake implementation."""
    *state, summed = sums[:6]
    means = list(_empty_means(q, v, state[0]))
    if k.shape[2] != summed + FOLD:
        return means
    after = (x.new_empty(*x.shape) for x in state)  # `*shape` takes a third less time than a tuple
    return [*means, state[0].new_empty(len(q)), *after]


def _empty_means(q: Tensor, v: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty(*keys.shape, dtype=torch.float32),
        q.new_empty(*q.shape[:2], v.shape[-1], dtype=torch.float32),
    )


def _on_cuda(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    require(q.dtype, (k.shape[3], v.shape[3]), q.shape[1] // k.shape[1])
    return add_token(q, slopes, k, v, *rest)


def _on_cuda_in_place(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    require(q.dtype, (k.shape[3], v.shape[3]), q.shape[1] // k.shape[1])
    return add_in_place(q, slopes, k, v, rest[:8], *rest[8:])


def on_cpu(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    spread: Tensor,
    levels: Tensor,
    scales: Tensor,
    summed: int,
    visible: Tensor | None,
    shown: Tensor | None,
    before: Tensor | None,
) -> list[Tensor]:
    """Like `add_token`; the caller has checked that the sums cover the right tokens."""
    means, n = list(_empty_means(q, v, keys)), k.shape[2]
    _lean(q, slopes, k, v, (summed, n), (keys, values, levels, scales), means, visible, shown)
    if n != summed + FOLD:
        return means
    sums = _folded(k, v, (summed, n), Moments(keys, keys, values, spread), visible, shown)
    return [*means, *sums, *Rounded.of(sums.spread)]


def on_cpu_in_place(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, keys, values, spread, levels, scales, before, summed, visible, shown, length = rest
    n, first = int(length), int(summed[0, 0])
    if not first < n <= first + FOLD or not torch.equal(before[:, :first], shown[:, :first]):
        raise ValueError(
            "a compiled step must see the tokens of the step before and a new one, got a mask that changed for earlier "
            "tokens; call the model once without the compiler, or attach with remainder=False"
        )
    means = _empty_means(q, v, keys)
    _lean(q, slopes, k, v, (first, n), (keys, values, levels, scales), means, visible, shown)
    if n == first + FOLD:
        sums = _folded(k, v, (first, n), Moments(tokens, keys, values, spread), visible, shown)
        for room, found in zip(rest[:6], (*sums, *Rounded.of(sums.spread)), strict=True):
            room.copy_(found)
        before[:, first:n] = shown[:, first:n]
        summed.fill_(n)
    return means


def _folded(
    k: Tensor, v: Tensor, new: tuple[int, int], sums: Moments, visible: Tensor | None, shown: Tensor | None
) -> Moments:
    """Return the sums with the `new` tokens added; the number of tokens before them is found anew."""
    first, n = new
    if visible is None or shown is None:
        tokens = sums.keys.new_full((len(k),), first)
    else:
        tokens = (visible[:, 0] - shown[:, first:n].sum(-1)).double()
    return sums._replace(tokens=tokens).join(Moments.of(k, v, shown, first, n, k.device))


def _lean(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    new: tuple[int, int],
    sums: Sequence[Tensor],
    means: Sequence[Tensor],
    visible: Tensor | None,
    shown: Tensor | None,
) -> None:
    """Write mean keys and values of eq. 16 to `means`; new: first of the tokens not in the sums, and end."""
    (batch, hkv), (first, n) = k.shape[:2], new
    counts = torch.full((batch,), n) if visible is None else visible[:, 0]
    joins = torch.ones(batch, n - first, dtype=torch.bool) if shown is None else shown[:, first:n].contiguous()
    new_k, new_v, queries = (x.float().contiguous().numpy() for x in (k[:, :, first:n], v[:, :, first:n], q))
    arrays = *(x.numpy() for x in sums), queries, slopes.numpy(), *(x.numpy() for x in means)
    work = sums[2].numel() * q.shape[1] // hkv
    compiled.run(moment_kernels.tasks, batch * hkv, work, counts.double().numpy(), joins.numpy(), new_k, new_v, *arrays)


_STEP = "Tensor q, Tensor slopes, Tensor k, Tensor v"
_SUMS = "Tensor keys, Tensor values, Tensor spread, Tensor levels, Tensor scales"
_NAMES = *_STATE, "before", "summed"
_HELD = ", ".join(f"Tensor({mark}!) {name}" for mark, name in zip("abcdefgh", _NAMES, strict=True))
LIBRARY = torch.library.Library("sparse_decode", "FRAGMENT")
LIBRARY.define(
    f"add_token({_STEP}, {_SUMS}, SymInt summed, Tensor? visible, Tensor? shown, Tensor? before) -> Tensor[]"
)
LIBRARY.define(f"add_in_place({_STEP}, {_HELD}, Tensor visible, Tensor shown, Tensor length) -> (Tensor, Tensor)")
for _name, _cpu, _cuda, _fake in (
    ("add_token", on_cpu, _on_cuda, _empty),
    ("add_in_place", on_cpu_in_place, _on_cuda_in_place, lambda q, s, k, v, t, keys, *_: _empty_means(q, v, keys)),
):
    LIBRARY.impl(_name, _cpu, "CPU")
    LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"sparse_decode::{_name}", _fake, lib=LIBRARY)
OPERATORS: Any = torch.ops.sparse_decode
"""Both as torch operators, which can be traced, counted and captured."""
