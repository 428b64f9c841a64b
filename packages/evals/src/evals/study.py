"""Commands on results, and the one that chooses a budget: their settings, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from hashtrain.plan import DEMO, require_device_name
from hashtrain.usage import UsageError

from evals.methods import REMAINDER, RIVAL_NAMES, SELECTION_NAMES, SPARSE_NAMES
from evals.plan import Dtype, Methods, Phase, TaskCommand, at_least, each_positive


@dataclass(frozen=True)
class ReportCommand:
    """Render finished runs as Markdown and as one self-contained HTML page with tables and figures."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    title: str = "Sparse attention, measured"
    """The page's headline."""
    out: Path = Path("runs/report")
    """Where report.md and report.html go."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UsageError("report needs the folder of a run or more, got none")


@dataclass(frozen=True)
class CompareCommand:
    """Subtract one run from another, paired over documents, with 95 % bootstrap intervals. Different protocols are
    refused."""

    first: Annotated[Path, tyro.conf.Positional]
    """Folder of a run."""
    second: Annotated[Path, tyro.conf.Positional]
    """Folder of another, or the same to compare two of its methods."""
    method_a: str | None = None
    """Only this method of the first run."""
    method_b: str | None = None
    """Compare it with this method of the second run; otherwise with the one of the same name."""
    budget_a: float | None = None
    """Only this budget of the first run."""
    budget_b: float | None = None
    """Compare it with this budget of the second run; otherwise with the same."""


@dataclass(frozen=True)
class FrontierCommand:
    """Draw quality against bytes read: finished runs of `ppl` of one model and text, with any methods and budgets."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs."""
    model: str = DEMO
    """The model they are of, for the size of its heads: a folder or hub id; `demo` is the model that ships with
    hashtrain."""
    out: Path = Path("runs/frontier")
    """Where frontier.md and frontier.png go."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UsageError("frontier needs the folder of a run of ppl or more, got none")


@dataclass(frozen=True)
class SuggestCommand(TaskCommand):
    """Find the smallest budget that meets a target on your text and model: a bound on the KL from dense, or a share of
    the attention mass that the best selection holds."""

    methods: Methods = ()
    """The method to find a budget for, one; without it `transform`, for --kl with the remainder, as `attach` has it."""
    budgets: tyro.conf.Suppress[tuple[float, ...]] = (1.0,)
    """Nothing to give: the budget is what is looked for."""
    documents: int = 8
    """Contexts to measure on."""
    kl: float | None = None
    """Mean KL from dense to stay below, nats per token."""
    mass: float | None = None
    """Attention mass to reach, of that of the largest exact attention, 0 to 1."""
    phase: Phase = "everywhere"
    """Which rows are sparse for --kl, as for `ppl`: `decode` finds a budget for serving. The mass is of rows drawn from
    a dense pass, whatever the phase, so that --mass takes none."""
    rows: int = 64
    """Rows measured in each context for the mass."""
    out: Path = Path("runs/suggest")
    """Where what was measured goes; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        if not self.methods:
            object.__setattr__(self, "methods", ("transform" + (REMAINDER if self.mass is None else ""),))
        super().__post_init__()
        at_least(self, rows=1)
        if (self.kl is None) == (self.mass is None):
            raise UsageError(f"give one target, --kl or --mass, got {'neither' if self.kl is None else 'both'}")
        if self.kl is not None and not self.kl > 0:
            raise UsageError(f"--kl must be above 0, got {self.kl:g}")
        if self.mass is not None and not 0 < self.mass <= 1:
            raise UsageError(f"--mass must be above 0 and at most 1, got {self.mass:g}")
        if self.mass is not None and self.phase != "everywhere":
            raise UsageError(
                f"--mass is of rows drawn from a dense pass and takes no --phase, got {self.phase}; leave --phase out, "
                "or give --kl"
            )
        names = SPARSE_NAMES if self.mass is None else SELECTION_NAMES
        if len(self.methods) != 1 or self.methods[0] not in names:
            raise UsageError(f"--methods of suggest takes one of {', '.join(names)}, got {' '.join(self.methods)}")

    @property
    def own_heads(self) -> bool:
        """The mass is measured for either kind of head."""
        return self.mass is None

    @property
    def metric(self) -> str:
        """What the target is of."""
        return "kl" if self.mass is None else "mass"

    @property
    def dense_prompt(self) -> bool:
        """Whether the rows before those that are judged are dense, as in serving; else every row is sparse."""
        return self.phase == "decode"


