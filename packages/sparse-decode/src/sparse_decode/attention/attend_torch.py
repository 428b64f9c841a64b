"""Attention over selected tokens with plain torch operations: the oracle of the tests.

Equations and layouts are those of attend.py.
"""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scaling: float, *, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `attend` with plain torch operations, without a remainder."""
    wanted = indices.repeat_interleave(q.shape[1] // indices.shape[1], 1)
    dead, logits = wanted < 0, _logits(q, k, wanted, scaling, softcap, sinks)
    read = _gathered(v, wanted).float().masked_fill(dead[..., None], 0)
    p = logits.softmax(-1)[..., : dead.shape[-1]].masked_fill(dead, 0)
    return (p[..., None] * read).sum(-2).transpose(1, 2).to(q.dtype)


def _logits(
    q: Tensor, k: Tensor, wanted: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return the logits of tokens `wanted` [B, Hq, Q, K], -inf in unused slots; with sinks, theirs is one more."""
    logits = (q.float()[..., None, :] * _gathered(k, wanted).float()).sum(-1) * scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(wanted < 0, -torch.inf)
    if sinks is None:
        return logits
    return torch.cat([logits, sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)


def _gathered(x: Tensor, wanted: Tensor) -> Tensor:
    """Gather rows of x [B, Hkv, N, D]: [B, H, Q, K, D] for `wanted` [B, H, Q, K]; unused slots get an arbitrary row."""
    heads = wanted.shape[1]
    batch = torch.arange(len(x), device=x.device)[:, None, None, None]
    head = (torch.arange(heads, device=x.device) // (heads // x.shape[1]))[:, None, None]
    return x[batch, head, wanted.clamp(min=0).to(x.device)].to(wanted.device)
