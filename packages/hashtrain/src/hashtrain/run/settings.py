"""The settings of one `hashtrain` run, checked before anything is written."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashtrain.demo import DEMO
from hashtrain.run.recipes import ALL, RECIPES, Recipe
from hashtrain.usage import UsageError, did_you_mean, require_counts, require_device_name, require_seed

PAPER: dict[str, Any] = {"context": 8192, "contexts": 8192, "steps": 8192, "warmup": 0.01}
"""The defaults of other models: the paper's schedule, where it differs from the demo's. The optimiser is the same
(`hashtrain.training.trainer`). Source: section 4."""

_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("learning_rate", lambda x: 0 < x < math.inf, "above 0"),
    ("disk", lambda x: 0 < x < math.inf, "above 0"),
    ("warmup", lambda x: 0 <= x <= 1, "between 0 and 1"),
    ("checkpoint_seconds", lambda x: 0 <= x < math.inf, "0 or more"),
    ("bits", lambda x: 32 <= x <= 4096 and not x % 32, "a multiple of 32 between 32 and 4096"),
    ("planes", lambda x: 1 <= x <= 8, "between 1 and 8"),
    ("fraction", lambda x: 0 < x <= 1, "above 0 and at most 1"),
)
"""What a field that is set must be."""


@dataclass(frozen=True)
class TrainCommand:
    """Train hash functions for every layer of a model, compare them on held-out text, and store them. Example:
    `hashtrain --model NAME --text notes/ --only lsh transform --context 4096 --contexts 40 --steps 800`."""

    model: str = DEMO
    """Folder or hub id of a Hugging Face causal LM; `demo` is the model that ships with hashtrain. Other models have
    the paper's defaults: --context, --contexts and --steps 8192, --warmup 0.01."""
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
    fraction: float = 0.02
    """The budget for training and evaluation: a share of each row's visible tokens, sink and recent tokens included."""
    context: int = 4096
    """Tokens per context."""
    reach: int | None = None
    """The longest context that the hashers are for, in tokens: contexts are captured at positions spread over it, and
    up to three more, as long as it but at most eight times --context, for calibration. Default: the model's own
    longest. The paper: --context."""
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
    """Peak learning rate of every hasher. Default: each hasher's own, tuned on the demo model; for `paper-exact`
    and its ablations, the paper's."""
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
    dry_run: bool = False
    """Print what will be trained and the disk it needs; write nothing."""
    seed: int = 0
    """Draws the contexts, the rows, the pairs and the random starts."""

    def __post_init__(self) -> None:
        require_counts(self, contexts=1, held_out=1, held_out_rows=1, steps=1, rows=1, context=512)
        require_counts(self, workers=0, dense_layers=0, reach=1)
        require_seed(self.seed)
        require_device_name(self.device)
        for name, holds, wanted in _RULES:
            if (value := getattr(self, name)) is not None and not holds(value):
                raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, got {value}")
        if not self.only:
            raise UsageError(f"--only needs one of {', '.join(c.name for c in ALL)}, default or all")
        known = ["default", "all", *(c.name for c in ALL)]
        if unknown := [name for name in self.only if name not in known]:
            raise UsageError(f"--only takes no {did_you_mean(unknown, known)}")

    @property
    def recipes(self) -> list[Recipe]:
        """The recipes to train, in table order."""
        groups = {"default": RECIPES, "all": ALL}
        named = {*self.only, *(c.name for group in self.only for c in groups.get(group, ()))}
        return [c for c in ALL if c.name in named]
