"""Choose each head's weights: of what training went through, those that find most on rows of the training contexts."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hashtrain.data.captured import Capture
from hashtrain.evaluation.metrics import fails, layer_quality
from hashtrain.layers import LayerHasher

CONTEXTS, _ROWS = 4, 256


@torch.no_grad()
def choose(
    hasher: LayerHasher, others: Mapping[str, LayerHasher], layer: int, data: Capture, fraction: float
) -> dict[int, str]:
    """Give each KV head of `hasher`, in place, the functions that measure best: its own, or those of one of `others`.

    A head that does not fail (`hashtrain.evaluation.metrics.fails`) wins over one that does, then the higher mean
    attention mass wins. What was tried and gained nothing: LSH (docs/adr/0012), starts of other digits.

    Returns: for each KV head whose own functions were not the best, the name of what it got.
    """
    draw = torch.Generator().manual_seed(layer)
    lengths = (data.keys(context, layer)[0].shape[2] for context in range(min(len(data), CONTEXTS)))
    rows = (torch.randint(tokens // 4, tokens, (_ROWS,), generator=draw, device="cpu") for tokens in lengths)
    best, *masses = (
        list(found.mass) for found in layer_quality([hasher, *others.values()], layer, data, rows, fraction)
    )
    chosen: dict[int, str] = {}
    for (name, other), found in zip(others.items(), masses, strict=True):
        for head in range(hasher.hkv):
            if _rank(found[head]) > _rank(best[head]):
                hasher.take_head(other, head)
                best[head], chosen[head] = found[head], name
    return chosen


def _rank(mass: Tensor) -> tuple[bool, float]:
    return not fails(mass), mass.mean().item()
