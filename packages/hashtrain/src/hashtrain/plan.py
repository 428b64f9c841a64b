"""What one `hashtrain` run will do: its settings, checked before anything is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hashtrain.recipes import ABLATIONS, ALL, EXACT, RECIPES, Recipe
from hashtrain.config import MAX_DIGITS
from hashtrain.demo import demo_model_path
from hashtrain.overrides import Overrides
from hashtrain.usage import UsageError, require_counts, require_seed

__all__ = [
    "ABLATIONS",
    "ALL",
    "RECIPES",
    "DEMO",
    "DIGITS",
    "EXACT",
    "PAPER",
    "Recipe",
    "TrainCommand",
    "base_model",
    "model_path",
    "require_device_name",
]

DEMO = "demo"
"""What `--model` calls the model that ships inside."""


PAPER: dict[str, Any] = {"context": 8192, "contexts": 8192, "steps": 8192, "learning_rate": 1e-3, "warmup": 0.01}
"""The paper's schedule, where it differs from the demo's; the optimiser is the same (`hashtrain.trainer`)."""
DIGITS = 5
"""The most bits of one dimension: best on the demo model and on SmolLM2, English and Python (docs/log.md)."""


def require_device_name(device: str) -> None:
    """Raise UsageError if --device is no name that `hashtrain.distribute.device_for` knows."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {device}")


@dataclass(frozen=True)
class _Run:
    """What a run reads, makes and writes; `Overrides` has the flags that change how its hashers are trained."""

    model: str = DEMO
    """A folder or hub id of a Hugging Face causal LM; `demo` is the model that ships with hashtrain."""
    text: tuple[Path, ...] = ()
    """What to train on: text files, .jsonl, .parquet, folders of them, or hub:OWNER/NAME (README); without any, this
    machine's own Python sources."""
    held_out_text: tuple[Path, ...] = ()
    """What to judge on, of the same kinds; without any, a fifth of --text."""
    out: Path = Path("runs/demo")
    """Where the hashers, the figure and the metrics go."""
    only: tuple[str, ...] = tuple(c.name for c in RECIPES)
    """Which hashers to make; `all` adds the ablations."""
    bits: int = 128
    """Code length."""
    planes: int | None = None
    """Bit planes of the query side, 1 to 8; without it, each hasher's own."""
    digits: int = DIGITS
    """The most bits that `transform` gives one dimension of a head as it starts, 1 to 8. A query's planes cannot weigh
    many more digits than these."""
    fraction: float = 0.02
    """The budget that is trained and judged: share of each row's visible tokens, those always read included."""
    context: int = 4096
    """Tokens a context."""
    contexts: int = 40
    """Training contexts."""
    held_out: int = 24
    """Held-out contexts, never trained on."""
    held_out_rows: int = 64
    """Rows judged in each held-out context, drawn from its last three quarters."""
    steps: int = 800
    """Optimiser steps a layer and hasher."""
    dense_layers: int | None = None
    """First layers that stay dense when deployed, left out of the means, trained all the same; without it, those whose
    measured cost is too high, if any."""
    rows: int = 64
    """Query rows a step."""
    learning_rate: float | None = None
    """The highest learning rate, of every hasher; without it, each hasher's own, tuned on the demo model."""
    warmup: float = 0.02
    """Share of the steps with a rising learning rate; after it, cosine to zero."""
    device: str = "auto"
    """Where to capture and train: cpu, cuda, cuda:N, or auto: CUDA if there is one."""
    spread: Literal["layers", "data"] = "layers"
    """What torchrun's processes share: the layers (the same bits as one process), or the rows of each step."""
    workers: int = 0
    """Processes that train, each a layer at a time; 0 is one per core, up to 6, or one on CUDA. The hashers do not
    depend on it."""
    checkpoint_seconds: float = 30.0
    """Seconds between two checkpoints of a layer: the most work that a kill can cost; 0 is after every step."""
    backbone_memory: float | None = None
    """GB of the model's weights on the device while it runs; its other layers are brought in one at a time (extra
    `hashtrain[offload]`). Without it the whole model must fit."""
    stream: bool = False
    """Train all layers side by side and run the model for every step, in place of storing its queries and keys: next to
    no disk, the same hashers. For schedules that use each context once."""
    tensorboard: bool = False
    """Write losses and judgements for TensorBoard, too, below --out/tensorboard (extra `hashtrain[tensorboard]`)."""
    config: Path | None = None
    """A TOML file of these settings, such as the config.toml that a run stores; the command line wins."""
    dry_run: bool = False
    """Say what would be done, the disk and memory it takes, and about how long; write nothing."""
    seed: int = 0