@dataclass(frozen=True)
class TuneCommand(TaskCommand):
    """Tune the rivals on text that nothing is judged on: page size of Quest at a budget, bits and tables of MagicPIG at
    a density, by mean KL from dense."""

    methods: Methods = ("quest", "quest-heads", "magicpig")
    """Rivals to tune."""
    text: tuple[Path, ...] = ()
    """Text that will not be judged on: UTF-8 files, .jsonl, .parquet, folders of them, or hub:OWNER/NAME; without any,
    the sources that our hashers train on."""
    documents: int = 4
    """Contexts to measure on; a run may be continued with more."""
    pages: tuple[int, ...] = (4, 8, 16, 32)
    """Quest: tokens of a page."""
    bits: tuple[int, ...] = (8, 10, 12, 15)
    """MagicPIG: bits of a table, K."""
    tables: tuple[int, ...] = (50, 100, 150)
    """MagicPIG: tables, L."""
    density: float | None = None
    """The most tokens that a setting may take, as a share of those its rows see; without it, as many as the published
    setting that takes most."""
    phase: Phase = "everywhere"
    """Which rows are sparse, as for `ppl`."""
    out: Path = Path("runs/tune")
    """Where the samples, the grid and tuned.json go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pages", "bits", "tables"):
            each_positive(self, name)
        if self.heads is not None:
            raise UsageError(f"tune takes no --heads, got {self.heads}: each rival has heads of its own; leave it out")
        if max(self.bits) > 31 or min(self.tables) < 2:
            raise UsageError(
                f"--bits must be at most 31 and --tables at least 2, got {max(self.bits)} and {min(self.tables)}"
            )
        if self.density is not None and not 0 < self.density <= 1:
            raise UsageError(f"--density must be above 0 and at most 1, got {self.density:g}")
        if len(self.budgets) != 1:
            raise UsageError(f"--budgets of tune takes one, got {len(self.budgets)}")
        if strange := [name for name in self.methods if name not in RIVAL_NAMES]:
            raise UsageError(f"--methods of tune takes {', '.join(RIVAL_NAMES)}, got {', '.join(strange)}")

    @property
    def dense_prompt(self) -> bool:
        """Whether the rows before those that are judged are dense, as in serving; else every row is sparse."""
        return self.phase == "decode"


@dataclass(frozen=True)
class PaperCommand:
    """Every table and figure of the paper as a command, on the demo model by default, and what differs."""

    table: int | None = None
    """Run the command of this table."""
    figure: int | None = None
    """Run the command of this figure."""
    all: bool = False
    """Run them all and write one report."""
    list: bool = False
    """Print them all, each with its command and the stored results that show it; so does a command without any of
    these."""
    results: Path = Path("docs/results")
    """Where --list looks for stored results: a checkout's."""
    model: str = "demo"
    """As for the tasks."""
    hashers: Path = Path("runs/demo")
    """As for the tasks; table 1, 10 and 11 need those of `hashtrain --only all`."""
    other_hashers: Path | None = None
    """Hashers trained on another text, for table 6; without them --all leaves that table out."""
    more_hashers: tuple[Path, ...] = ()
    """Hashers of other code lengths, for `code length`."""
    tuned: Path | None = None
    """A folder of `evals tune`: tables 2 and 3 have the rivals with what it chose, too."""
    documents: int | None = None
    """Contexts or exercises of each task; without it, few enough for half an hour on two cores."""
    device: str = "cpu"
    """Where the tasks that run a model run: cpu, cuda, cuda:N, or auto."""
    dtype: Dtype = "float32"
    """Of the model's weights, as for the tasks; throughput has its own."""
    out: Path = Path("runs/paper")
    """A folder for each task goes here, and report.html."""

    def __post_init__(self) -> None:
        if sum([self.table is not None, self.figure is not None, self.all, self.list]) > 1:
            raise UsageError("give one of --table, --figure, --all and --list, got several")
        require_device_name(self.device)
        if self.documents is not None:
            at_least(self, documents=1)
