"""Flags that override the recipes of a run, so that one command can produce one row of an ablation table."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from hashtrain.settings.recipes import Of, Recipe
from hashtrain.usage import UsageError, require_counts


@dataclass(frozen=True)
class Overrides:
    """Flags that override every trained hasher of a run; None keeps each hasher's own value (`recipes`)."""

    loss: Literal["ranking", "reconstruction", "mse"] | None = None
    """Training loss: `ranking` (eq. 10), or an ablation that reconstructs attention (eq. 17): `reconstruction` up to
    scale and shift, `mse` exactly. Default, here and below: each hasher's own."""
    estimator: Literal["softsign", "straight-through"] | None = None
    """Surrogate for the sign function in training (eq. 11)."""
    gamma: float | None = None
    """Slope of the softsign surrogate; the paper: 64."""
    alpha: float | None = None
    """Margin of the ranking loss; the paper: 3."""
    beta: float | None = None
    """Slope of the ranking loss; the paper: 1."""
    max_top: int | None = None
    """Target tokens drawn per row."""
    max_rest: int | None = None
    """Tokens outside the target drawn per step, shared by its rows."""
    target: Of | None = None
    """What --fraction is a share of in training: each row's visible tokens, or, as in the paper, the full length."""
    first_trained: int | None = None
    """First row to train on; the paper: 0."""
    target_ends: tuple[int, int] | None = None
    """Number of first and last tokens excluded from pairs, because every row reads them; the paper: 0 0."""
    hidden: int | None = None
    """Hidden width of `paper` and its variations; the paper: 128."""

    def __post_init__(self) -> None:
        require_counts(self, max_top=1, max_rest=1, first_trained=0, target_ends=0, hidden=1)
        for name, least in (("gamma", 0.0), ("beta", 0.0), ("alpha", -math.inf)):
            value = getattr(self, name)
            if value is not None and not least < value < math.inf:
                bound = "a finite number" if least < 0 else "a finite number above 0"
                raise UsageError(f"--{name} must be {bound}, got {value}")

    def applied(self, recipe: Recipe) -> Recipe:
        """Return the recipe with these settings; an untrained one changes only its width."""
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.target_ends is not None:
            given["ends"] = self.target_ends
        width = {} if self.hidden is None or recipe.variant != "paper" else {"hidden": self.hidden}
        return replace(recipe, **(given if recipe.trained else {}), **width)


_SAME = ("loss", "estimator", "gamma", "alpha", "beta", "max_top", "max_rest", "target", "first_trained")
"""Fields of the same name in `Recipe`."""