@dataclass(frozen=True)
class TrainCommand(Overrides, _Run):
    """Train every layer's hashers, compare them on held-out text, and store them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, contexts=1, held_out=1, held_out_rows=1, steps=1, rows=1, context=512)
        require_counts(self, workers=0, dense_layers=0)
        require_seed(self.seed)
        require_device_name(self.device)
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--learning-rate must be above 0, got {self.learning_rate}")
        if self.backbone_memory is not None and not 0 < self.backbone_memory <= 1e6:
            raise UsageError(f"--backbone-memory must be above 0 and at most 1000000, got {self.backbone_memory}")
        if not 0 <= self.warmup <= 1:
            raise UsageError(f"--warmup must be between 0 and 1, got {self.warmup}")
        if not 0 <= self.checkpoint_seconds < float("inf"):
            raise UsageError(f"--checkpoint-seconds must be 0 or more, got {self.checkpoint_seconds}")
        if not 32 <= self.bits <= 4096 or self.bits % 32:
            raise UsageError(f"--bits must be a multiple of 32 between 32 and 4096, got {self.bits}")
        if self.planes is not None and not 1 <= self.planes <= 8:
            raise UsageError(f"--planes must be between 1 and 8, got {self.planes}")
        if not 1 <= self.digits <= MAX_DIGITS:
            raise UsageError(f"--digits must be between 1 and {MAX_DIGITS}, got {self.digits}")
        if not self.only:
            raise UsageError(f"--only needs one of {', '.join(c.name for c in ALL)}, or all")
        if not 0 < self.fraction <= 1:
            raise UsageError(f"--fraction must be above 0 and at most 1, got {self.fraction}")
        known = ["all", *(c.name for c in ALL)]
        if unknown := [name for name in self.only if name not in known]:
            raise UsageError(f"--only takes {', '.join(known)}, got {', '.join(unknown)}")

    @classmethod
    def for_model(cls, model: str, **settings: Any) -> TrainCommand:
        """Make a command with the defaults that suit the model: the demo's own, or `PAPER`.

        Source: paper, section 4: 8,192 samples of 8,192 tokens, batch 1, learning rate 1e-3 to 0, 1 % warm-up.
        """
        return cls(model=model, **({} if model == DEMO else PAPER) | settings)

    @property
    def recipes(self) -> list[Recipe]:
        """The hashers to make, in table order, as the flags of `Overrides` change them."""
        return [self.applied(c) for c in ALL if c.name in self.only or "all" in self.only]

    @property
    def model_path(self) -> str:
        """What `from_pretrained` is given."""
        return model_path(self.model)

    @property
    def first_row(self) -> int:
        """Rows before this one are not judged (1,024 of 4,096)."""
        return self.context // 4


def model_path(name: str) -> str:
    """Return what `from_pretrained` is given for a --model: the folder of `demo`, any other name as it is."""
    return str(demo_model_path()) if name == DEMO else name


def base_model(name: str) -> str:
    """Name the base model in an artefact: a hub id whole, a local folder without its path."""
    return "hashtrain demo" if name == DEMO else Path(name).name if Path(name).is_dir() else name
