"""Settings of the benchmarks of lm-evaluation-harness: `longbench`, `ruler` and `fewshot`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro
from hashtrain.demo import model_path
from hashtrain.usage import UsageError, require_counts

from evals.settings import Methods, MethodsCommand, each_once, each_positive

SparseRows = Literal["all", "continuation"]
Truncation = Literal["middle", "left"]


@dataclass(frozen=True)
class BenchmarkCommand(MethodsCommand):
    """Options shared by the benchmarks."""

    methods: Methods = ("oracle", "transform")
    """Methods to measure; see `evals list`. Dense attention is always measured."""
    tokens: tuple[int, ...] = ()
    """Numbers of tokens to select in every row; they replace --budgets."""
    tasks: tuple[str, ...] = ()
    """Tasks, tags or groups of lm-evaluation-harness, shipped with it or in --include-path."""
    include_path: tuple[Path, ...] = ()
    """Folders with YAML of your own tasks, or of shipped ones with local data, or with LongBench's own files."""
    limit: int | None = None
    """Items per task, of RULER per task and length. Default: all."""
    shots: int | None = None
    """Worked examples before each question. Default: the task's own number."""
    rows: SparseRows = "continuation"
    """Sparse rows: `all`, or those that predict the continuation or the answer after a dense prefill."""
    chat_template: bool = False
    """Put each prompt into the chat template of the model's tokenizer, as a user's message; not those of LongBench's
    few-shot and code tasks, as in its own script."""
    max_length: int | None = None
    """Most tokens of a prompt and its answer, such as the 8192 of the paper. Default: as many as the model takes."""
    batch_size: int = 8
    """Requests of equal length in one batch; does not change the results."""
    documents: tyro.conf.Suppress[int] = 1
    """Unused: the tasks are the documents."""

    folders: ClassVar[tuple[str, ...]] = ()
    """Folders of lm-evaluation-harness with the default tasks; reading all of its folders takes half a minute."""
    unstored: ClassVar[tuple[str, ...]] = (*MethodsCommand.unstored, "documents", "batch_size", "include_path")
    references: ClassVar[str] = ""
    """Field of an item with its accepted answers, a list."""
    truncation: ClassVar[Truncation] = "left"
    """Which part of a prompt that is too long for the model is dropped."""
    plain: ClassVar[tuple[str, ...]] = ()
    """Tasks whose prompts never get a chat template."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, batch_size=1)
        each_once(self, "tasks")
        for name, least in (("limit", 1), ("shots", 0), ("max_length", 32)):
            if getattr(self, name) is not None:
                require_counts(self, **{name: least})
        if self.tokens:
            each_positive(self, "tokens")
        for folder in self.include_path:
            if not folder.is_dir():
                raise UsageError(f"--include-path must be a folder with YAML files, got {folder}")

    @property
    def metadata(self) -> dict[str, Any]:
        """Arguments for tasks that generate their own data."""
        return {}

    def has_template(self, task: str) -> bool:
        """Whether the prompts of a task are put into the chat template."""
        return self.chat_template and task.removesuffix("_e") not in self.plain

    @property
    def dense_prompt(self) -> bool:
        return self.rows == "continuation"

    def settings(self, task: str) -> dict[str, Any]:
        given = {**super().settings(task), "truncation": self.truncation}  # a digest identifies a task's data
        return given | {"budgets": []} if self.tokens else given


@dataclass(frozen=True)
class LongbenchCommand(BenchmarkCommand):
    """Answer LongBench's questions about documents (lm-evaluation-harness) after a dense prefill. Prompts too long for
    the model lose their middle, as in LongBench's own script. Example: `evals longbench --model NAME --limit 20`."""

    tasks: tuple[str, ...] = ("longbench",)
    out: Path = Path("runs/longbench")

    folders: ClassVar[tuple[str, ...]] = ("longbench",)
    references: ClassVar[str] = "answers"
    truncation: ClassVar[Truncation] = "middle"
    plain: ClassVar[tuple[str, ...]] = tuple(
        f"longbench_{name}" for name in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
    )


@dataclass(frozen=True)
class RulerBenchmarkCommand(BenchmarkCommand):
    """Run RULER (lm-evaluation-harness) at the given lengths. Example: `evals ruler --model NAME`."""

    tasks: tuple[str, ...] = ("ruler",)
    lengths: tuple[int, ...] = (4096,)
    """Tokens of prompt and answer together."""
    out: Path = Path("runs/ruler")

    folders: ClassVar[tuple[str, ...]] = ("ruler",)
    references: ClassVar[str] = "outputs"

    def __post_init__(self) -> None:
        super().__post_init__()
        each_positive(self, "lengths")

    @property
    def metadata(self) -> dict[str, Any]:
        from hashtrain.adapters import tokenizer_of  # imported here: it loads torch, which `--help` does not need

        return {"tokenizer": tokenizer_of(model_path(self.model)), "max_seq_lengths": list(self.lengths)}


@dataclass(frozen=True)
class FewshotCommand(BenchmarkCommand):
    """Run the paper's few-shot tasks (lm-evaluation-harness): 5 examples, every row sparse, 20 tokens selected.
    Example: `evals fewshot --model NAME --limit 50`."""

    tasks: tuple[str, ...] = (
        *("glue", "super-glue-lm-eval-v1", "openbookqa", "hellaswag", "piqa", "winogrande"),
        *("arc_easy", "arc_challenge", "mathqa", "mmlu"),
    )
    tokens: tuple[int, ...] = (20,)
    """Numbers of tokens to select in every row; give none to use --budgets."""
    shots: int | None = 5
    """Worked examples before each question, except for tasks that fix their number at 0."""
    rows: SparseRows = "all"
    out: Path = Path("runs/fewshot")

    folders: ClassVar[tuple[str, ...]] = (
        *("glue", "super_glue", "openbookqa", "hellaswag", "piqa", "winogrande"),
        *("arc", "mathqa", "mmlu/default"),
    )
