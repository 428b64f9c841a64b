"""Two custom operators that `torch.compile` treats as opaque, so that a compiled decode step stays one graph.

They run Python that the compiler cannot trace: arbitrary selectors, numba kernels, sizes that depend on data. A graph
refers to the Python object by the number under which it is registered; numbers are never reused.
"""

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_numbers = itertools.count(1)
_registered: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register(worker: Any) -> int:
    """Register an `Encoder` or a `SparseLayer` for the operators below and return its number; the reference is weak."""
    number = next(_numbers)
    _registered[number] = worker
    return number


@torch.library.custom_op("sparse_decode::write_codes", mutates_args=("codes",))
def write_codes(codes: Tensor, keys: Tensor, at: Tensor, writer: int) -> None:
    """Hash keys [B, Hkv, t, D] into codes [B, H, N, W], from token `at` on, an integer."""
    _registered[writer].write(codes, keys, at)


write_codes.register_fake(lambda *given, **named: None)


@torch.library.custom_op("sparse_decode::attend_step", mutates_args=("sums",))
def attend_step(
    q: Tensor, k: Tensor, v: Tensor, codes: Tensor | None, mask: Tensor | None, length: Tensor | None,
    sinks: Tensor | None, sums: list[Tensor], layer: int, scaling: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Run `SparseLayer.run` of the layer registered as `layer`: [B, Q, Hq, Dv].

    Updates `sums`: those of a static cache, if there are any, then a placeholder: inductor rejects an empty list.
    """
    return _registered[layer].run(q, k, v, codes, mask, length, sinks, sums[:-1], scaling, softcap)


attend_step.register_fake(lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
