"""Settings of the commands on results, and of those that choose a budget or parameters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from hashtrain.demo import DEMO
from hashtrain.usage import UsageError, require_counts, require_device_name

from evals.base_commands import Dtype, Methods, Phase, TaskCommand
from evals.checks import each_a_share, each_among, each_positive, left_out, one_budget
from evals.methods import REMAINDER, RIVAL_NAMES, SELECTION_NAMES, SPARSE_NAMES


@dataclass(frozen=True)
class ReportCommand:
    """Render finished runs as Markdown and as one self-contained HTML page with tables and figures."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    title: str = "Sparse attention, measured"
    """Title of the page."""
    out: Path = Path("runs/report")
    """Folder for report.md and report.html."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UsageError("report needs the folder of a run or more, got none")


@dataclass(frozen=True)
class CompareCommand:
    """Subtract one run from another, paired over documents, with 95 % bootstrap intervals. Runs with different
    protocols are rejected."""

    first: Annotated[Path, tyro.conf.Positional]
    """Folder of a run."""
    second: Annotated[Path, tyro.conf.Positional]
    """Folder of another run, or of the same one to compare two of its methods."""
    method_a: str | None = None
    """Only this method of the first run."""
    method_b: str | None = None
    """Compare it with this method of the second run. Default: the one of the same name."""
    budget_a: float | None = None
    """Only this budget of the first run."""
    budget_b: float | None = None
    """Compare it with this budget of the second run. Default: the same."""


@dataclass(frozen=True)
class FrontierCommand:
    """Draw quality against bytes read, and against the time of a step: finished runs of `ppl` of one model and text,
    with any methods and budgets."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    model: str = DEMO
    """Model of the runs, for the size of its heads: a folder or hub id; `demo` is the model that ships with
    hashtrain."""
    clock: bool = False
    """Measure the time of the model's decode step with each method and budget, on a machine that does nothing else.
    Rivals and the oracle are not timed."""
    tokens: int | None = None
    """Cached tokens of the timed steps. Default: the context of the runs."""
    hashers: Path = Path("runs/demo")
    """Folder of the hashers, for --clock."""
    times: Path | None = None
    """The file times.json of an earlier --clock, to show its times."""
    out: Path = Path("runs/frontier")
    """Folder for frontier.md and frontier.png, and for times.json of --clock."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UsageError("frontier needs the folder of a run of ppl or more, got none")
        if self.clock and self.times is not None:
            raise UsageError("--clock measures times and --times reads them; leave one of them out")
        if self.tokens is not None and not self.clock:
            raise UsageError("--tokens is of steps that --clock measures; add --clock, or leave it out")
        require_counts(self, tokens=1)


@dataclass(frozen=True)
class SuggestCommand(TaskCommand):
    """Find the smallest budget that meets a target on your text and model: a bound on the KL from dense, or a share of
    the oracle's attention mass."""

    methods: Methods = ()
    """The method to find a budget for. Default: `transform`, for --kl with the remainder, as in `attach`."""
    budgets: tyro.conf.Suppress[tuple[float, ...]] = (1.0,)
    """Unused: the budget is searched."""
    documents: int = 8
    """Contexts to measure."""
    kl: float | None = None
    """Target: mean KL from dense below this, in nats per token."""
    mass: float | None = None
    """Target: attention mass of at least this share of the oracle's, 0 to 1."""
    phase: Phase = "everywhere"
    """Sparse rows for --kl, as for `ppl`: `decode` finds a budget for serving. --mass always uses rows drawn from a
    dense pass and takes no --phase."""
    rows: int = 64
    """Rows measured per context for --mass."""
    out: Path = Path("runs/suggest")
    """Folder for the measurements; rerun the command to resume."""

    def __post_init__(self) -> None:
        if not self.methods:
            object.__setattr__(self, "methods", ("transform" + (REMAINDER if self.mass is None else ""),))
        super().__post_init__()
        require_counts(self, rows=1)
        if (self.kl is None) == (self.mass is None):
            raise UsageError(f"give one target, --kl or --mass, got {'neither' if self.kl is None else 'both'}")
        if self.kl is not None and not self.kl > 0:
            raise UsageError(f"--kl must be above 0, got {self.kl:g}")
        each_a_share(self, "mass", "")
        if self.mass is not None and self.phase != "everywhere":
            raise UsageError(
                f"--mass uses rows drawn from a dense pass and takes no --phase, got {self.phase}; leave --phase out, "
                "or give --kl"
            )
        names = SPARSE_NAMES if self.mass is None else SELECTION_NAMES
        if len(self.methods) != 1 or self.methods[0] not in names:
            raise UsageError(f"--methods of suggest takes one of {', '.join(names)}, got {' '.join(self.methods)}")

    @property
    def own_heads(self) -> bool:
        """False for --mass, which is measured for both kinds of heads."""
        return self.mass is None

    @property
    def metric(self) -> str:
        """The metric that the target applies to."""
        return "kl" if self.mass is None else "mass"


@dataclass(frozen=True)
class TuneCommand(TaskCommand):
    """Grid-search the rivals' parameters on text that is not used for evaluation, by mean KL from dense: the page size
    of Quest at a budget, the bits and tables of MagicPIG at a density."""

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
        left_out(self, "heads", "tune", "each rival has its own heads")
        if max(self.bits) > 31 or min(self.tables) < 2:
            raise UsageError(
                f"--bits must be at most 31 and --tables at least 2, got {max(self.bits)} and {min(self.tables)}"
            )
        each_a_share(self, "density", "")
        one_budget(self, "tune")
        each_among(self, "methods", RIVAL_NAMES, "tune")


@dataclass(frozen=True)
class PaperCommand:
    """Run the paper's tables and figures, on the demo model by default, and list what differs from the paper."""

    table: int | None = None
    """Run the commands of this table."""
    figure: int | None = None
    """Run the commands of this figure."""
    all: bool = False
    """Run all commands and write one report."""
    list: bool = False
    """Print all tables and figures with their commands and stored results; also the default."""
    results: Path = Path("docs/results")
    """Folder of stored results for --list, in a checkout."""
    model: str = "demo"
    """As for the tasks."""
    hashers: Path = Path("runs/demo")
    """As for the tasks; tables 1, 10 and 11 need those of `hashtrain --only all`."""
    other_hashers: Path | None = None
    """Hashers trained on another text, for table 6; without them --all skips that table."""
    more_hashers: tuple[Path, ...] = ()
    """Hashers of other code lengths, for `code length`."""
    tuned: Path | None = None
    """Folder of `evals tune`: tables 2 and 3 also have the rivals with the chosen parameters."""
    documents: int | None = None
    """Contexts or exercises per task. Default: few enough for half an hour on two cores."""
    device: str = "cpu"
    """Device of the model: cpu, cuda, cuda:N, or auto (CUDA if available)."""
    dtype: Dtype = "float32"
    """Type of the model's weights, as for the tasks; throughput has its own."""
    out: Path = Path("runs/paper")
    """Folder for one folder per task, and report.html."""

    def __post_init__(self) -> None:
        if sum([self.table is not None, self.figure is not None, self.all, self.list]) > 1:
            raise UsageError("give one of --table, --figure, --all and --list, got several")
        require_device_name(self.device)
        require_counts(self, documents=1)
