"""Product quantisation (Jegou, Douze and Schmid 2011) in the queries' metric, with exact tables of each query.

Coordinates are the principal ones of the keys, dealt to the subspaces so that the product of the variances is about the
same in each (the parametric form of optimised product quantisation: Ge, He, Ke and Sun 2013, section 3.2).
"""

import torch
from torch import Tensor

from evals.codes.base import BYTES, Metric, Training, principal

_ROUNDS = 10
_AT_ONCE = 2048  # keys whose distances to all centroids are in the cache together


class ProductCode:
    """Each of `parts` subspaces is stored as the number of its nearest centroid, of 8 * 16 / parts bits.

    `parts` is 16 (256 centroids each) or 32 (16 each, the form of FastScan).
    """

    def __init__(self, training: Training, parts: int):
        self.metric: Metric = Metric(training)
        y = self.metric.keys(training.keys)
        variances, directions = principal(y)
        self.parts: int = parts
        self.directions: Tensor = directions[:, balanced(variances, parts)]
        self.centroids: Tensor = kmeans(self._split(y), 2 ** (8 * BYTES // parts), training.generator)

    def _split(self, y: Tensor) -> Tensor:
        """Return the coordinates of each subspace: [parts, T, D / parts]."""
        return (y @ self.directions).unflatten(-1, (self.parts, -1)).movedim(-2, 0)

    def encode(self, k: Tensor) -> Tensor:
        numbers = nearest(self._split(self.metric.keys(k)), self.centroids).T
        pairs = numbers.unflatten(-1, (BYTES, -1))
        return (pairs * torch.tensor([1, 16][: pairs.shape[-1]], device=k.device)).sum(-1).to(torch.uint8)

    def decode(self, stored: Tensor) -> Tensor:
        """See `Code.decode`: adding up the entries of a query's tables is the product with the centroids."""
        numbers = stored.long()
        if self.parts > BYTES:
            numbers = torch.stack([numbers % 16, numbers // 16], -1).flatten(-2)
        return self.centroids[torch.arange(self.parts, device=stored.device), numbers].flatten(-2)

    def query(self, q: Tensor) -> Tensor:
        return self.metric.queries(q) @ self.directions


def balanced(variances: Tensor, parts: int) -> Tensor:
    """Deal coordinates to `parts` sets of equal size, the greatest first, each to the set with the least product.

    Args: variances: [D], in descending order. Returns: int64 [D], the coordinates of one set after the other.
    """
    size = len(variances) // parts
    sets: list[list[int]] = [[] for _ in range(parts)]
    products = [0.0] * parts  # as logarithms, relative to the least variance, so that an empty set is least
    logs = (variances / variances.min().clamp(min=1e-30)).clamp(min=1).log().tolist()
    for number, log in enumerate(logs):
        at = min((i for i in range(parts) if len(sets[i]) < size), key=lambda i: products[i])
        sets[at].append(number)
        products[at] += log
    return torch.tensor(sets, device=variances.device).flatten()


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """Return the nearest centroid of each vector.

    Args: x: [parts, T, d]; centroids: [parts, C, d]. Returns: int64 [parts, T].
    """
    half = centroids.square().sum(-1)[..., None, :] / 2
    found = [
        torch.cat([torch.baddbmm(h, part[None], c.mT[None], alpha=-1)[0].argmin(-1) for part in of.split(_AT_ONCE)])
        for of, c, h in zip(x, centroids, half[:, None], strict=True)
    ]
    return torch.stack(found)


def kmeans(x: Tensor, count: int, generator: torch.Generator, rounds: int = _ROUNDS) -> Tensor:
    """Fit `count` centroids to the vectors of each subspace by Lloyd's algorithm: [parts, count, d].

    Args: x: [parts, T, d], T at least `count`. A centroid that no vector is nearest to moves to a random vector.
    """
    drawn = torch.randperm(x.shape[1], generator=generator)[:count].to(x.device)
    centroids = x[:, drawn].clone()
    for _ in range(rounds):
        numbers = nearest(x, centroids)
        sums = torch.zeros_like(centroids).scatter_add_(1, numbers[..., None].expand_as(x), x)
        sizes = torch.zeros_like(centroids[..., 0]).scatter_add_(1, numbers, torch.ones_like(x[..., 0]))
        again = torch.randint(x.shape[1], (count,), generator=generator).to(x.device)
        centroids = torch.where(sizes[..., None] > 0, sums / sizes[..., None].clamp(min=1), x[:, again])
    return centroids
