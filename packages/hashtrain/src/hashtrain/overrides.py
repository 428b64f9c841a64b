"""What the hashers of a run are trained with, where its flags change it: a row of an ablation table in one command."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from hashtrain.recipes import Recipe, Of
from hashtrain.usage import UsageError, require_counts


@dataclass(frozen=True)
class Overrides:
    """Flags that change every trained hasher of a run; None leaves each hasher's own (`hashtrain.recipes`)."""

    loss: Literal["ranking", "reconstruction", "mse"] | None = None
    """What training minimises: `ranking` (eq. 10), or an ablation that rebuilds attention (eq. 17): `reconstruction`,
    up to the best scale and shift, or `mse`, as it is. None: each hasher's own, as for all that follow."""
    estimator: Literal["softsign", "straight-through"] | None = None
    """What stands for the sign in training (eq. 11)."""
    gamma: float | None = None
    """Of softsign; the paper: 64."""
    alpha: float | None = None
    """Margin of the ranking loss; the paper: 3."""
    beta: float | None = None
    """Slope of the ranking loss; the paper: 1."""
    max_top: int | None = None
    """Target tokens drawn a row."""
    max_rest: int | None = None
    """Other tokens drawn a step, shared by its rows."""
    target: Of | None = None
    """What --fraction is of in training: the tokens that each row sees, or, in the paper, the full length."""
    first_trained: int | None = None
    """The first row trained on; the paper: 0."""
    target_ends: tuple[int, int] | None = None
    """How many first and last tokens of a row no pair is drawn of, because every row reads them; the paper: 0 0."""
    hidden: int | None = None
    """Hidden width of `paper` and its kin; the paper: 128."""

    def __post_init__(self) -> None:
        require_counts(self, max_top=1, max_rest=1, first_trained=0, target_ends=0, hidden=1)
        for name, least in (("gamma", 0.0), ("beta", 0.0), ("alpha", -math.inf)):
            value = getattr(self, name)
            if value is not None and not least < value < math.inf:
                bound = "a finite number" if least < 0 else "a finite number above 0"
                raise UsageError(f"--{name} must be {bound}, got {value}")

    def applied(self, recipe: Recipe) -> Recipe:
        """Return a recipe with these settings; one that is not trained stays as it is, but for its width."""
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.target_ends is not None:
            given["ends"] = self.target_ends
        width = {} if self.hidden is None or recipe.variant != "paper" else {"hidden": self.hidden}
        return replace(recipe, **(given if recipe.trained else {}), **width)


_SAME = ("loss", "estimator", "gamma", "alpha", "beta", "max_top", "max_rest", "target", "first_trained")
"""Fields that a recipe has by the same name."""
