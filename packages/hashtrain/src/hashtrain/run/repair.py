"""Repair heads of `transform` that training made worse, or that fail: each gets the functions that measure best."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hashtrain.artefact.hasher import make_layer
from hashtrain.config import HasherConfig
from hashtrain.data.captured import Capture
from hashtrain.evaluation.evaluate import fails
from hashtrain.evaluation.metrics import quality_of_scores
from hashtrain.layers import LayerHasher
from hashtrain.layers.transform import Transform
from hashtrain.training.target import attention

OTHER_DIGITS = (4, 5, 6, 8, 3)
"""Digit limits of the starts that are tried for failing heads, but for the one that training began with."""
_CONTEXTS, _ROWS, _AT_ONCE = 4, 256, 32


class Repair(NamedTuple):
    """What `repair` did to a layer."""

    taken: dict[int, str]
    """For each replaced KV head, what it got."""
    failing: list[int]
    """KV heads that fail on rows of the training contexts, whatever they got."""


@torch.no_grad()
def repair(
    hasher: LayerHasher,
    layer: int,
    data: Capture,
    config: HasherConfig,
    seed: int,
    digits: int,
    fraction: float,
    keys_trained: dict[str, Tensor] | None = None,
) -> Repair:
    """Replace each KV head's functions, in place, if the keys-only weights or an untrained start measure better.

    Every head is compared with the weights after the keys-only steps and a start of `digits`; failing heads
    (`hashtrain.evaluation.evaluate.fails`) also with starts of `OTHER_DIGITS`. Measured on rows of the training
    contexts, a head that does not fail wins over one that does, then the higher mean attention mass wins. LSH is not
    tried: it finds less than the start of `digits` (docs/adr/0012).

    Args:
        config, seed: what the layer was made from (`hashtrain.artefact.hasher.make_layer`).
        keys_trained: `hashtrain.training.trainer.Training.keys_trained`.
    Returns: the replaced heads and those that fail. Variants other than `transform` are neither measured nor changed.
    """
    if not isinstance(hasher, Transform):
        return Repair({}, [])
    makers: list[tuple[str, Callable[[LayerHasher], object]]] = [
        (f"start of {most} digits", lambda other, most=most: other.start(data, layer, most))
        for most in (digits, *(n for n in OTHER_DIGITS if n != digits))
    ]
    if keys_trained:
        makers.insert(0, ("keys alone trained", lambda other: other.load_state_dict(keys_trained)))
    count = 2 if keys_trained else 1  # for all heads; the others only for those that fail

    def made(make: Callable[[LayerHasher], object]) -> LayerHasher:
        other = make_layer(config, layer, seed).to(hasher.remainder.device)
        make(other)
        return other

    def take_better(other: LayerHasher, found: list[Tensor], name: str, heads: Sequence[int]) -> None:
        for head in heads:
            if _rank(found[head]) > _rank(best[head]):
                hasher.take_head(other, head)
                best[head], taken[head] = found[head], name

    taken: dict[int, str] = {}
    others = [made(make) for _, make in makers[:count]]
    best, *masses = _masses([hasher, *others], layer, data, fraction)
    for (name, _), other, found in zip(makers, others, masses, strict=False):
        take_better(other, found, name, range(hasher.hkv))
    for name, make in makers[count:]:
        if wanted := [head for head, mass in enumerate(best) if fails(mass)]:
            other = made(make)
            (found,) = _masses([other], layer, data, fraction)
            take_better(other, found, name, wanted)
    return Repair(taken, [head for head, mass in enumerate(best) if fails(mass)])


def _rank(mass: Tensor) -> tuple[bool, float]:
    return not fails(mass), mass.mean().item()


def _masses(hashers: Sequence[LayerHasher], layer: int, data: Capture, fraction: float) -> list[list[Tensor]]:
    """Return the mass that rows of some training contexts find, by hasher and KV head; all see the same attention."""
    draw, device = torch.Generator().manual_seed(layer), hashers[0].remainder.device
    rows_of: list[list[Tensor]] = [[] for _ in hashers]
    for context in range(min(len(data), _CONTEXTS)):
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
