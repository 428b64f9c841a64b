"""The attention function that Hugging Face calls, and the rule that says which query rows are sparse.

A hook on each sparse attention module hands this function one more keyword, `sparse_decode`: the `Call`. It travels
with the arguments because module state is shared by threads and context variables break compilation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_decode.attend import attend
from sparse_decode.budget import Budget
from sparse_decode.cache import CodedLayer
from sparse_decode.positions import count_visible, first_visible, last_visible, merge, visible_rows
from sparse_decode.select import Rows, Selector

# Hugging Face looks for "flash", "sdpa" and "flex" inside these names: keep such words out.
NAMES = {"sdpa": "sparse_decode", "eager": "sparse_decode_eager"}
"""Our attention by the dense one it replaces."""

KEYWORD = "sparse_decode"

_CHUNK_SCORES = 1 << 23  # scores at once, B x Hq x rows x N: 32 MiB of int32 or float32, whatever the context
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass
class Tally:
    """Exact running counts of tokens selected and visible, by layer, over rows and index sets."""

    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, layer: int, selected: int, visible: int) -> None:
        """Count one more piece of work."""
        with self._lock:
            before = self.counts.get(layer, (0, 0))
            self.counts[layer] = (before[0] + selected, before[1] + visible)

    def reset(self) -> None:
        """Forget all counts."""
        with self._lock:
            self.counts.clear()


@dataclass(frozen=True)
class Plan:
    """What one attachment does in every sparse layer."""

    selector: Selector
    budget: Budget
    sparse_from: int | None
    """Rows from this position of their own sequence on are sparse; None: the rows of decode steps are."""
    decode_rows: int
    """A call with a past and at most this many query rows is a decode step."""
    tally: Tally

    def may_be_sparse(self, n_queries: int, n: int) -> bool:
        """Say whether a call of this size can hold a sparse row."""
        if self.sparse_from is not None:
            return n > self.sparse_from
        return n_queries <= self.decode_rows and n_queries < n


@dataclass(frozen=True)
class Call:
    """What the attention function must know of one call: the plan, the layer, and where its codes are."""

    plan: Plan
    layer: int
    cache: CodedLayer | None

    def codes(self, k: Tensor) -> Tensor | None:
        """Return the codes of the cached keys k [B, Hkv, N, D]: carried by the cache, or hashed now without one."""
        if not self.plan.selector.needs_codes:
            return None
        return self.plan.selector.encode_keys(self.layer, k) if self.cache is None else self.cache.codes


def register() -> None:
    """Make our names known to Hugging Face: the attention, and the mask without which padding would be ignored."""
    for dense_name, mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
        AttentionInterface.register(NAMES[dense_name], attention)
        AttentionMaskInterface.register(NAMES[dense_name], mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, sparsely where the plan says so.

    Args: as Hugging Face gives them; query [B, Hq, Q, D], key and value [B, Hkv, N, D], mask [B, 1, Q, N] or None.
    Returns: [B, Q, Hq, D], and attention weights only from dense eager attention.
    """
    call: Call | None = kwargs.pop(KEYWORD, None)
    n_queries, n = query.shape[2], key.shape[2]
    if call is None or not call.plan.may_be_sparse(n_queries, n):
        return _dense(module, query, key, value, attention_mask, scaling, dropout, kwargs)
    _refuse(kwargs, dropout)
    factor = float(query.shape[3] ** -0.5 if scaling is None else scaling)
    visible = count_visible(attention_mask, query.shape[0], n_queries, n, query.device, _chunk(query, n))
    start = call.plan.sparse_from
    # A padded row is as far along as the tokens it sees, so it turns sparse where it would alone.
    sparse = torch.ones_like(visible, dtype=torch.bool) if start is None else visible > start
    out = _sparse(call, query, key, value, attention_mask, visible, sparse, factor)
    if sparse.all():
        return out, None
    dense, _ = _dense(module, query, key, value, attention_mask, scaling, dropout, kwargs)
    return torch.where(sparse[..., None, None], out, dense), None


def _sparse(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, visible: Tensor, sparse: Tensor, scaling: float
) -> Tensor:
    """Attend sparsely in the rows `sparse` [B, Q], a chunk of rows at a time; the others stay zero. [B, Q, Hq, Dv]"""
    batch, hq, n_queries, _ = q.shape
    n, codes = k.shape[2], call.codes(k)
    counts = call.plan.budget.count(visible, visible[:, -1:]).masked_fill(~sparse, 0)
    chunk = _chunk(q, n)
    pieces = []
    for first in range(0, n_queries, chunk):
        last = min(first + chunk, n_queries)
        if not sparse[:, first:last].any():
            pieces.append(q.new_zeros(batch, last - first, hq, v.shape[3]))
            continue
        seen = visible_rows(mask, first, last, n_queries, n, q.device)
        end = n if mask is not None else n - n_queries + last  # without a mask, these rows see nothing from there on
        rows = Rows(
            call.layer,
            q[:, :, first:last],
            k[:, :, :end],
            None if codes is None else codes[:, :, :end],
            None if seen is None else seen[..., :end],
            counts[:, first:last],
            scaling,
        )
        indices = _select(call.plan, rows, visible[:, first:last], sparse[:, first:last])
        selected = int((indices >= 0).sum())
        seen_tokens = int(visible[:, first:last].masked_fill(~sparse[:, first:last], 0).sum())
        call.plan.tally.add(call.layer, selected, seen_tokens * indices.shape[1])
        pieces.append(attend(rows.q, k, v, indices, scaling))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _select(plan: Plan, rows: Rows, visible: Tensor, sparse: Tensor) -> Tensor:
    """Choose tokens by the selector, sink and recent: int64 [B, H, Q, K]."""
    indices, n = plan.selector.select(rows), rows.k.shape[2]
    for size, listed in ((plan.budget.sink, first_visible), (plan.budget.recent, last_visible)):
        if size:
            indices = merge(indices, listed(rows.visible, visible.clamp(max=size).masked_fill(~sparse, 0), n), n)
    return indices


def _chunk(q: Tensor, n: int) -> int:
    return max(1, _CHUNK_SCORES // (q.shape[0] * q.shape[1] * n))


def _dense(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call the attention that the model would have called without us."""
    if module.config._attn_implementation == NAMES["eager"]:
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function(module, q, k, v, mask, scaling=scaling, dropout=dropout, **kwargs)


def _refuse(kwargs: dict[str, Any], dropout: float) -> None:
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"sparse attention does not support {name} yet; leave this model dense")
    if dropout:
        raise ValueError(f"sparse attention has no dropout, got {dropout}; call model.eval() first")
