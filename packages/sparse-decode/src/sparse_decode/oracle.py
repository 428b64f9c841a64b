"""The oracle: the selector that computes the exact attention, an upper bound for all others."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from typing import cast

import hashcore
import torch
from torch import Tensor

from sparse_decode.select import NoCodes, Rows

_WIDENED = 1 << 28  # bytes of keys converted to float32 per chunk


class OracleSelector(NoCodes):
    """Selects by the exact attention probabilities (eq. 9), as a perfect selector would.

    Args: per_query_head: one index set per query head; by default one per KV head, by its group's summed probabilities.
    """

    def __init__(self, per_query_head: bool = False):
        self.per_query_head = per_query_head

    def select(self, rows: Rows) -> Tensor:
        (batch, hq, n_rows, dim), (hkv, n) = rows.q.shape, rows.k.shape[1:3]
        grouped = rows.q.detach().float().reshape(batch, hkv, -1, dim)
        tokens = n if rows.k.dtype == torch.float32 else max(1, _WIDENED // (4 * rows.k[:, :, :1].numel() + 1))
        chunks = cast("tuple[Tensor, ...]", rows.k.detach().split(tokens, dim=2))
        parts = [grouped @ chunk.float().transpose(-1, -2) for chunk in chunks]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        logits = logits.mul_(rows.scaling).view(batch, hq, n_rows, n)
        if rows.softcap is not None:
            logits = logits.div_(rows.softcap).tanh_().mul_(rows.softcap)
        logits.masked_fill_(~rows.visible, -torch.inf)
        p = logits.softmax(-1)
        if rows.sinks is not None:  # a head's sink takes part of its probability, the same for every token
            p *= (logits.logsumexp(-1, keepdim=True) - rows.sinks.float()[:, None, None]).sigmoid()
        if not self.per_query_head:
            p = cast(Tensor, p.unflatten(1, (hkv, hq // hkv))).sum(2)
        p = p.masked_fill_(~rows.candidates(), -1.0)  # below every candidate, even if p rounds to 0
        return best_floats(p, rows.counts[:, None].expand(p.shape[:-1]))


def best_floats(values: Tensor, counts: Tensor) -> Tensor:
    """Return the indices of the largest values of each row.

    Args:
        values: float32 [..., N] without NaN.
        counts: number of indices per row, integers [...], at most N.
    Returns: int64 [..., K], K the largest count: ascending indices, then -1; ties go to the lowest index.
    """
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    return hashcore.topk(torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits), counts)[1]  # integers of the same order
