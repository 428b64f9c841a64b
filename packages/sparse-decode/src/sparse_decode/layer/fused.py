"""A plain decode step of one sparse layer on the CPU in one compiled call.

Plain means: one new token per sequence, no mask, a growing cache on the CPU, and one of our hashers. `LayerPlan.step`
calls it. For other calls `LayerPlan.attend` runs the same kernels one by one, with the same result but for rounding.
"""

from operator import getitem, is_
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from hashcore.arguments import address
from hashcore.cpu import threads
from hashtrain import Hasher
from hashtrain.layers.planes import Planes
from hashtrain.layers.transform import Transform
from numpy.typing import NDArray
from torch import Tensor

from sparse_decode.attention.attend_inputs import KINDS, Inputs
from sparse_decode.budget import LayerBudget
from sparse_decode.caches.cache import CodedDynamicLayer
from sparse_decode.hashing import encode
from sparse_decode.layer import fused_kernels
from sparse_decode.layer.fused_kernels import FORM
from sparse_decode.select import HashSelector
from sparse_decode.unselected.sums import FOLD

Fitted = tuple[Tensor, Tensor] | None
"""What `Coefficients.on` returns; None without a remainder."""
Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys, values and codes of a step."""
_NO_SUMS = 0, 0, 0, 0
_NAMES = encode.NAMES * 2  # of the weights of the functions of queries and of keys


class _Form(NamedTuple):
    """The kernel's arguments that calls share if they differ only in tensor contents and the number of tokens.

    It holds the owners of the addresses in `values`, to check that these are still valid.
    """

    key: tuple[Any, ...]  # shapes, dtypes and strides of the calls
    values: NDArray[np.int64]  # in the order of `fused_kernels.FORM`
    work: tuple[int, int]  # popcounts per token, times 32, and multiply-adds per token that is read, of a KV head
    layer: Planes | Transform
    weights: list[Tensor]
    owners: list[dict[str, Any]]  # the modules' parameters: a module's own lookup is slow
    addresses: list[int]  # of the weights
    left_out: Fitted
    digits: encode.Digits
    coordinate: Tensor | None
    modules: dict[str, Any] | None  # the hasher's layers by index; None if `layer` is a copy on another device


class FusedStep:
    """Runs the plain decode steps of one layer on the CPU."""

    def __init__(self, layer: int, selector: HashSelector, budget: LayerBudget):
        self.layer: int = layer
        self.budget: LayerBudget = budget
        self._name = str(layer)
        self._always = budget.sink + budget.recent
        self._selector = selector
        self._cpu_encoder = encode.CpuEncoder()
        self._form: _Form | None = None

    def run(self, held: CodedDynamicLayer, x: Inputs, left_out: Fitted, reads: list[int]) -> Tensor | None:
        """Encode, select and attend: q [B, Hq, 1, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, 1, Hq, Dv].

        Args: those of `sparse_decode.layer.plan.PlainStep`. Returns: None if the call is not supported here.
        """
        q, k, v, scaling, softcap, sinks = x
        batch, hkv, n, _ = k.shape
        codes, pending = held.room_for_code()
        form, moments = self._formed((q, k, v, codes), left_out), held.moments
        sums = _NO_SUMS if left_out is None else moments.for_step(batch, n)
        if form is None or sums is None:
            return None
        tasks, workers = batch * hkv, 1
        work = tasks * (n * form.work[0] // 32 + sum(reads) // len(reads) * form.work[1])
        if work >= 2 * min(threads.GRAIN, threads.TEAM_GRAIN):  # enough for two
            most = min(threads.most(), torch.get_num_threads())
            if most > tasks and work > (tasks + 1) * threads.GRAIN:
                return None  # the general way splits searches, and so uses all threads
            workers = threads.count(work, min(most, tasks))
        own_sinks = None if sinks is None else sinks.detach().float().contiguous()
        out = torch.empty((batch, 1, q.shape[1], v.shape[3]), dtype=torch.float32, device=q.device)
        counts, most = np.array(reads, np.int64), max(self._always, *reads)
        where = q.data_ptr(), k.data_ptr(), v.data_ptr(), codes.data_ptr(), n, counts, int(pending is not None)
        factors = np.float32(scaling), np.float32(softcap or 0)
        at = 0 if own_sinks is None else own_sinks.data_ptr()
        shared = np.empty((tasks, most), np.int64), np.zeros(tasks, np.int64)
        given = form.values, *factors, *where, at, out.data_ptr(), sums, moments.length
        done = threads.run(fused_kernels.tasks, 2 * tasks, workers, (*given, *shared))
        if any(done):  # a query's weights are not finite: the general way raises the error
            return None
        if pending is not None:
            pending.length += 1
        if left_out is not None and n == moments.length + FOLD:
            moments.advance(k, v, None, n, k.device)
        return out if q.dtype == torch.float32 else out.to(q.dtype)

    def _formed(self, given: Given, left_out: Fitted) -> _Form | None:
        """Return the shared arguments of such calls, cached while the addresses are valid; None for other hashers."""
        q, k, v, codes = given
        (b_k, h_k, _, dim), (b_v, h_v, _, dim_v), (b_c, h_c, _, words) = k.shape, v.shape, codes.shape
        known = self._form
        key = (
            *(q.dtype, k.dtype, v.dtype, left_out is None, q.shape, b_k, b_v, b_c, h_k, h_v, h_c, dim, dim_v, words),
            *(q.stride(), k.stride(), v.stride(), codes.stride()),
        )
        if known is not None and known.key == key and known.modules is not None:
            own, mine = known.layer, known.left_out
            here = known.modules.get(self._name) is own and own._buffers.get("coordinate") is known.coordinate
            if here and (left_out is mine or (left_out and mine and left_out[0] is mine[0])):
                # Loops in C: each call of a Python function would take as long as all of these.
                there, weights = map(getitem, known.owners, _NAMES), known.weights
                if all(map(is_, there, weights)) and list(map(Tensor.data_ptr, weights)) == known.addresses:
                    return known
        return self._made(key, given, left_out)

    def _made(self, key: tuple[Any, ...], given: Given, left_out: Fitted) -> _Form | None:
        """Look the arguments up and keep them: `_formed`."""
        q, k, v, _ = given
        placed = None if self._selector.per_query_head else self._selector.placed
        layer = None if placed is None else placed.layer(self.layer, q.device)
        if layer is None or not encode.supports(layer, q):
            return None
        own = cast(Planes | Transform, layer)
        if not _agree(own, *given):
            return None
        owners = [own.query._parameters] * 5 + [own.key._parameters] * 5
        weights = cast(list[Tensor], list(map(getitem, owners, _NAMES)))
        if not all(x.is_contiguous() for x in (*weights, *(left_out or ()))):
            return None
        digits = self._cpu_encoder.digits_of(own)
        values = _values(own, self.budget, given, weights, digits, left_out)
        found = cast(Hasher, self._selector.hasher).layers._modules
        modules = found if found.get(self._name) is own else None
        work = own.planes * own.bits, own.group * (k.shape[3] + v.shape[3])
        addresses, coordinate = [x.data_ptr() for x in weights], own._buffers.get("coordinate")
        self._form = _Form(key, values, work, own, weights, owners, addresses, left_out, digits, coordinate, modules)
        return self._form


def _agree(own: Planes | Transform, q: Tensor, k: Tensor, v: Tensor, codes: Tensor) -> bool:
    """Whether the tensors of a call have one dtype, the sizes of the hasher, and contiguous components."""
    heads = q.shape[1] == own.hkv * own.group and k.shape[1] == v.shape[1] == codes.shape[1] == own.hkv
    sizes = q.shape[3] == k.shape[3] == own.d and 32 * codes.shape[3] == own.bits
    alike = q.dtype == k.dtype == v.dtype and q.dtype in KINDS and len(q) == len(k) == len(v) == len(codes)
    return heads and sizes and alike and all(x.stride(3) == 1 for x in (q, k, v, codes))


def _values(
    own: Planes | Transform,
    budget: LayerBudget,
    given: Given,
    weights: list[Tensor],
    digits: encode.Digits,
    rest: Fitted,
) -> NDArray[np.int64]:
    """Return the sizes, strides and addresses in the order of `fused_kernels.FORM`."""
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
        "REMAINDER": int(rest is not None),
    }
    for name, x in zip(("Q", "K", "V", "CODE"), given, strict=True):
        found |= dict(zip((f"{name}_BATCH", f"{name}_HEAD", f"{name}_TOKEN"), x.stride()[:3], strict=True))
    names = [f"{which}_{name.upper()}" for which in ("QUERY", "KEY") for name in encode.NAMES]
    found |= {name: x.data_ptr() for name, x in zip(names, weights, strict=True)}
    found |= {name: address(x) for name, x in zip(("COORDINATE", "POWER", "LIMIT"), digits, strict=True)}
    if rest is not None:
        found |= {name: x.data_ptr() for name, x in zip(("COEFFICIENTS", "SLOPES"), rest, strict=True)}
    found |= fused_kernels.addresses(KINDS[q.dtype], rest is not None)
    return np.array([found.get(name, 0) for name in FORM], np.int64)
