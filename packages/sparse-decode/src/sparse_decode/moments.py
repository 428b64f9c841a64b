"""torch operators that add a decode step's token to the remainder's sums.

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

THREADS = 256
MAX_GROUP = 16
"""Largest supported number of query heads per KV head."""

Outputs = tuple[Tensor, ...]


class Token(ctypes.Structure):
    """Token of kernels/moments.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("key", "value") for step in ("batch", "head", "token")),
        *((name, ctypes.c_void_p) for name in ("q", "slopes")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "group", "tokens")),
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

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("keys", "values", "spread"))


class Results(ctypes.Structure):
    """Results of kernels/moments.cu: addresses."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("tokens", "keys", "values", "spread", "mean_keys", "rest"))


def add_token(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    spread: Tensor,
    visible: Tensor | None = None,
    shown: Tensor | None = None,
    before: Tensor | None = None,
    run: Run | None = None,
) -> Outputs:
    """Add the last token of each sequence to its sums (eq. 16).

    Args:
        q: its queries, [B, Hq, D]; slopes: float32 [Hq], times the factor on the logits; k [B, Hkv, N, D] and v
            [B, Hkv, N, Dv], bfloat16 or float16 like q, with contiguous components.
        keys, values, spread: the sums before it, as in `sparse_decode.remainder.Moments`.
        visible: number of visible tokens, int64 [B, 1]; shown: the visible tokens, bool [B, N]; None: all.
        before: the earlier tokens that the sums cover, bool [B, N or N - 1]; None: all.
    Returns: the four updated sums, mean keys float32 [B, Hkv, D] and the values of eq. 16, float32 [B, Hq, Dv]. On
        CUDA, if the sums do not cover the visible earlier tokens of a row, these are NaN in at least one KV head.
    """
    outputs = _empty(q, slopes, k, v, keys, values, spread)
    _launch(q, slopes, k, v, (keys, values, spread), outputs, (visible, shown, before, None, None), run)
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
    tokens, keys, values, spread, before, summed = sums
    means = _empty_means(q, v, keys)
    outputs = tokens, keys, values, spread, *means
    _launch(q, slopes, k, v, (keys, values, spread), outputs, (visible, shown, before, length, summed), run)
    return means


def _launch(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Sequence[Tensor],
    outputs: Sequence[Tensor],
    rows: tuple[Tensor | None, ...],
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
    padding.visible, padding.shown, padding.before = _at(visible), _at(shown), _at(before)
    padding.length, padding.summed = _at(length), _at(summed)
    into.keys, into.values, into.spread = (x.data_ptr() for x in sums)
    to.tokens, to.keys, to.values, to.spread, to.mean_keys, to.rest = (x.data_ptr() for x in outputs)
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
    defined = macros(dim, value_dim, q.dtype)
    step = make_launch("moments.cu", "add_token", (batch * hkv, 1), THREADS, arguments, defined)
    call = _Call(*arguments, Kept([step]))
    call.resize(n, keys, values, shown, before)
    return call


def _step(x: Tensor | None) -> int | None:
    """Return the stride from one row to the next, in elements."""
    return None if x is None else x.stride(0)


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _empty(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *sums: Any) -> Outputs:
    """Return tensors of the shapes that `add_token` returns; also its fake implementation."""
    after = (x.new_empty(*x.shape) for x in sums[:3])  # `*shape` takes a third less time than a tuple
    return sums[0].new_empty(len(q)), *after, *_empty_means(q, v, sums[0])


def _empty_means(q: Tensor, v: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty(*keys.shape, dtype=torch.float32),
        q.new_empty(*q.shape[:2], v.shape[-1], dtype=torch.float32),
    )


def _on_cuda(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Outputs:
    require(q.dtype, (k.shape[3], v.shape[3]), q.shape[1] // k.shape[1])
    return add_token(q, slopes, k, v, *rest)


def _on_cuda_in_place(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    require(q.dtype, (k.shape[3], v.shape[3]), q.shape[1] // k.shape[1])
    return add_in_place(q, slopes, k, v, rest[:6], *rest[6:])


def on_cpu(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    spread: Tensor,
    visible: Tensor | None,
    shown: Tensor | None,
    before: Tensor | None,
) -> Outputs:
    """Like `add_token`; the caller has checked that the sums cover the right tokens."""
    outputs = _empty(q, slopes, k, v, keys, values, spread)
    _run_on_cpu(q, slopes, k, v, k.shape[2], (keys, values, spread), outputs, visible, shown)
    return outputs


def on_cpu_in_place(q: Tensor, slopes: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens, keys, values, spread, before, summed, visible, shown, length = rest
    n = int(length)
    if int(summed[0]) != n - 1 or not torch.equal(before[:, : n - 1], shown[:, : n - 1]):
        raise ValueError(
            "a compiled step must see the tokens of the step before and a new one, got a mask that changed for earlier "
            "tokens; call the model once without the compiler, or attach with remainder=False"
        )
    means = _empty_means(q, v, keys)
    sums = keys, values, spread
    _run_on_cpu(q, slopes, k, v, n, tuple(x.clone() for x in sums), (tokens, *sums, *means), visible, shown)
    before[:, n - 1] = shown[:, n - 1]
    summed.fill_(n)
    return means


def _run_on_cpu(
    q: Tensor,
    slopes: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    sums: Sequence[Tensor],
    outputs: Sequence[Tensor],
    visible: Tensor | None,
    shown: Tensor | None,
) -> None:
    batch, tokens = len(q), outputs[0]
    tokens.copy_(visible[:, 0]) if visible is not None else tokens.fill_(n)
    joins = torch.ones(batch, dtype=torch.bool) if shown is None else shown[:, n - 1].contiguous()
    given = (x.float().contiguous().numpy() for x in (k[:, :, n - 1], v[:, :, n - 1], q))
    new_k, new_v, queries = given
    work = sums[2].numel() * (1 + q.shape[1] // k.shape[1])
    arrays = *(x.numpy() for x in sums), queries, slopes.numpy(), *(x.numpy() for x in outputs[1:])
    compiled.run(moment_kernels.tasks, batch * k.shape[1], work, tokens.numpy(), joins.numpy(), new_k, new_v, *arrays)


_STEP = "Tensor q, Tensor slopes, Tensor k, Tensor v"
_SUMS = "Tensor(a!) tokens, Tensor(b!) keys, Tensor(c!) values, Tensor(d!) spread, Tensor(e!) before, Tensor(f!) summed"
LIBRARY = torch.library.Library("sparse_decode", "FRAGMENT")
LIBRARY.define(
    f"add_token({_STEP}, Tensor keys, Tensor values, Tensor spread, Tensor? visible, Tensor? shown, Tensor? before) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(f"add_in_place({_STEP}, {_SUMS}, Tensor visible, Tensor shown, Tensor length) -> (Tensor, Tensor)")
for _name, _cpu, _cuda, _fake in (
    ("add_token", on_cpu, _on_cuda, _empty),
    ("add_in_place", on_cpu_in_place, _on_cuda_in_place, lambda q, s, k, v, t, keys, *_: _empty_means(q, v, keys)),
):
    LIBRARY.impl(_name, _cpu, "CPU")
    LIBRARY.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"sparse_decode::{_name}", _fake, lib=LIBRARY)
OPERATORS: Any = torch.ops.sparse_decode
"""Both as torch operators, which can be traced, counted and captured."""
