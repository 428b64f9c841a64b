"""Visible tokens by rank, so that left padding does not shift the rivals' pages and windows."""

import hashcore
import torch
from sparse_decode import Rows
from torch import Tensor


def seen_by(rows: Rows) -> Tensor:
    """Return the tokens visible to each row, bool [B, Q, N]."""
    batch, _, n_rows, _ = rows.q.shape
    if rows.visible is None:
        return torch.ones(batch, n_rows, rows.k.shape[2], dtype=torch.bool, device=rows.q.device)
    return rows.visible[:, 0].expand(batch, -1, -1)


def ranks(seen: Tensor) -> Tensor:
    """Number the tokens that any row sees from 0, int64 [B, N]; padding before them is -1."""
    return seen.any(1).cumsum(-1) - 1


def listed(wanted: Tensor) -> Tensor:
    """Convert a bool mask [B, H, Q, N] to token indices: int64 [B, H, Q, K], ascending, then -1."""
    return hashcore.topk(wanted.to(torch.int32), wanted.sum(-1))[1]
