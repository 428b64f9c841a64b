"""Selection by a hash function's float scores, for an ablation that keeps numbers instead of codes."""

from typing import Any

import torch
from hashtrain import Hasher
from sparse_decode import Rows
from sparse_decode.hashing.encode_cuda import PlacedHasher
from sparse_decode.oracle import best_floats
from sparse_decode.select import NoCodes
from torch import Tensor


class ScoreSelector(NoCodes):
    """Selects by float scores over all keys (`down-proj`); for quality only, because nothing is cached.

    Args: per_query_head: one set per query head, instead of one per KV head.
    """

    def __init__(self, hasher: Hasher, per_query_head: bool = False):
        self.hasher: Hasher = hasher
        self.per_query_head: bool = per_query_head
        self._placed = PlacedHasher(hasher)

    def require_match(self, model_config: Any) -> None:
        self.hasher.require_match(model_config)

    def select(self, rows: Rows) -> Tensor:
        """Choose the best `counts` candidates of each row, int64 [B, Hq or Hkv, Q, K]; see `Selector`."""
        with torch.no_grad():
            own = self._placed.layer(rows.layer, rows.q.device)
            scores = own.scores(rows.q, rows.k, self.per_query_head)
        candidates = rows.candidates()
        if candidates is not None:
            scores = scores.masked_fill(~candidates, -torch.inf)
        return best_floats(scores, rows.counts[:, None].expand(scores.shape[:-1]))
