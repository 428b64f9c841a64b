"""A decode step of one sparse layer on the CPU in one compiled call, where nothing about it is unusual.

That is: one new token a sequence, no mask, a growing cache in the model's own memory, a hash of ours with its weights
here. Any other call goes through the blocks of `sparse_decode.plan`, step by step, by the same kernels to the same
result.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from hashcore.cpu import threads
from hashcore.cpu.layout import address
from hashtrain import Hasher
from hashtrain.layers.planes import Planes
from hashtrain.layers.transform import Transform
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode import encode, fused_kernels
from sparse_decode.attend import KINDS, LIKE
from sparse_decode.budget import Budget
from sparse_decode.cache import CodedDynamicLayer
from sparse_decode.fused_kernels import AT, FORM
from sparse_decode.select import HashSelector

_GRAIN = 1 << 23  # multiply-adds, or words of codes and planes, that pay for a thread: about 1 ms
_NO_SUMS = 0, 0, 0


class _Weight:
    """A parameter in its module, and where it lies: asked for at each step, so past the module's own way to find it."""

    __slots__ = ("at", "held", "name", "tensor")

    def __init__(self, held: dict[str, Any], name: str):
        self.held, self.name = held, name
        self.tensor: Tensor = held[name]
        self.at: int = self.tensor.data_ptr()

    def is_there(self) -> bool:
        """Say whether the module still has it, in the same place."""
        return self.held[self.name] is self.tensor and self.tensor.data_ptr() == self.at


class _Form(NamedTuple):
    """What calls share that differ only in what tensors hold and how many tokens there are.

    Attributes:
        key: of the calls: shapes, types and strides.
        values: int64, by `fused_kernels.FORM`.
        layer, weights, left_out, digits, coordinate: what the addresses in it point at, and what says that it is still
            the same.
        modules: where the hasher keeps its layers, by the layer's index; None if this one is a copy on another device.
    """

    key: tuple[Any, ...]
    values: NDArray[np.int64]
    layer: Planes | Transform
    weights: list[_Weight]
    left_out: tuple[Tensor, Tensor] | None
    digits: encode.Digits
    coordinate: Tensor | None
    modules: dict[str, Any] | None

    def holds(self, index: int, left_out: tuple[Tensor, Tensor] | None) -> bool:
        """Say whether the addresses are still right: layers and weights may be replaced, and digits loaded."""
        if self.modules is None or self.modules.get(str(index)) is not self.layer:
            return False
        if _coordinate(self.layer) is not self.coordinate:
            return False
        mine = self.left_out
        if left_out is not mine and (left_out is None or mine is None or left_out[0] is not mine[0]):
            return False
        return all(weight.is_there() for weight in self.weights)


def _coordinate(layer: Planes | Transform) -> Tensor | None:
    """Return the coordinate of each bit, another tensor after digits have been loaded; None where bits are numbers."""
    return layer._buffers.get("coordinate")


