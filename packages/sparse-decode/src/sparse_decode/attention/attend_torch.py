"""Attention over selected tokens with plain torch operations: the oracle of the tests, and attention weights.

Equations and layouts are those of attend.py.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from typing import cast

import torch
from torch import Tensor


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, *, softcap: float | None = None,
    sinks: Tensor | None = None, values: float = 1.0, stand_in: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `attend` with plain torch operations: the oracle of the tests.

    Args: those of `attend`; stand_in: the value of selected tokens whose own values are not read, [B, Hq, Q, Dv].
    """
    group = q.shape[1] // indices.shape[1]
    wanted = indices.repeat_interleave(group, 1)
    dead, logits = wanted < 0, _logits(q, k, wanted, scaling, softcap, sinks)
    read = gathered(v, wanted).float().masked_fill(dead[..., None], 0)
    every = logits.softmax(-1)
    p, of_sinks = every[..., : dead.shape[-1]].masked_fill(dead, 0), every[..., dead.shape[-1] :].sum(-1, keepdim=True)
    both = cast(Tensor, p.nan_to_num(0).unflatten(1, (indices.shape[1], -1))).sum(2).masked_fill(indices < 0, -1)
    rank = both.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    keep = ((indices >= 0).sum(-1, keepdim=True) * values).ceil()
    kept = torch.where((rank < keep).repeat_interleave(group, 1), p, 0)
    out, left = (kept[..., None] * read).sum(-2), kept.sum(-1, keepdim=True) + of_sinks
    stood_in = 0 if stand_in is None else (p - kept).sum(-1, keepdim=True) * stand_in
    out = torch.where(left == 0, 0, out / left) if stand_in is None else out + stood_in
    return out.transpose(1, 2).to(q.dtype)


def attention_weights(
    q: Tensor, k: Tensor, indices: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the attention weights of `attend`, [B, Hq, Q, N] in q's type.

    Args: as those of `attend`; k may be on another device.
    """
    n, wanted = k.shape[2], indices.repeat_interleave(q.shape[1] // indices.shape[1], 1)
    logits = _logits(q, k, wanted, scaling, softcap, sinks)
    weights = logits.softmax(-1)[..., : wanted.shape[-1]].nan_to_num(0)  # no token, no weight
    found = weights.new_zeros(*q.shape[:3], n + 1)  # unused slots write to column N
    found.scatter_(-1, torch.where(wanted < 0, n, wanted), weights)
    return found[..., :n].to(q.dtype)


def _logits(
    q: Tensor, k: Tensor, wanted: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the logits of tokens `wanted` [B, Hq, Q, K], -inf in unused slots; with sinks, theirs is one more."""
    logits = (q.float()[..., None, :] * gathered(k, wanted).float()).sum(-1) * scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(wanted < 0, -torch.inf)
    if sinks is None:
        return logits
    return torch.cat([logits, sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)


def gathered(x: Tensor, wanted: Tensor) -> Tensor:
    """Gather rows of x [B, Hkv, N, D]: [B, H, Q, K, D] for `wanted` [B, H, Q, K]; unused slots get an arbitrary row."""
    heads = wanted.shape[1]
    batch = torch.arange(len(x), device=x.device)[:, None, None, None]
    head = (torch.arange(heads, device=x.device) // (heads // x.shape[1]))[:, None, None]
    return x[batch, head, wanted.clamp(min=0).to(x.device)].to(wanted.device)
