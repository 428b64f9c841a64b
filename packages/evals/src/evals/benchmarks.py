"""What the benchmarks of lm-evaluation-harness will do: their settings, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro
from hashtrain.usage import UsageError

from evals.plan import Methods, MethodsCommand, at_least, each_once, each_positive

SparseRows = Literal["all", "continuation"]
Truncation = Literal["middle", "left"]


@dataclass(frozen=True)
class BenchmarkCommand(MethodsCommand):
    """What the benchmarks share."""

    methods: Methods = ("oracle", "planes")
    """What to measure; `evals list` names them. Dense attention is always measured."""
    tokens: tuple[int, ...] = ()
    """Select these numbers of tokens in every row; with any of them, --budgets is not used."""
    tasks: tuple[str, ...] = ()
    """Tasks, tags or groups of lm-evaluation-harness, shipped with it or in --include-path."""
    include_path: tuple[Path, ...] = ()
    """Folders with YAML of your own tasks, or of shipped ones with local data."""
    limit: int | None = None
    """Items of each task; without it, all."""
    shots: int | None = None
    """Worked examples before each question; without it, the task's own number."""
    rows: SparseRows = "continuation"
    """Which rows are sparse: `all`, or those that predict the continuation or the answer after a dense prefill."""
    batch_size: int = 8
    """Requests of one length at once; changes no number."""
    documents: tyro.conf.Suppress[int] = 1
    """Nothing to give: the tasks are the documents."""

    folders: ClassVar[tuple[str, ...]] = ()
    """Where lm-evaluation-harness keeps the default tasks: reading all of its folders takes half a minute."""
    truncation: ClassVar[Truncation] = "left"
    """What a prompt too long for the model loses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, batch_size=1)
        each_once(self, "tasks")
        for name, least in (("limit", 1), ("shots", 0)):
            if getattr(self, name) is not None:
                at_least(self, **{name: least})
        if self.tokens:
            each_positive(self, "tokens")
        for folder in self.include_path:
            if not folder.is_dir():
                raise UsageError(f"--include-path must be a folder with YAML files, got {folder}")

    @property
    def metadata(self) -> dict[str, Any]:
        """What tasks that make their own data are told."""
        return {}

    @property
    def dense_prompt(self) -> bool:
        """Whether the rows before those that are judged are dense, as in serving; else every row is sparse."""
        return self.rows == "continuation"

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the numbers, as JSON values and with no path of the machine."""
        given = super().settings(task)
        for name in ("documents", "batch_size", "include_path"):  # the data of a task are known by their digest
            del given[name]
        if self.tokens:
            given["budgets"] = []
        return {**given, "truncation": self.truncation}


@dataclass(frozen=True)
class LongbenchCommand(BenchmarkCommand):
    """LongBench through lm-evaluation-harness: documents with questions, answered after a dense prefill; prompts too
    long for the model lose their middle, as in LongBench's own script."""

    tasks: tuple[str, ...] = ("longbench",)
    """Tasks, tags or groups of lm-evaluation-harness, shipped with it or in --include-path."""
    out: Path = Path("runs/longbench")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    folders: ClassVar[tuple[str, ...]] = ("longbench",)
    truncation: ClassVar[Truncation] = "middle"


@dataclass(frozen=True)
class RulerBenchmarkCommand(BenchmarkCommand):
    """RULER through lm-evaluation-harness, made at the lengths you name; `ruler-synthetic` needs no data at all."""

    tasks: tuple[str, ...] = ("ruler",)
    """Tasks, tags or groups of lm-evaluation-harness, shipped with it or in --include-path."""
    lengths: tuple[int, ...] = (4096,)
    """Tokens of prompt and answer together."""
    out: Path = Path("runs/ruler")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    folders: ClassVar[tuple[str, ...]] = ("ruler",)

    def __post_init__(self) -> None:
        super().__post_init__()
        each_positive(self, "lengths")

    @property
    def metadata(self) -> dict[str, Any]:
        """What tasks that make their own data are told."""
        return {"tokenizer": self.model_path, "max_seq_lengths": list(self.lengths)}


@dataclass(frozen=True)
class FewshotCommand(BenchmarkCommand):
    """The paper's few-shot tasks through lm-evaluation-harness: 5 examples, every row sparse, 20 tokens each."""

    tasks: tuple[str, ...] = (
        *("glue", "super-glue-lm-eval-v1", "openbookqa", "hellaswag", "piqa", "winogrande"),
        *("arc_easy", "arc_challenge", "mathqa", "mmlu"),
    )
    """Tasks, tags or groups of lm-evaluation-harness, shipped with it or in --include-path."""
    tokens: tuple[int, ...] = (20,)
    """Select these numbers of tokens in every row; none of them to use --budgets."""
    shots: int | None = 5
    """Worked examples before each question, except for tasks that fix their number at 0."""
    rows: SparseRows = "all"
    """Which rows are sparse: `all`, or those that predict the continuation or the answer after a dense prefill."""
    out: Path = Path("runs/fewshot")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    folders: ClassVar[tuple[str, ...]] = (
        *("glue", "super_glue", "openbookqa", "hellaswag", "piqa", "winogrande"),
        *("arc", "mathqa", "mmlu/default"),
    )
