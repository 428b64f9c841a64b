"""The hashers that a run can train: ours, the paper's as we deploy it, ablations, and the paper's exact setup."""

from dataclasses import dataclass, replace
from typing import Literal

from hashtrain.config import RECENT, SINK, SOFTSIGN_GAMMA

Of = Literal["visible", "length"]


@dataclass(frozen=True)
class Recipe:
    """One hasher that a run can train; `name` is its folder below --out."""

    name: str
    variant: str
    init: str = "rotation"
    learning_rate: float = 6e-3
    loss: str = "ranking"
    """One of `hashtrain.training.loss.LOSSES`."""
    estimator: str = ""
    """Surrogate for the sign function in training, if not the variant's default."""
    gamma: float = SOFTSIGN_GAMMA
    """Slope of the softsign surrogate (eq. 11)."""
    beta: float = 1.0
    alpha: float = 3.0
    """Slope and margin of the ranking loss (eq. 10)."""
    max_top: int = 8
    """Target tokens drawn per row."""
    max_rest: int = 512
    """Tokens outside the target drawn per step, shared by its rows."""
    target: Of = "visible"
    """What the budget is a share of (eq. 7): each row's visible tokens, or, as in the paper, the full length."""
    ends: tuple[int, int] = (SINK, RECENT)
    """Numbers of first and last tokens excluded from pairs, because every row reads them."""
    first_trained: int | None = None
    """First row to train on; None: a sixteenth of the context, so that every target has more than a few tokens."""
    hidden: int | None = None
    """Hidden width; None: the variant's default."""
    residual: bool = False
    """Whether `paper` takes the form of the authors' published hashers."""
    keys_first: float = 0.0
    """Share of the steps, at the beginning, that train keys only."""
    digits: int = 5
    """Most bits of one dimension where `transform` starts. Untrained, 5 find most (SmolLM2); trained, 3 do: the
    weights of many digits differ too much for a query's planes (docs/log.md, 2026-11-25)."""
    bits: int | None = None
    """Code length, if not the run's."""
    trained: bool = True
    summary: str = ""
    """What an ablation changes."""


# Learning rates tuned for each hasher: docs/results/learning_rates.json.
RECIPES = (
    Recipe("lsh", "lsh", trained=False),
    Recipe("paper", "paper", "random", 3e-3),
    Recipe("transform", "transform", learning_rate=3e-3, keys_first=0.5, digits=3),
)
# `planes`, from which `transform` came, the paper's ablations and ours: included in `--only all`.
_STRAIGHT = "straight-through"
ABLATIONS = (
    Recipe("planes", "planes", summary="one key code per KV head, queries in bit planes"),
    Recipe("paper-rotation", "paper", learning_rate=3e-3, summary="paper, started as a rotation"),
    Recipe("linear", "linear", summary="a rotation, trained as in the paper"),
    Recipe("linear-straight", "linear", learning_rate=2e-2, estimator=_STRAIGHT, summary="linear, our estimator"),
    Recipe("paper-straight", "paper", "random", 1e-2, estimator=_STRAIGHT, summary="paper, our estimator"),
    Recipe(
        "planes-softsign",
        "planes",
        learning_rate=3e-3,
        estimator="softsign",
        summary="planes, the paper's estimator for keys",
    ),
    Recipe("planes-64", "planes", bits=64, learning_rate=1e-2, summary="planes with half the bits"),
    Recipe("paper-untrained", "paper", "random", trained=False, summary="the paper's MLP, untrained"),
    Recipe("paper-reconstruction", "paper", "random", 3e-3, "reconstruction", summary="paper, other loss"),
    Recipe(
        "transform-start", "transform", trained=False, summary="the untrained start of transform: two measured moments"
    ),
    Recipe("planes-reconstruction", "planes", learning_rate=8e-2, loss="reconstruction", summary="planes, other loss"),
)

# The paper's exact setup: a two-layer MLP of width 128 per query head with a Gaussian start, targets of 2 % of the full
# length, every row trained, no token excluded; `evals` gives each query head its own selection. Every other name here
# changes one thing in `paper-exact`.
_EXACT = Recipe(
    "paper-exact",
    "paper",
    "gaussian",
    1e-3,
    target="length",
    ends=(0, 0),
    first_trained=0,
    hidden=128,
    summary="the paper to the letter",
)
EXACT = (
    _EXACT,
    replace(_EXACT, name="paper-exact-untrained", trained=False, summary="paper-exact, untrained"),
    replace(_EXACT, name="paper-residual", residual=True, summary="paper-exact in the authors' published form"),
    replace(_EXACT, name="paper-exact-straight", estimator=_STRAIGHT, summary="paper-exact, our estimator"),
    replace(_EXACT, name="paper-exact-mse", loss="mse", summary="paper-exact, squared error of scores"),
    replace(
        _EXACT, name="paper-exact-reconstruction", loss="reconstruction", summary="paper-exact, correlation of scores"
    ),
    replace(_EXACT, name="linear-exact", variant="linear", init="rotation", summary="linear, trained as paper-exact"),
)
ALL = (*RECIPES, *ABLATIONS, *EXACT)
"""In table order."""
