"""The settings of one `hashtrain` run, checked before anything is written."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hashtrain.config import MAX_DIGITS
from hashtrain.demo import DEMO, model_path
from hashtrain.run.recipes import ALL, RECIPES, Recipe
from hashtrain.usage import UsageError, meant, require_counts, require_device_name, require_seed

PAPER: dict[str, Any] = {"context": 8192, "contexts": 8192, "steps": 8192, "learning_rate": 1e-3, "warmup": 0.01}
"""The defaults of other models: the paper's schedule, where it differs from the demo's. The optimiser is the same
(`hashtrain.training.trainer`). Source: section 4."""

GONE = {
    "capture": "`hashtrain train` captures what it lacks, and keeps it when it is interrupted",
    "plan": "use `hashtrain --dry-run`",
    "share": "train the hasher again; training measures how heads divide a budget",
    "push": "use `hf upload OWNER/NAME FOLDER`",
    "--stream": "captures are made in waves that fit on the disk; `--disk GB` bounds them",
    "--spread": "workers train different layers, one on each CUDA device",
    "--backbone-memory": "use a device that holds the model's weights",
    "--tensorboard": "read metrics.jsonl, which has every number",
}
"""Commands and flags of earlier versions, and what to do without them."""

_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("learning_rate", lambda x: 0 < x < math.inf, "above 0"),
    ("disk", lambda x: 0 < x < math.inf, "above 0"),
    ("warmup", lambda x: 0 <= x <= 1, "between 0 and 1"),
    ("checkpoint_seconds", lambda x: 0 <= x < math.inf, "0 or more"),
    ("bits", lambda x: 32 <= x <= 4096 and not x % 32, "a multiple of 32 between 32 and 4096"),
    ("planes", lambda x: 1 <= x <= 8, "between 1 and 8"),
    ("digits", lambda x: 1 <= x <= MAX_DIGITS, f"between 1 and {MAX_DIGITS}"),
    ("fraction", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ("gamma", lambda x: 0 < x < math.inf, "a finite number above 0"),
    ("beta", lambda x: 0 < x < math.inf, "a finite number above 0"),
    ("alpha", math.isfinite, "a finite number"),
)
"""What a field that is set must be."""


@dataclass(frozen=True)
class TrainCommand:
    """Train every layer's hashers, compare them on held-out text, and store them."""

    model: str = DEMO
    """Folder or hub id of a Hugging Face causal LM; `demo` is the model that ships with hashtrain. Other models have
    the paper's defaults: --context, --contexts and --steps 8192, --learning-rate 0.001, --warmup 0.01."""
    text: tuple[Path, ...] = ()
    """Training text: text files, .jsonl, .parquet, folders of them, or hub:OWNER/NAME (README). Default: the Python
    sources on this machine."""
    held_out_text: tuple[Path, ...] = ()
    """Held-out text, of the same kinds. Default: a fifth of --text."""
    out: Path = Path("runs/demo")
    """Folder for the hashers and the metrics. Needed with a --model other than `demo`."""
    only: tuple[str, ...] = tuple(c.name for c in RECIPES)
    """Hashers to train. `default` stands for lsh, paper and transform: `--only default planes` adds one. `all` stands
    for these and the ablations."""
    bits: int = 128
    """Code length in bits."""
    planes: int | None = None
    """Bit planes of queries, 1 to 8. Default: each hasher's own."""
    digits: int | None = None
    """Most bits that the start of `transform` gives one dimension of a head, 1 to 8. More digits than a query has
    planes are of little use. Default: each hasher's own."""
    fraction: float = 0.02
    """The budget for training and evaluation: a share of each row's visible tokens, sink and recent tokens included."""
    context: int = 4096
    """Tokens per context."""
    reach: int | None = None
    """The longest context that the hashers are for, in tokens: contexts are captured at positions spread over it, which
    costs nothing. Default: the model's own longest. The paper: --context."""
    contexts: int = 40
    """Training contexts."""
    held_out: int = 24
    """Held-out contexts."""
    held_out_rows: int = 64
    """Rows evaluated per held-out context, drawn from its last three quarters."""
    steps: int = 800
    """Optimiser steps per layer and hasher."""
    dense_layers: int | None = None
    """Number of first layers that stay dense in deployment; they are trained but left out of the means. Default:
    layers whose measured cost is too high, if any."""
    rows: int = 64
    """Query rows per step."""
    learning_rate: float | None = None
    """Peak learning rate of every hasher. Default: each hasher's own, tuned on the demo model."""
    warmup: float = 0.02
    """Share of the steps during which the learning rate rises; after it, cosine decay to zero."""
    device: str = "auto"
    """Device for capture and training: cpu, cuda (all devices), cuda:N, or auto (CUDA if available)."""
    workers: int = 0
    """Worker processes, each training one layer at a time; 0: one per core, up to 6, or one per CUDA device. Does not
    change the result."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints of a layer, the most work that a kill can lose; 0: a checkpoint after every step."""
    disk: float | None = None
    """GB of disk for queries and keys. If they do not fit, they are captured and used in waves; that does not change
    the result. Default: as much as is free."""
    config: Path | None = None
    """TOML file of these settings, such as the config.toml that a run stores; the command line overrides it."""
    dry_run: bool = False
    """Print what will be trained and the disk and memory it needs; write nothing."""
    seed: int = 0
    """Draws the contexts, the rows, the pairs and the random starts."""
    # Flags that override every trained hasher of a run, for one row of an ablation table; None: each one's own.
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
    target: Literal["visible", "length"] | None = None
    """What --fraction is a share of in training: each row's visible tokens, or, as in the paper, the full length."""
    first_trained: int | None = None
    """First row to train on; the paper: 0. Default: a sixteenth of the context."""
    target_ends: tuple[int, int] | None = None
    """Number of first and last tokens excluded from pairs, because every row reads them; the paper: 0 0."""
    hidden: int | None = None
    """Hidden width of `paper` and its variations; the paper: 128."""

    def __post_init__(self) -> None:
        require_counts(self, contexts=1, held_out=1, held_out_rows=1, steps=1, rows=1, context=512)
        require_counts(self, workers=0, dense_layers=0, reach=1)
        require_counts(self, max_top=1, max_rest=1, first_trained=0, target_ends=0, hidden=1)
        require_seed(self.seed)
        require_device_name(self.device)
        for name, holds, wanted in _RULES:
            if (value := getattr(self, name)) is not None and not holds(value):
                raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, got {value}")
        if not self.only:
            raise UsageError(f"--only needs one of {', '.join(c.name for c in ALL)}, default or all")
        known = ["default", "all", *(c.name for c in ALL)]
        if unknown := [name for name in self.only if name not in known]:
            raise UsageError(f"--only takes no {meant(unknown, known)}")

    @property
    def recipes(self) -> list[Recipe]:
        """The recipes to train, in table order, with the flags of this command applied."""
        groups = {"default": RECIPES, "all": ALL}
        named = {*self.only, *(c.name for group in self.only for c in groups.get(group, ()))}
        return [self.applied(c) for c in ALL if c.name in named]

    @property
    def model_path(self) -> str:
        """The argument of `from_pretrained`."""
        return model_path(self.model)

    @property
    def first_row(self) -> int:
        """Rows before this one are not evaluated (1,024 of 4,096)."""
        return self.context // 4

    def applied(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this command's flags; an untrained one changes only its width."""
        training: dict[str, Any] = {
            name: getattr(self, name) for name in ("loss", "alpha", "beta", "max_top", "max_rest")
        }
        training |= {"of": self.target, "min_position": self.first_trained}
        training |= dict(zip(("sink", "recent"), self.target_ends or (None, None), strict=True))
        config: dict[str, Any] = {"estimator": self.estimator, "gamma": self.gamma} if recipe.trained else {}
        if recipe.variant == "paper":
            config["hidden"] = self.hidden
        given = [{name: value for name, value in part.items() if value is not None} for part in (config, training)]
        return replace(recipe, config={**recipe.config, **given[0]}, training={**recipe.training, **given[1]})
