"""What each command will do: its settings, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hashtrain.demo import demo_model_path
from hashtrain.plan import DEMO
from hashtrain.usage import UsageError

from evals.methods import DEFAULT_NAMES, NAMES, SELECTION_NAMES, SPARSE_NAMES
from evals.result import versions

Rule = Literal["visible", "fixed"]


@dataclass(frozen=True)
class TaskCommand:
    """What the tasks share."""

    model: str = DEMO
    """A folder or hub id of a Hugging Face causal LM; `demo` is the model that ships with hashtrain."""
    hashers: Path = Path("runs/demo")
    """The folder that `hashtrain` wrote, with one folder per hasher."""
    text: tuple[Path, ...] = ()
    """UTF-8 text files or folders that no hasher was trained on; without any, held-out standard-library modules."""
    methods: tuple[str, ...] = DEFAULT_NAMES
    """What to measure; `evals list` names them. Dense attention is always measured, the rivals' own only if named."""
    budgets: tuple[float, ...] = (0.02,)
    """Shares of the tokens that a row may select."""
    documents: int = 20
    """Contexts to measure, one per document while there are documents; a run may be continued with more."""
    context: int = 4096
    """Tokens a context."""
    dense_layers: int = 2
    """The first layers, which stay dense."""
    seed: int = 0
    """Draws the order of documents, the sampled rows and the bootstrap."""
    out: Path = Path("runs/evals")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        for name, least in (("documents", 1), ("context", 32), ("dense_layers", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        for name in ("methods", "budgets"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise UsageError(
                    f"--{name} needs one value or more, each once, got {' '.join(map(str, given)) or 'none'}"
                )
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise UsageError(f"--budgets must be above 0 and at most 1, got {budget:g}; 0.02 selects 2 %")
        if unknown := [name for name in self.methods if name not in NAMES]:
            raise UsageError(f"--methods takes {', '.join(NAMES)}, got {', '.join(unknown)}")
        if not set(self.methods) & set(SPARSE_NAMES):
            raise UsageError(f"--methods needs one of {', '.join(SPARSE_NAMES)} beside dense")

    @property
    def model_path(self) -> str:
        """What `from_pretrained` is given."""
        return str(demo_model_path()) if self.model == DEMO else self.model

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the numbers, as JSON values and with no path of the machine."""
        plain = {
            k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k not in ("out", "hashers")
        }
        return {
            "task": task,
            **plain,
            "model": self.model if self.model == DEMO else Path(self.model).name,
            "text": [path.name for path in self.text],
            "versions": versions(),
        }


@dataclass(frozen=True)
class PplCommand(TaskCommand):
    """Perplexity, and divergence from dense attention, on held-out text with every row sparse; the second half of each
    context is scored."""

    budgets: tuple[float, ...] = (0.02, 0.01, 0.005)
    """Shares of the tokens that a row may select."""
    rules: tuple[Rule, ...] = ("visible", "fixed")
    """Share of what: `visible` to the row, at least 1 token; `fixed`, the paper's: the whole context, at least 20."""
    out: Path = Path("runs/ppl")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rules or len(set(self.rules)) < len(self.rules):
            raise UsageError(f"--rules needs one value or both, each once, got {' '.join(self.rules) or 'none'}")


@dataclass(frozen=True)
class IouCommand(TaskCommand):
    """Overlap of each method's selection with the largest exact attention, by layer and head; rows are drawn from the
    last three quarters of each context."""

    methods: tuple[str, ...] = SELECTION_NAMES
    """What to measure; `evals list` names them. The remainder selects nothing, so methods with it are not taken."""
    rows: int = 64
    """Rows measured in each context."""
    out: Path = Path("runs/iou")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if idle := [name for name in self.methods if name in SPARSE_NAMES and name not in SELECTION_NAMES]:
            raise UsageError(f"--methods of iou takes {', '.join(SELECTION_NAMES)}, got {', '.join(idle)}")
        if self.rows < 1:
            raise UsageError(f"--rows must be at least 1, got {self.rows}")


@dataclass(frozen=True)
class ListCommand:
    """Name the tasks and the methods."""
