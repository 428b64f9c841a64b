"""What sparse attention costs in each layer and KV head, and how one budget is divided among them (eq. 22, 23).

1. A layer's cost is how far a decode step's probabilities move if only that layer is sparse. Rows of a context stand in
   for decode steps after a dense prompt. Each sees the context up to its own position and no other row, so one short
   forward pass over one cache computes many steps, for any set of sparse layers.
2. A head's cost is the squared error of the layer's output through that head alone, which calibration measures at a few
   budgets (`hashtrain.evaluation.calibration`). It falls about as a power of the budget.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hashtrain.data.capture import capturing
from hashtrain.data.offsets import places
from hashtrain.data.offsets import positions as moved_to
from hashtrain.evaluation.calibration import FRACTIONS
from hashtrain.evaluation.remainder import attend, grouped_product
from hashtrain.hasher import Hasher
from hashtrain.training.target import logits

DENSE_ABOVE, MOST_DENSE = 0.02, 0.1
"""A layer stays dense if its cost, in nats of KL, is above the first; at most this share of all layers does, the
costliest first."""
GAIN_ABOVE = 0.001
"""What counts as measurably better, in nats of KL: a remainder is dropped if that lowers its layer's cost by more."""
FALLS = 1.5
"""A layer's cost falls as its budget to the power of this (1.4 to 1.6 on both models of docs/results.md)."""
LEAST_COST = 5e-5
"""Costs below this, in nats of KL, cannot be told from zero: they are means of few steps, and rounded."""
STEP_CONTEXTS, MOST_CONTEXTS, ROWS = 2, 8, 16
"""Number of training contexts that layers' costs are measured on, at least and at most, and of steps in each."""
LEAST_SHARE, MOST_SHARE = 0.5, 2.0
"""Costs are of few rows: wider bounds lost more on other text than they gained (log of d31aad51)."""


class Steps:
    """Decode steps at given positions of one context, each after a dense prompt.

    Args:
        model: a causal LM whose layers all have full attention.
        ids: the context, int64 [T]; positions: int64 [R], the tokens of it to decode.
        where: position of each of its tokens, int64 [T] (`hashtrain.data.offsets`); None: from 0 on.
    """

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, ids: Tensor, positions: Tensor, where: Tensor | None = None):
        self.model: Any = model
        device = model.device
        self.ids: Tensor = ids.to(device)
        self.positions: Tensor = positions.to(device)
        self._cache = DynamicCache(config=model.config)
        moved = moved_to(model, where)
        self.where: Tensor = self.positions if where is None else where.to(device)[self.positions]
        self.model(self.ids[None], past_key_values=self._cache, logits_to_keep=1, **moved)
        self._context = len(ids)
        self._attended: dict[int, Tensor] = {}
        self.dense: Tensor = self.log_probs(None, ())

    @torch.inference_mode()
    def log_probs(self, hasher: Hasher | None, layers: Collection[int], fraction: float = 0.02) -> Tensor:
        """Return the steps' log-probabilities [R, V] if these layers are sparse, as in deployment."""
        first = min(layers, default=-1)  # up to there, all is as in the dense pass, which comes first

        def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
            if layer < first:
                return self._attended[layer]
            out = self._attend(hasher if layer in layers else None, layer, q, k, v, scaling, fraction)
            if not layers:
                self._attended[layer] = out
            return out

        with capturing(self.model, attend_layer):
            logits = self.model(
                self.ids[None, self.positions],
                position_ids=self.where[None],
                past_key_values=self._cache,
            ).logits
        self._cache.crop(-len(self.positions))
        return logits[0].float().log_softmax(-1)

    def cost(self, hasher: Hasher, layers: Collection[int], fraction: float = 0.02) -> Tensor:
        """Return the KL divergence from dense of each step, in nats: float32 [R]."""
        sparse = self.log_probs(hasher, layers, fraction)
        return (self.dense.exp() * (self.dense - sparse)).sum(-1)

    def _attend(
        self, hasher: Hasher | None, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, fraction: float
    ) -> Tensor:
        """Attend from q [1, Hq, R, D] to the preceding context and each row's own key: [1, R, Hq, Dv]."""
        t, at, rows = self._context, self.positions, torch.arange(len(self.positions), device=q.device)
        k, v, own_keys, own = k[:, :, :t], v[:, :, :t], k[0, :, t:].float(), v[0, :, t:].float()
        exact = logits(q, k, at, scaling)[0]  # [Hkv, G, R, T]
        grouped = cast(Tensor, q[0].float().unflatten(0, (k.shape[1], -1)))
        exact[:, :, rows, at] = (grouped * own_keys[:, None]).sum(-1) * scaling
        if hasher is None:
            p, values = exact.softmax(-1), v[0].float()
            out = grouped_product(p, values) + p[:, :, rows, at][..., None] * (own - values[:, at])[:, None]
        else:
            out = attend(hasher.layer(layer), q, k, v, at, scaling, fraction, exact, own)
        return out.flatten(0, 1).transpose(0, 1)[None].to(q.dtype)


