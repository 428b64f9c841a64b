"""Fits every code of a model on contexts that are not scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from hashtrain import Hasher
from hashtrain.config import SINK
from hashtrain.data.capture import observe
from torch import Tensor
from transformers import PreTrainedModel

from evals.codes import CODES
from evals.codes.base import Training
from evals.codes.scores import Coded, Hashed, Scorer, exact, fit_factor

EXACT = "exact keys"
_ROWS = 8
"""Rows of each training context that the factors of the softmax are fitted on."""


@dataclass
class Captured:
    """What is kept of a layer's training contexts, one entry each."""

    keys: list[Tensor] = field(default_factory=list)
    """[Hkv, N, D], of `tokens`."""
    queries: list[Tensor] = field(default_factory=list)
    """[Hq, rows, D]."""
    moment: Tensor | float = 0.0
    """Sum of the second moments of the queries summed over each group, float64 [Hkv, D, D]."""
    scaling: float = 0.0


@dataclass(frozen=True)
class Fitted:
    """A code of all layers."""

    layers: Sequence[Scorer]
    factors: Sequence[Tensor]
    """Of each layer's query heads: softmax(factor * score) is closest to the exact softmax; [Hkv, G]."""


@torch.inference_mode()
def fit(
    model: PreTrainedModel,
    contexts: Sequence[Tensor],
    keys: int,
    codes: Sequence[str],
    hashers: Mapping[str, Hasher],
    seed: int,
    step: Callable[[str], None] = lambda doing: None,
) -> dict[str, Fitted]:
    """Fit codes, and the factors of their softmax and that of the hashers.

    Args:
        contexts: int64 [T] each.
        keys: tokens kept of each context, drawn at random; the first of a context are left out, as rows always read
            them.
        codes: some of `CODES`. seed: draws tokens, rows, rotations and starts.
        step: called with what is about to be done, once for each layer.
    Returns: by name: the hashers, the codes, and `EXACT`.
    """
    draw = torch.Generator().manual_seed(seed)
    at = [_drawn(len(ids), keys, draw) for ids in contexts]
    layers = _capture(model, contexts, at)
    made: dict[str, list[Scorer]] = {name: [] for name in (EXACT, *codes, *hashers)}
    factors: dict[str, list[Tensor]] = {name: [] for name in made}
    for number in sorted(layers):
        step(f"codes of layer {number}")
        layer = layers.pop(number)
        training = _training(layer, seed + number)
        for name, of in made.items():
            if name in hashers:
                of.append(Hashed(hashers[name].layer(number).to(model.device)))
            else:
                of.append(Coded([CODES[name].fit(head) for head in training]) if name != EXACT else exact)
            factors[name].append(_factors(of[-1], layer, at))
    return {name: Fitted(made[name], factors[name]) for name in made}


def _drawn(length: int, keys: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw tokens, ascending, and rows of a context from its last three quarters."""
    tokens = SINK + torch.randperm(length - SINK, generator=draw)[:keys].sort().values
    return tokens, torch.randint(length // 4, length, (_ROWS,), generator=draw)


def _capture(
    model: PreTrainedModel, contexts: Sequence[Tensor], at: Sequence[tuple[Tensor, Tensor]]
) -> dict[int, Captured]:
    found: dict[int, Captured] = {}
    for ids, (tokens, rows) in zip(contexts, at, strict=True):

        def sink(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> None:
            into = found.setdefault(layer, Captured())
            into.keys.append(k[0, :, tokens].float())  # noqa: B023 - called only in this round
            into.queries.append(q[0, :, rows].float())  # noqa: B023
            grouped = q[0].float().unflatten(0, (k.shape[1], -1)).sum(1)
            into.moment = into.moment + (grouped.mT @ grouped).double() / grouped.shape[1]
            into.scaling = scaling

        observe(model, ids, sink)
    return found


def _training(layer: Captured, seed: int) -> list[Training]:
    keys, moment = torch.cat(layer.keys, 1), torch.as_tensor(layer.moment) / len(layer.keys)
    return [Training(k, m, torch.Generator().manual_seed(seed)) for k, m in zip(keys, moment, strict=True)]


def _factors(scorer: Scorer, layer: Captured, at: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Fit a layer's factors on the kept tokens that each row sees: [Hkv, G]."""
    single, logits, seen = [], [], []
    for q, k, (tokens, rows) in zip(layer.queries, layer.keys, at, strict=True):
        single.append(scorer(q[None], k[None]).single[0])
        logits.append(exact(q[None], k[None]).single[0] * layer.scaling)
        seen.append((tokens <= rows[:, None]).to(q.device))
    found = fit_factor(torch.cat(single, 1), torch.cat(logits, 1), torch.cat(seen))
    return found.unflatten(0, (layer.keys[0].shape[0], -1))
