"""Scores of the keys of a layer, by every code: for a whole group of query heads, and for each head by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hashtrain.layers import LayerHasher
from hashtrain.layers.surrogate import quantised
from hashtrain.layers.transform import Transform
from torch import Tensor

from evals.codes.base import BYTES, Code

_STEPS = 8


class Scores(NamedTuple):
    """Higher is better."""

    added: Tensor
    """Of a group's queries added up, [1, Hkv, R, T]: integers of the deployed search, or float32."""
    single: Tensor
    """Of each query head, float32 [1, Hq, R, T]: estimates of q . k, up to a factor per head and a constant per row."""


Scorer = Callable[[Tensor, Tensor], Scores]
"""Scores queries [1, Hq, R, D] against keys [1, Hkv, T, D] of one layer by what a code stores of the keys."""


def exact(q: Tensor, k: Tensor) -> Scores:
    """Score by whole keys: what a sum over the group costs without any code."""
    q, k = q.float(), k.float()
    grouped = q.unflatten(1, (k.shape[1], -1))
    return Scores(grouped.sum(2) @ k.mT, (grouped @ k[:, :, None].mT).flatten(1, 2))


@dataclass(frozen=True)
class Coded:
    """Scores by a code of each KV head; only the stored bytes of a key are used."""

    codes: list[Code]

    def __call__(self, q: Tensor, k: Tensor) -> Scores:
        """See `Scorer`. Raises: ValueError if a code stores more or less than 16 bytes a key."""
        parts = []
        for code, queries, keys in zip(self.codes, q[0].unflatten(0, (k.shape[1], -1)), k[0], strict=True):
            stored = code.encode(keys.float())
            if stored.dtype != torch.uint8 or stored.shape != (len(keys), BYTES):
                raise ValueError(f"expected {BYTES} bytes a key, got {stored.dtype} {[*stored.shape]}")
            decoded, queries = code.decode(stored), queries.float()
            parts.append((code.query(queries.sum(0)) @ decoded.mT, code.query(queries) @ decoded.mT))
        added, single = (torch.stack(x)[None] for x in zip(*parts, strict=True))
        return Scores(added, single.flatten(1, 2))


@dataclass(frozen=True)
class Hashed:
    """Scores by a hasher, as deployed for the group; for each head with its own planes, in units of its weights."""

    layer: LayerHasher

    def __call__(self, q: Tensor, k: Tensor) -> Scores:
        added = self.layer.scores(q, k)
        if not isinstance(self.layer, Transform):
            return Scores(added, self.layer.scores(q, k, per_query_head=True).float())
        # The planes of each row have a scale of their own, so whole scores of a head's rows are not comparable.
        weights = quantised(self.layer.query_weight(q, per_query_head=True), self.layer.planes)[0]
        signs = self.layer.soft_keys(k.float()).repeat_interleave(q.shape[1] // k.shape[1], 1)
        return Scores(added, weights @ signs.mT)


def probabilities(single: Tensor, factors: Tensor, seen: Tensor) -> Tensor:
    """Return the sum over each group of softmax(factor * score): [1, Hkv, R, T], 0 for tokens that a row does not see.

    Args: single: [1, Hq, R, T]; factors: [Hkv, G]; seen: bool [R, T].
    """
    scaled = single * factors.flatten()[:, None, None]
    return scaled.masked_fill(~seen, -torch.inf).softmax(-1).unflatten(1, factors.shape).sum(2)


def fit_factor(single: Tensor, logits: Tensor, seen: Tensor) -> Tensor:
    """Find for each head the factor f for which softmax(f * score) is closest to softmax(logits), by KL divergence.

    Args: single, logits: [H, N, T], a head's N rows; seen: bool [N, T].
    Returns: float32 [H], above 0. The problem is convex: Newton's method, from the factor of least squares.
    """
    hidden = ~seen
    p = logits.double().masked_fill(hidden, -torch.inf).softmax(-1)
    score = single.double().masked_fill(hidden, 0)
    score = (score - score.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)).masked_fill(hidden, 0)
    norm = score.square().sum((1, 2)).clamp(min=1e-30)
    start = (score * logits.double().masked_fill(hidden, 0)).sum((1, 2)) / norm
    factor = torch.where(start > 0, start, norm.rsqrt())
    wanted = (p * score).sum(-1)
    for _ in range(_STEPS):
        own = (score * factor[:, None, None]).masked_fill(hidden, -torch.inf).softmax(-1)
        mean = (own * score).sum(-1)
        slope, curve = (mean - wanted).sum(-1), ((own * score.square()).sum(-1) - mean.square()).sum(-1)
        factor = (factor - slope / curve.clamp(min=1e-30)).clamp(factor / 4, factor * 4)
    return factor.float()