class FusedStep:
    """The plain decode steps of one layer."""

    def __init__(self, layer: int, selector: HashSelector, budget: Budget):
        self.layer: int = layer
        self.budget: Budget = budget
        self._selector = selector
        self._few = encode.FewTokens()
        self._form: _Form | None = None

    def attend(
        self,
        held: CodedDynamicLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        softcap: float | None,
        sinks: Tensor | None,
        left_out: tuple[Tensor, Tensor] | None,
    ) -> Tensor | None:
        """Select and attend: q [B, Hq, 1, D], k [B, Hkv, N, D] and v [B, Hkv, N, Dv] of the CPU to [B, 1, Hq, Dv].

        Args:
            held: the cache layer, whose keys k are.
            left_out: coefficients of the remainder, float32 [Hq, 5], and slopes, float32 [Hq], times the factor on the
                logits; None to leave it out.
        Returns: None if this call needs the other way: the cache is then as it was.
        """
        batch, hkv, n = k.shape[:3]
        codes, pending = held.room_for_code()
        form, reads, moments = self._formed(q, k, v, codes, left_out), self.budget.count_row(n), held.moments
        sums = None if left_out is None else moments.to_extend(batch, n)
        if form is None or (left_out is not None and sums is None):
            return None
        tasks = batch * hkv
        workers = self._workers(form, n, reads, tasks)
        if workers > tasks:  # a search in parts, which uses them all
            return None
        own_sinks = None if sinks is None else sinks.detach().float().contiguous()
        out = torch.empty((batch, 1, q.shape[1], v.shape[3]), dtype=torch.float32, device=q.device)
        count = max(0, reads - self.budget.sink - self.budget.recent)
        where = q.data_ptr(), k.data_ptr(), v.data_ptr(), codes.data_ptr(), n, count, int(pending)
        factors = np.float32(scaling), np.float32(softcap or 0), float(self.budget.values)
        at = 0 if own_sinks is None else own_sinks.data_ptr()
        totals = _NO_SUMS if sums is None else tuple(x.data_ptr() for x in sums[1:])
        given = form.values, LIKE[k.element_size()], *factors, *where, at, out.data_ptr(), totals
        done = threads.run(fused_kernels.kernel(), tasks, workers, given)
        if any(done):  # a query's weights are not finite: the other way says so
            moments.forget()
            return None
        if pending:
            held.wrote_code()
        if sums is not None:
            moments.extended(n)
        return out if q.dtype == torch.float32 else out.to(q.dtype)

    def _workers(self, form: _Form, n: int, reads: int, tasks: int) -> int:
        """Return how many threads the work pays for."""
        value = form.values
        scored = n * value[AT["PLANES"]] * (value[AT["BITS"]] // 32)
        attended = reads * value[AT["GROUP"]] * (value[AT["DIM"]] + value[AT["DIM_V"]])
        return max(1, min(threads.most(), torch.get_num_threads(), int(tasks * (scored + attended)) // _GRAIN))

    def _formed(
        self, q: Tensor, k: Tensor, v: Tensor, codes: Tensor, left_out: tuple[Tensor, Tensor] | None
    ) -> _Form | None:
        """Return what such calls share, as it was if nothing has moved; None if the hash is not one of ours.

        It is never changed, since threads share it.
        """
        given, known = (q, k, v, codes), self._form
        key = q.dtype, k.dtype, v.dtype, left_out is None, *((x.shape[:2], x.shape[3], x.stride()) for x in given)
        if known is not None and known.key == key and known.holds(self.layer, left_out):
            return known
        layer = self._selector.own_layer(self.layer, q.device)
        if layer is None or not encode.takes(layer, q):
            return None
        own = cast(Planes | Transform, layer)
        if not _agree(own, *given):
            return None
        weights = [_Weight(functions._parameters, name) for functions in (own.query, own.key) for name in encode.NAMES]
        tensors = [weight.tensor for weight in weights]
        if not all(x.is_contiguous() for x in (*tensors, *(left_out or ()))):
            return None
        digits = self._few.digits_of(own)
        values = _values(own, self.budget, given, tensors, digits, left_out)
        found = cast(Hasher, self._selector.hasher).layers._modules
        modules = found if found.get(str(self.layer)) is own else None
        self._form = _Form(key, values, own, weights, left_out, digits, _coordinate(own), modules)
        return self._form


def _agree(own: Planes | Transform, q: Tensor, k: Tensor, v: Tensor, codes: Tensor) -> bool:
    """Say whether the tensors of a call are of one type and of the hash's sizes, each row side by side."""
    heads = q.shape[1] == own.hkv * own.group and k.shape[1] == v.shape[1] == codes.shape[1] == own.hkv
    sizes = q.shape[3] == k.shape[3] == own.d and 32 * codes.shape[3] == own.bits
    alike = q.dtype == k.dtype == v.dtype and q.dtype in KINDS and len(q) == len(k) == len(v) == len(codes)
    return heads and sizes and alike and all(x.stride(3) == 1 for x in (q, k, v, codes))


def _values(
    own: Planes | Transform,
    budget: Budget,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: list[Tensor],
    digits: encode.Digits,
    left_out: tuple[Tensor, Tensor] | None,
) -> NDArray[np.int64]:
    """Return the sizes, strides and addresses that `fused_kernels.FORM` names; q, k, v and codes are given."""
    (q, k, v, _), (r, w1, _, _, _) = given, weights[:5]
    found = {
        "HKV": k.shape[1],
        "GROUP": own.group,
        "DIM": k.shape[3],
        "DIM_V": v.shape[3],
        "KIND": KINDS[q.dtype],
        "BITS": own.bits,
        "PLANES": own.planes,
        "COORDINATES": r.shape[2],
        "SPREAD": int(digits[0].size > 0),
        "QUERY_HIDDEN": w1.shape[2],
        "KEY_HIDDEN": weights[6].shape[2],
        "SINK": budget.sink,
        "RECENT": budget.recent,
        "SHORTLIST": budget.shortlist or 0,
        "REMAINDER": int(left_out is not None),
    }
    for name, x in zip(("Q", "K", "V", "CODE"), given, strict=True):
        found |= dict(zip((f"{name}_BATCH", f"{name}_HEAD", f"{name}_TOKEN"), x.stride()[:3], strict=True))
    names = [f"{which}_{name.upper()}" for which in ("QUERY", "KEY") for name in encode.NAMES]
    found |= {name: x.data_ptr() for name, x in zip(names, weights, strict=True)}
    found |= {name: address(x) for name, x in zip(("COORDINATE", "POWER", "LIMIT"), digits, strict=True)}
    if left_out is not None:
        found |= {name: x.data_ptr() for name, x in zip(("COEFFICIENTS", "SLOPES"), left_out, strict=True)}
    return np.array([found.get(name, 0) for name in FORM], np.int64)
