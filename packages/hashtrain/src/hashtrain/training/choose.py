"""Choose each head's weights: of what training went through, those that find most on rows of the training contexts."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hashtrain.data.captured import Capture
from hashtrain.evaluation.metrics import fails, quality_of_scores
from hashtrain.layers import LayerHasher
from hashtrain.training.target import attention

CONTEXTS, _ROWS, _AT_ONCE = 4, 256, 32


@torch.no_grad()
def choose(
    hasher: LayerHasher, others: Mapping[str, LayerHasher], layer: int, data: Capture, fraction: float
) -> dict[int, str]:
    """Give each KV head of `hasher`, in place, the functions that measure best: its own, or those of one of `others`.

    A head that does not fail (`hashtrain.evaluation.metrics.fails`) wins over one that does, then the higher mean
    attention mass wins. What was tried and gained nothing: LSH (docs/adr/0012), starts of other digits.

    Returns: for each KV head whose own functions were not the best, the name of what it got.
    """
    best, *masses = _masses([hasher, *others.values()], layer, data, fraction)
    taken: dict[int, str] = {}
    for (name, other), found in zip(others.items(), masses, strict=True):
        for head in range(hasher.hkv):
            if _rank(found[head]) > _rank(best[head]):
                hasher.take_head(other, head)
                best[head], taken[head] = found[head], name
    return taken


def _rank(mass: Tensor) -> tuple[bool, float]:
    return not fails(mass), mass.mean().item()


def _masses(hashers: Sequence[LayerHasher], layer: int, data: Capture, fraction: float) -> list[list[Tensor]]:
    """Return the mass that rows of some training contexts find, by hasher and KV head; all see the same attention."""
    draw, device = torch.Generator().manual_seed(layer), hashers[0].remainder.device
    rows_of: list[list[Tensor]] = [[] for _ in hashers]
    for context in range(min(len(data), CONTEXTS)):
        k, scaling = data.keys(context, layer)
        rows = torch.randint(k.shape[2] // 4, k.shape[2], (_ROWS,), generator=draw, device="cpu")
        q = data.queries(context, layer, rows)
        q, k, rows = (x.to(device) for x in (q, k, rows))
        codes = [hasher.encode_keys(k) for hasher in hashers]  # once, not for each part of the rows
        for some, part in zip(q.split(_AT_ONCE, 2), rows.split(_AT_ONCE), strict=True):
            some = some.contiguous()
            p = attention(some, k, part, scaling)
            for hasher, keys, found in zip(hashers, codes, rows_of, strict=True):
                mass = quality_of_scores(hasher.scores_of(some, keys), p, part, fraction).mass
                found.append(mass[0].double().cpu())
    return [list(torch.cat(found, dim=1)) for found in rows_of]
