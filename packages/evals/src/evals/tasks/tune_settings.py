"""Settings of `tune`."""

from dataclasses import dataclass
from pathlib import Path

from hashtrain.usage import UsageError

from evals.methods import RIVAL_NAMES
from evals.settings import Methods, Phase, TaskCommand, each_a_share, each_among, each_positive


@dataclass(frozen=True)
class TuneCommand(TaskCommand):
    """Find the rivals' best parameters, by mean KL from dense, on text that is not used for evaluation: the page size
    of Quest at a budget, the bits and tables of MagicPIG at a density. Example: `evals tune --methods quest`."""

    methods: Methods = ("quest", "quest-heads", "magicpig")
    """Rivals to tune."""
    text: tuple[Path, ...] = ()
    """Text not used for evaluation: UTF-8 files, .jsonl, .parquet, folders of them, or hub:OWNER/NAME. Default: the
    training sources of our hashers."""
    documents: int = 4
    pages: tuple[int, ...] = (4, 8, 16, 32)
    """Quest: tokens per page."""
    bits: tuple[int, ...] = (8, 10, 12, 15)
    """MagicPIG: bits per table, K."""
    tables: tuple[int, ...] = (50, 100, 150)
    """MagicPIG: number of tables, L."""
    density: float | None = None
    """Largest density that a setting may reach. Default: that of the published setting with the largest density."""
    phase: Phase = "everywhere"
    """Sparse rows, as for `ppl`."""
    out: Path = Path("runs/tune")
    """Folder for samples, grid and tuned.json; rerun the command to resume."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pages", "bits", "tables"):
            each_positive(self, name)
        if self.heads is not None:
            raise UsageError(f"tune takes no --heads, got {self.heads}: each rival has its own heads; leave it out")
        if max(self.bits) > 31 or min(self.tables) < 2:
            raise UsageError(
                f"--bits must be at most 31 and --tables at least 2, got {max(self.bits)} and {min(self.tables)}"
            )
        each_a_share(self, "density", "")
        if len(self.budgets) != 1:
            raise UsageError(f"--budgets of tune takes one, got {len(self.budgets)}")
        each_among(self, "methods", RIVAL_NAMES, "tune")
