"""Two operators that `torch.compile` does not look into, so that a compiled decode step stays one graph.

Their work is Python that the compiler cannot trace: any selector, numba kernels, sizes that depend on data. A graph
holds only the number under which the object that does the work is registered; a number is never used twice.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Writer(Protocol):
    """What `write_codes` calls."""

    def write(self, codes: Tensor, keys: Tensor, at: Tensor) -> None: ...


class Step(Protocol):
    """What `attend_step` calls."""

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        codes: Tensor | None,
        mask: Tensor | None,
        length: Tensor | None,
        sinks: Tensor | None,
        tally: Tensor,
        sums: list[Tensor],
        scaling: float,
        softcap: float | None,
    ) -> Tensor: ...


_numbers = itertools.count(1)
_registered: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(worker: Writer | Step) -> int:
    """Return a number by which the operators below find `worker`, as long as it lives."""
    number = next(_numbers)
    _registered[number] = worker
    return number


@torch.library.custom_op("sparse_decode::write_codes", mutates_args=("codes",))
def write_codes(codes: Tensor, keys: Tensor, at: Tensor, writer: int) -> None:
    """Hash keys [B, Hkv, t, D] into codes [B, H, N, W] at token `at`, a whole number in a tensor."""
    _registered[writer].write(codes, keys, at)


@write_codes.register_fake
def _(codes: Tensor, keys: Tensor, at: Tensor, writer: int) -> None:
    pass


@torch.library.custom_op("sparse_decode::attend_step", mutates_args=("tally", "sums"))
def attend_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    mask: Tensor | None,
    length: Tensor | None,
    sinks: Tensor | None,
    tally: Tensor,
    sums: list[Tensor],
    step: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attend sparsely as the plan `step` says: [B, Q, Hq, Dv].

    Counts into `tally` and brings `sums` up to date, the tensors of a `StaticMoments` or none.
    """
    return _registered[step].run(q, k, v, codes, mask, length, sinks, tally, sums, scaling, softcap)


@attend_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | None,
    mask: Tensor | None,
    length: Tensor | None,
    sinks: Tensor | None,
    tally: Tensor,
    sums: list[Tensor],
    step: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