def steps_of(model: PreTrainedModel, contexts: Sequence[Tensor], seed: int, reach: int | None = None) -> list[Steps]:
    """Draw steps from the last three quarters of contexts, int64 [T] each.

    Args: reach: contexts, none of them torn, are spread over positions 0 to reach - 1; None: all begin at 0.
    """
    draw, found = torch.Generator().manual_seed(seed), []
    for number, ids in enumerate(contexts):
        rows = torch.randint(len(ids) // 4, len(ids), (ROWS,), generator=draw)
        found.append(Steps(model, ids, rows, places(number, len(ids), reach, torn=False)))
    return found


def layer_costs(
    steps: Sequence[Steps], hasher: Hasher, fraction: float, advance: Callable[[str, int], None],
    dense: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure the cost of each layer alone and of all that stay sparse; drop remainders that make a layer worse.

    Values that attention avoids may be the largest of all, as in the first layer of SmolLM2. A mean value then
    represents the unselected tokens badly, however well its weight is estimated.

    Args: dense: the layers that stay dense; None: those that cost most.
    Returns: `layers`, the mean KL of each in nats; `all`, that of the others sparse; `dense`, those that stay dense;
        `bare`, those whose remainder was dropped.
    """

    def mean(layers: Collection[int]) -> float:
        return torch.cat([at.cost(hasher, layers, fraction) for at in steps]).mean().item()

    count = hasher.config.shape.num_layers
    costs: list[float] = []
    bare: list[int] = []
    for layer in range(count):
        cost, fitted = mean((layer,)), hasher.remainder(layer)
        if fitted is not None:
            kept = fitted.clone()
            fitted.zero_()
            if (without := mean((layer,))) < cost - GAIN_ABOVE:
                cost = without
                bare.append(layer)
            else:
                fitted.copy_(kept)
        costs.append(cost)
        advance(f"cost of layer {layer}", 1)
    # The order of summation changes the last digits.
    costs = [round(cost, 4) for cost in costs]
    wanted = sorted((n for n in range(count) if costs[n] > DENSE_ABOVE), key=lambda n: -costs[n])
    dense = sorted(wanted[: int(MOST_DENSE * count)] if dense is None else dense)
    whole = round(mean([n for n in range(count) if n not in dense]), 4)
    return {"layers": costs, "all": whole, "dense": dense, "bare": bare}


def layer_shares(costs: Sequence[float], dense: Collection[int] = ()) -> tuple[float, ...]:
    """Divide a budget of tokens among layers so that the sum of their costs is least (eq. 22).

    Args: costs: of each layer alone, in nats, all measured at the same budget; dense: layers that stay dense.
    Returns: for each layer its budget relative to the mean over the others (`divide`); 1 for dense layers.
    """
    sparse = [layer for layer in range(len(costs)) if layer not in dense]
    wanted = torch.tensor([max(costs[n], LEAST_COST) for n in sparse], dtype=torch.float64, device="cpu")
    found = dict(zip(sparse, divide(wanted, torch.full_like(wanted, FALLS)).tolist(), strict=True))
    return tuple(round(found.get(layer, 1.0), 3) for layer in range(len(costs)))


def head_shares(errors: Tensor, fraction: float) -> tuple[float, ...]:
    """Divide a layer's budget among its KV heads so that the squared error of its output is least (eq. 23).

    Args:
        errors: of each head at `FRACTIONS`, [Hkv, 4], as calibration measures them.
        fraction: the budget that is divided, of each row's visible tokens.
    """
    return tuple(round(share, 3) for share in divide(*power_laws(errors, fraction)).tolist())


def divide(costs: Tensor, falls: Tensor) -> Tensor:
    """Divide one total so that the sum of costs that fall as powers of their shares is least.

    Args:
        costs: at a share of 1, above 0, float64 [N]; falls: each falls as its share to the power of minus this, [N].
    Returns: the shares, float64 [N], with mean 1, from `LEAST_SHARE` to `MOST_SHARE`.
    Source: docs/algorithm.md, eq. 22 and 23.
    """
    slopes, powers = (costs * falls).log(), 1 / (1 + falls)  # of cost per share, at a share of 1

    def at(slope: Tensor) -> Tensor:
        return ((slopes - slope) * powers).exp().clamp(LEAST_SHARE, MOST_SHARE)

    # At the least cost, a further token gains alike wherever no bound holds. All are at one bound, then at the other.
    low, high = ((slopes - math.log(share) / powers) for share in (MOST_SHARE, LEAST_SHARE))
    low, high = low.min(), high.max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle).mean() < 1 else (middle, high)
    return at(low)


def power_laws(errors: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Fit a power law to errors at `FRACTIONS`, [H, 4]. Returns each head's error at `fraction`, and how it falls."""
    errors = errors.double()
    logs = errors.clamp(min=max(1e-9 * errors.max().item(), 1e-300)).log()
    x = torch.tensor(FRACTIONS, dtype=torch.float64, device="cpu").div(fraction).log()
    away = x - x.mean()
    slopes = ((logs * away).sum(1) / away.square().sum()).clamp(max=-0.1)
    return (logs.mean(1) - slopes * x.mean()).exp(), -slopes
