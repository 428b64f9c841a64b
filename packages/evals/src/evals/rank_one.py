"""What a selection leaves out by a rank-1 prior of the logits, after RESA (ICLR 2026): a rival of the remainder.

If the matrix of logits had rank 1, all queries would weigh the tokens left out alike. The value of these tokens is then
their mean under the weights of a prior query, here the mean of the rows measured at once. That is our reading of the
method, without its authors' code, and in its favour: these rows include later ones, and the total weight is the one
that is fitted for the remainder (eq. 15). Only the value differs from `+remainder`.
"""

from dataclasses import replace
from typing import Any

import torch
from hashtrain.config import RECENT, SINK
from sparse_decode import HashSelector, Rows, attend
from sparse_decode.attention.attend_inputs import LeftOut
from sparse_decode.positions import with_ends
from torch import Tensor

_AT_ONCE = 64  # rows whose selected values are gathered together


class RankOneSelector:
    """Selects like a calibrated hasher, and completes the selection by the rank-1 prior.

    Args: selector: of the hasher. sink, recent: numbers of first and last tokens that every row reads.
    """

    needs_codes = True

    def __init__(self, selector: HashSelector, sink: int = SINK, recent: int = RECENT):
        self.inner: HashSelector = selector
        self.sink: int = sink
        self.recent: int = recent

    def require_match(self, model_config: Any) -> None:
        """Raise ValueError if the hasher was made for another model."""
        self.inner.require_match(model_config)

    def encode_keys(self, layer: int, k: Tensor) -> Tensor:
        """Hash keys as the hasher does."""
        return self.inner.encode_keys(layer, k)

    def select(self, rows: Rows) -> Tensor:
        """Choose the hasher's tokens besides those that every row reads: `Selector.select`."""
        searched = (rows.counts - self.sink - self.recent).clamp(min=0)
        part = replace(rows, counts=searched, sink=self.sink, recent=self.recent, uniform_count=None)
        ends = torch.where(rows.counts > 0, _visible(rows), 0)
        return with_ends(self.inner.select(part), 0, ends, self.sink, self.recent)

    def attend(self, rows: Rows, v: Tensor, indices: Tensor) -> Tensor:
        """Attend to the selection and add the tokens left out: `AttendingSelector.attend`."""
        coefficients, left_out = self.inner.remainder(rows.layer), None
        if coefficients is not None:
            total = _visible(rows)
            seen = (total - 1).clamp(min=0)[0]
            mean_keys = rows.k.double().cumsum(2)[:, :, seen].div((seen + 1)[None, None, :, None]).float()
            left_out = LeftOut(coefficients[:, :-1], mean_keys, prior_values(rows, v, indices, seen), total)
        return attend(
            rows.q, rows.k, v, indices, rows.scaling, softcap=rows.softcap, sinks=rows.sinks, left_out=left_out
        )


def prior_values(rows: Rows, v: Tensor, indices: Tensor, positions: Tensor) -> Tensor:
    """Return the mean of the values left out under the prior's weights, float32 [1, Hq, Q, Dv].

    Args: indices: the tokens read, int64 [1, Hkv, Q, K], -1 in unused slots; positions: of the rows, int64 [Q].
    """
    hq, hkv = rows.q.shape[1], rows.k.shape[1]
    k, values = (x.repeat_interleave(hq // hkv, 1).float() for x in (rows.k, v[:, :, : rows.k.shape[2]]))
    logits = (k @ rows.q.float().mean(2)[..., None])[..., 0] * rows.scaling  # [1, Hq, N]
    weights = (logits - logits.amax(-1, keepdim=True)).exp().double()
    weighted = torch.cat([weights[..., None] * values, weights[..., None]], -1)  # the last column adds up to the weight
    sums = weighted.cumsum(2)[:, :, positions]
    head = torch.arange(hq)[:, None, None]
    for first in range(0, len(positions), _AT_ONCE):
        read = indices[0, :, first : first + _AT_ONCE].repeat_interleave(hq // hkv, 0)  # [Hq, R, K]
        taken = weighted[0][head, read.clamp(min=0)].masked_fill((read < 0)[..., None], 0).sum(2)
        sums[0, :, first : first + _AT_ONCE] -= taken
    return (sums[..., :-1] / sums[..., -1:].clamp(min=1e-30)).float()


def _visible(rows: Rows) -> Tensor:
    """Return the number of tokens that each row sees, int64 [1, Q].

    Raises: ValueError unless there is one sequence, whose rows see all tokens up to their own.
    """
    start, end = rows.span()
    if len(rows.q) != 1 or bool(start.any()):
        raise ValueError("the rank-1 prior measures one text at a time without padding, got several or a mask")
    return end.expand_as(rows.counts)
