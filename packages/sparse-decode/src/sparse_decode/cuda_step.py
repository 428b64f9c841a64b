"""A plain decode step of one sparse layer on a GPU, in four operators.

    1. encode     hash the new key, behind the codes of the others, and the queries
    2. select     search all codes
    3. remainder  what stands for the tokens that were not selected
    4. attend     to the first tokens, the selection and the last tokens, with the remainder

Plain means: one new token per sequence, no mask, a growing cache on the GPU, and one of our hashers. All other calls go
through `sparse_decode.plan`, which runs the same operators and gives the same result.
"""

from __future__ import annotations

from typing import Any

from hashcore.torch_ops import OPERATORS as SEARCH
from hashtrain.layers import LayerHasher
from torch import Tensor

from sparse_decode import encode_cuda, gather
from sparse_decode.budget import Budget, Tally
from sparse_decode.cache import CodedDynamicLayer
from sparse_decode.remainder import Coefficients
from sparse_decode.select import HashSelector

_NO_REMAINDER: tuple[Any, ...] = (None,) * 4


class CudaStep:
    """Runs the plain decode steps of one layer.

    Args: those of `FusedStep`.
    """

    def __init__(
        self,
        layer: int,
        selector: HashSelector,
        budget: Budget,
        shortest: int,
        coefficients: Coefficients | None,
        tally: Tally,
    ):
        self.layer: int = layer
        self.budget: Budget = budget
        self._shortest, self._coefficients, self._tally = shortest, coefficients, tally
        self._placed = selector.placed if budget.shortlist is None and budget.values == 1 else None
        self._per_query_head = selector.per_query_head

    def attend(
        self,
        held: object,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor | None:
        """Encode, select and attend: q [B, Hq, 1, D], k [B, Hkv, N, D], v [B, Hkv, N, Dv] -> [B, 1, Hq, Dv].

        Args: as in `sparse_decode.attend`; held: the cache layer that stores k and v, a dynamic one on the GPU.
        Returns: None if the call is not supported here; the cache then has the same keys and values.
        """
        if not isinstance(held, CodedDynamicLayer) or held.on_host or held.keys is not k or held.values is not v:
            return None
        own, n = self._functions(q, k, v), k.shape[2]
        if own is None or n < self._shortest or not (self._coefficients is None or held.moments.cover(q, k)):
            return None
        room, missing = held.room_for_code()
        if not missing:
            return None
        # 1. encode
        code = room[:, :, n - 1 : n]
        planes, weights = encode_cuda.step(own, k[:, :, n - 1 :], code, q, self._per_query_head)
        held.wrote_code()
        # 2. select
        sink, recent, reads = self.budget.sink, self.budget.recent, self.budget.count_row(n)
        self._tally.add(len(q) * q.shape[1] * reads, len(q) * q.shape[1] * n)
        count = max(0, reads - sink - recent)
        among = None, None, n, 0, sink, recent, False, 0, None, None
        indices = SEARCH.search(planes, room[:, :, None, :n], count, None, weights, *among)[1]
        # 3. remainder
        left_out = _NO_REMAINDER
        if self._coefficients is not None:
            coefficients, slopes = self._coefficients.on(q.device, scaling)
            left_out = coefficients, *held.moments.step_on_device(q, slopes, k, v), None
        # 4. attend
        return gather.OPERATORS.gather(q, k, v, indices, scaling, softcap, sinks, *left_out, sink, recent, None)

    def _functions(self, q: Tensor, k: Tensor, v: Tensor) -> LayerHasher | None:
        """Return the hash functions on the device of a call's tensors; None if the operators do not support them."""
        alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
        if self._placed is None or not alike or k.requires_grad or v.requires_grad:
            return None
        own = self._placed.layer(self.layer, q.device)
        sizes = (q.shape[1], k.shape[1], v.shape[1], k.shape[3]) == (own.hq, own.hkv, own.hkv, own.d)
        return own if sizes and encode_cuda.supports(own, q) else None
