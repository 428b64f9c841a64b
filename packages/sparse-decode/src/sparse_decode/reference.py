"""One step in plain torch operations, float64, row by row: the oracle of the tests.

It follows the equations of docs/algorithm.md and has no other source: intervals, budget, search, remainder, attention.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import math
from typing import TYPE_CHECKING, cast

import torch
from hashcore import unpack
from torch import Tensor

from sparse_decode.inputs import Inputs

if TYPE_CHECKING:
    from sparse_decode.select import HashSelector
    from sparse_decode.step import SparseLayer


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, *, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `sparse_decode.attend` (eq. 8) with plain torch operations."""
    x, out = Inputs(q, k, v, scaling, softcap, sinks), q.new_zeros(len(q), q.shape[2], q.shape[1], v.shape[3])
    for b, h, r in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        chosen = indices[b, h * indices.shape[1] // q.shape[1], r]
        out[b, r, h] = attend_row(x, b, h, r, chosen[chosen >= 0])
    return out


def attend_row(x: Inputs, b: int, h: int, r: int, tokens: Tensor, rest: "Rest | None" = None) -> Tensor:
    """Attend with query head h of row r of sequence b to some tokens, int64 [K]: [Dv] (eq. 8, and with `rest` 15)."""
    kv = h * x.k.shape[1] // x.q.shape[1]
    q, k, v = x.q[b, h, r].double(), x.k[b, kv, tokens].double(), x.v[b, kv, tokens].double()
    if not len(tokens):
        return x.v.new_zeros(x.v.shape[3])
    logits = k @ q * x.scaling
    if x.softcap is not None:
        logits = x.softcap * (logits / x.softcap).tanh()
    whole = logits if x.sinks is None else torch.cat([logits, x.sinks[h : h + 1].double()])
    out = (logits - whole.logsumexp(0)).exp() @ v
    if rest is not None and rest.visible > len(tokens):
        share = (
            rest.log_weight(q * x.scaling, logits.mean(), whole.logsumexp(0), len(tokens)) - whole.logsumexp(0)
        ).sigmoid()
        out = out + share * (rest.value - out)
    return out.to(x.q.dtype)


class Rest:
    """The remainder of a query head: all tokens start..end-1 of a sequence as one (eq. 15 and 16)."""

    def __init__(self, x: Inputs, b: int, h: int, r: int, interval: tuple[int, int], fitted: Tensor):
        """Args: fitted: the coefficients of the query head, [6] (`LayerHasher.remainder`)."""
        kv, (start, end) = h * x.k.shape[1] // x.q.shape[1], interval
        k, v = x.k[b, kv, start:end].double(), x.v[b, kv, start:end].double()
        self.visible: int = end - start
        self.mean_key: Tensor = k.mean(0)
        cov = (k - self.mean_key).T @ (v - v.mean(0)) / self.visible
        self.value: Tensor = v.mean(0) + fitted[5].double() * x.scaling * x.q[b, h, r].double() @ cov
        self._c = fitted.double()

    def log_weight(self, scaled_q: Tensor, mean: Tensor, total: Tensor, used: int) -> Tensor:
        """Return the log of the remainder's weight (eq. 15), given the selected logits' mean and log-sum-exp."""
        c, typical_selected = self._c, total - math.log(used)
        typical = (
            c[0] + c[1] * mean + c[2] * (scaled_q @ self.mean_key) + c[3] * typical_selected + c[4] * math.log(used)
        )
        return torch.minimum(typical, typical_selected) + math.log(self.visible - used)


def step_reference(layer: "SparseLayer", x: Inputs, interval: Tensor) -> Tensor:
    """Compute `SparseLayer.step` row by row, for intervals int64 [B, Q, 2]: [B, Q, Hq, Dv]."""
    out = x.q.new_zeros(len(x.q), x.q.shape[2], x.q.shape[1], x.v.shape[3])
    fitted = None if layer.remainder is None else layer.remainder.fitted
    for b, r in torch.cartesian_prod(torch.arange(len(x.q)), torch.arange(x.q.shape[2])).tolist():
        start, end = interval[b, r].tolist()
        for h, tokens in enumerate(tokens_read(layer, x, b, r, (start, end))):
            rest = None if fitted is None or end == start else Rest(x, b, h, r, (start, end), fitted[h])
            out[b, r, h] = attend_row(x, b, h, r, tokens, rest)
    return out


def tokens_read(layer: "SparseLayer", x: Inputs, b: int, r: int, interval: tuple[int, int]) -> list[Tensor]:
    """Return the tokens that each query head of a row reads, ascending (eq. 4, 6 and 7), of a hash selector."""
    (start, end), heads = interval, x.q.shape[1]
    selector = cast("HashSelector", layer.selector)
    reads = layer.budget.count_heads(end - start)
    codes = selector.encode_keys(layer.layer, x.k[b : b + 1])  # [1, H, N, W]
    planes, weights = selector.encode_queries(layer.layer, x.q[b : b + 1, :, r : r + 1])  # [1, H, 1, P, W]
    sets, found = codes.shape[1], list[Tensor]()
    sink, recent = layer.budget.sink, layer.budget.recent
    for h in range(heads):
        s = h * sets // heads
        own = reads[s if len(reads) > 1 else 0]
        low, high = min(start + sink, end), max(min(start + sink, end), end - recent)
        bits = [unpack(codes[0, s]) == unpack(plane) for plane in planes[0, s, 0]]  # [N, bits] each
        scores = torch.stack([w * same.sum(-1) for w, same in zip(weights, bits, strict=True)]).sum(0)
        ranked = scores[low:high].sort(descending=True, stable=True).indices + low  # pyright: ignore[reportAttributeAccessIssue]
        chosen = ranked[: max(0, own - sink - recent)]
        found.append(torch.cat([torch.arange(start, low), chosen.sort().values, torch.arange(high, end)]))
    return found
