"""Divide one budget of tokens among the KV heads of each layer, by what their selections cost (eq. 23).

The cost of a head is the squared error of the layer's output through that head's part of the output projection. It is
measured at a few budgets, on captured rows of dense contexts, and falls about as a power of the budget.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hashtrain.artefact.hasher import Hasher
from hashtrain.data.captured import Capture
from hashtrain.evaluation.remainder import attend, grouped_product
from hashtrain.layers import LayerHasher
from hashtrain.training.target import logits

LEAST_SHARE, MOST_SHARE = 0.5, 2.0
"""Costs are of few rows: wider bounds lost more on other text than they gained (docs/log.md, 2026-11-25)."""
FACTORS = tuple(2 ** (n / 2) for n in range(-3, 4))
"""Budgets at which a head's error is measured, relative to the budget that is divided."""
CONTEXTS, ROWS = 3, 128
"""Number of training contexts that errors are measured on, and of rows in each."""
_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""Names of the output projection in attention modules; without one, errors are those of attention itself."""
Project = Callable[[Tensor], Tensor]


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
    low, high = ((slopes - torch.tensor(share).log() / powers) for share in (MOST_SHARE, LEAST_SHARE))
    low, high = low.min(), high.max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle).mean() < 1 else (middle, high)
    return at(low)


def head_shares(
    model: PreTrainedModel, hasher: Hasher, data: Capture, fraction: float = 0.02, seed: int = 0
) -> tuple[tuple[float, ...], ...]:
    """Divide each layer's budget among its KV heads so that the squared error of its output is least.

    Args:
        model: the model of the hasher, all of whose layers have full attention.
        data: captured training contexts; the first `CONTEXTS` are used, which must hold all queries and values.
        fraction: the budget that is divided, of each row's visible tokens (eq. 7); seed: draws the rows.
    Returns: for each layer the budgets of its KV heads relative to their mean, for `HasherConfig.head_shares`.
    """
    most = sum(fraction * factor <= 1 for factor in FACTORS)  # beyond, a head reads all tokens
    return tuple(
        tuple(round(share, 3) for share in divide(*fitted(errors[:, :most])).tolist())
        for errors in head_errors(model, hasher, data, fraction, seed)
    )


def fitted(errors: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a power law to each head's errors at the first n of `FACTORS`, [H, n]: its error at 1, and its slope."""
    errors = errors.double()
    logs = errors.clamp(min=max(1e-9 * errors.max().item(), 1e-300)).log()
    x = torch.tensor(FACTORS[: errors.shape[1]], dtype=torch.float64).log()
    away = x - x.mean()
    slopes = ((logs * away).sum(1) / away.square().sum()).clamp(max=-0.1)
    return (logs.mean(1) - slopes * x.mean()).exp(), -slopes


@torch.inference_mode()
def head_errors(model: PreTrainedModel, hasher: Hasher, data: Capture, fraction: float, seed: int) -> list[Tensor]:
    """Measure each KV head's squared error of the attention output: for each layer float64 [Hkv, 7], sums over rows."""
    device, project, draw = model.device, _projections(model), torch.Generator().manual_seed(seed)
    lengths = [data.keys(context, 0)[0].shape[2] for context in range(min(CONTEXTS, len(data)))]
    rows = [torch.randint(t // 4, t, (ROWS,), generator=draw) for t in lengths]
    found: list[Tensor] = []
    for layer in range(hasher.config.shape.num_layers):
        total = torch.zeros(())
        for context, at in enumerate(rows):
            k, scaling = data.keys(context, layer)
            read = (data.queries(context, layer, at), k, data.values(context, layer), at)
            q, k, v, where = (x.to(device) for x in read)
            given = scaling, fraction, project.get(layer), model.dtype
            total = total + _errors(hasher.layer(layer), q, k, v, where, *given).cpu()
        found.append(total)
    return found


def _projections(model: PreTrainedModel) -> dict[int, Project]:
    """Return the output projection of each layer's attention module, as far as it has a usual name."""
    found: dict[int, Project] = {}
    for module in cast("list[Any]", [*cast(Any, model).get_decoder().modules()]):  # not those of a vision tower
        layer = getattr(module, "layer_idx", None)
        project = next((x for name in _OUTPUT if (x := getattr(module, name, None)) is not None), None)
        if isinstance(layer, int) and project is not None:
            found.setdefault(layer, project)
    return found


def _errors(
    hasher: LayerHasher, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scaling: float, fraction: float,
    project: Project | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the squared errors of a layer's KV heads, float64 [Hkv, 7]; arguments as in `measure`.

    Args: project: the layer's output projection, of weights of this dtype.
    """
    exact = logits(q, k, rows, scaling)[0]
    dense, wanted = grouped_product(exact.softmax(-1), v[0].float()), [min(1.0, fraction * x) for x in FACTORS]
    found = attend(hasher, q, k, v, rows, scaling, wanted, exact)
    return torch.stack([_through(project, out - dense, dtype).double().square().sum((1, 2)) for out in found], 1)


def _through(project: Project | None, gap: Tensor, dtype: torch.dtype) -> Tensor:
    """Send what each KV head adds, [Hkv, G, R, Dv], through the output projection alone: [Hkv, R, hidden]."""
    hkv, group, rows, dim = gap.shape
    if project is None:
        return gap.transpose(1, 2).flatten(2)
    alone = gap.new_zeros(hkv, rows, hkv, group * dim)
    for head in range(hkv):
        alone[head, :, head] = gap[head].transpose(0, 1).flatten(1)
    alone = alone.flatten(2).to(dtype)
    return project(alone) - project(torch.zeros_like(alone[:1, :1]))  # without its bias
