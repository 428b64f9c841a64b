"""Visible tokens by rank, so that left padding does not shift the rivals' pages and windows."""

import hashcore
import torch
from sparse_decode import Rows
from torch import Tensor


def seen_by(rows: Rows) -> Tensor:
    """Return the tokens visible to each row, bool [B, Q, N]."""
    return rows.visible[:, 0].expand(len(rows.q), -1, -1)


def ranks(seen: Tensor) -> Tensor:
    """Number the tokens that any row sees from 0, int64 [B, N]; padding before them is -1."""
    return seen.any(1).cumsum(-1) - 1


def listed(wanted: Tensor) -> Tensor:
    """Convert a bool mask [B, H, Q, N] to token indices: int64 [B, H, Q, K], ascending, then -1."""
    return hashcore.topk(wanted.to(torch.int32), wanted.sum(-1))[1]
