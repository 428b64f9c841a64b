"""The hashers that a run can train: ours, the paper's as we deploy it, ablations, and the paper's exact setup."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """One hasher that a run can train; `name` is its folder below --out."""

    name: str
    variant: str
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `hashtrain.HasherConfig` that differ from the run's and from the defaults."""
    training: dict[str, Any] = field(default_factory=dict)
    """The same of `hashtrain.TrainConfig`. Learning rates are tuned: docs/results/learning_rates.json."""
    digits: int = 5
    """Most bits of one dimension where `transform` starts. Untrained, 5 find most (SmolLM2); trained, 3 do: the
    weights of many digits differ too much for a query's planes (docs/log.md, 2026-11-25)."""
    trained: bool = True
    summary: str = ""
    """What an ablation changes."""

    @property
    def learning_rate(self) -> float:
        """Its peak learning rate."""
        return self.training.get("learning_rate", 6e-3)

    @property
    def seen(self) -> bool:
        """Whether it is made from queries and keys; the others are random."""
        return self.trained or self.variant == "transform"


def _rate(rate: float, **more: Any) -> dict[str, Any]:
    return {"learning_rate": rate, **more}


RECIPES = (
    Recipe("lsh", "lsh", trained=False),
    Recipe("paper", "paper", training=_rate(3e-3)),
    Recipe("transform", "transform", training=_rate(3e-3, by_attention=True), digits=3),
)
# `planes`, from which `transform` came, and what the paper compares its hash with: included in `--only all`.
ABLATIONS = (
    Recipe("planes", "planes", summary="one key code per KV head, queries in bit planes"),
    Recipe("linear", "linear", summary="a rotation, trained as in the paper"),
    Recipe("paper-untrained", "paper", trained=False, summary="the paper's MLP, untrained"),
    Recipe("paper-straight", "paper", {"estimator": "straight-through"}, _rate(1e-2), summary="our estimator"),
    Recipe("paper-reconstruction", "paper", {}, _rate(3e-3, loss="reconstruction"), summary="paper, other loss"),
    Recipe("transform-start", "transform", trained=False, summary="the start of transform: two measured moments"),
    Recipe("planes-reconstruction", "planes", {}, _rate(8e-2, loss="reconstruction"), summary="planes, other loss"),
)

# The paper's exact setup: a two-layer MLP of width 128 per query head with a Gaussian start, targets of 2 % of the full
# length, every row trained, no token excluded; `evals` gives each query head its own selection. Every other name here
# changes one thing in `paper-exact`.
_MLP = {"init": "gaussian", "hidden": 128}
_PLAIN = _rate(1e-3, of="length", sink=0, recent=0, min_position=0)
_BUILT, _SQUARED = {**_PLAIN, "loss": "reconstruction"}, {**_PLAIN, "loss": "mse"}
EXACT = (
    Recipe("paper-exact", "paper", _MLP, _PLAIN, summary="the paper to the letter"),
    Recipe("paper-exact-untrained", "paper", _MLP, _PLAIN, trained=False, summary="paper-exact, untrained"),
    Recipe("paper-exact-mse", "paper", _MLP, _SQUARED, summary="paper-exact, squared error of scores"),
    Recipe("paper-exact-reconstruction", "paper", _MLP, _BUILT, summary="paper-exact, correlation of scores"),
    Recipe("linear-exact", "linear", {}, _PLAIN, summary="linear, trained as paper-exact"),
)
ALL = (*RECIPES, *ABLATIONS, *EXACT)
"""In table order."""
