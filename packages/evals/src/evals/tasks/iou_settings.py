"""Settings of `iou`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hashtrain.usage import UsageError, require_counts

from evals.methods import SELECTION_DEFAULTS, SELECTION_NAMES, SPARSE_NAMES
from evals.settings import Methods, TaskCommand


@dataclass(frozen=True)
class IouCommand(TaskCommand):
    """Measure how much of the largest exact attention each method selects, by layer and head, for rows drawn from the
    last three quarters of each context. Example: `evals iou --documents 4`."""

    methods: Methods = SELECTION_DEFAULTS
    """Methods to measure; see `evals list`. Methods with the remainder are rejected, because it selects nothing."""
    rows: int = 64
    """Rows measured per context."""
    out: Path = Path("runs/iou")

    both_heads: ClassVar[bool] = True  # both kinds are measured, or the one that --heads names

    def __post_init__(self) -> None:
        super().__post_init__()
        if idle := [name for name in self.methods if name in SPARSE_NAMES and name not in SELECTION_NAMES]:
            raise UsageError(f"--methods of iou takes {', '.join(SELECTION_NAMES)}, got {', '.join(idle)}")
        require_counts(self, rows=1)
