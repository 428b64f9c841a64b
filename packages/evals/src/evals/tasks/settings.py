"""Settings of the tasks, but those of lm-evaluation-harness (`benchmark_settings`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hashtrain.usage import UsageError, require_counts, require_device_name, require_seed

from evals.methods import DENSE, OURS, SELECTION_DEFAULTS, SELECTION_NAMES, in_table
from evals.settings import (
    Always,
    Methods,
    MethodsCommand,
    Phase,
    TaskCommand,
    each_a_share,
    each_among,
    each_once,
    each_positive,
    settings_of,
)
from evals.synthetic import NEEDLE, QUESTION

Rule = Literal["visible", "fixed"]
Score = Literal["second-half", "all"]
Ends = Literal["within", "beside"]
WAYS = ("sdpa", "eager", "planes", "recent")
DENSE_WAYS = ("sdpa", "eager")
MOST_SCORED = 4096
SMALL = "small"
"""Name of a shape for two CPU cores (`evals.tasks.throughput`)."""


def scored_by_default(tokens: int) -> int:
    """Return how many last tokens of a context are scored: half. Logits of 64K rows over 128K tokens take 16 GB."""
    return min(tokens - tokens // 2, MOST_SCORED)


@dataclass(frozen=True)
class PplCommand(TaskCommand):
    """Measure what methods cost: perplexity, and divergence from dense attention, on held-out text, with every row
    sparse or only those that predict the scored tokens, the last ones of each context. Example: `evals ppl --documents
    4`."""

    rules: tuple[Rule, ...] = ("visible",)
    """What a budget is a share of: `visible`: the row's visible tokens, at least 1; `fixed`, the paper's: the whole
    context, at least 20."""
    phase: Phase = "everywhere"
    """Sparse rows: `everywhere`, the paper's protocol; or `decode`, as in serving: the rows before the scored part are
    a dense prompt, and each scored token is predicted by a sparse row."""
    score: Score = "second-half"
    """Tokens scored in each context: the second half, at most 4,096 tokens; or `all` but the first, as in the paper."""
    scored: int | None = None
    """Number of tokens scored at the end of each context. Default: see --score."""
    ends: Ends = "within"
    """Whether --sink and --recent tokens count `within` the budget, or come `beside` it, as the paper's sink and local
    tokens do. `beside` requires --rules fixed."""
    match: tuple[str, ...] = ()
    """Also measure our methods at as many tokens as these, such as magicpig, read on each context, in rows that they do
    not leave dense: a fair comparison with methods that ignore the budget."""
    out: Path = Path("runs/ppl")

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once(self, "rules")
        require_counts(self, scored=1)
        if self.score == "all" and (self.scored is not None or self.phase == "decode"):
            other = "--phase decode, which has a prompt" if self.scored is None else f"--scored {self.scored}"
            raise UsageError(f"--score all scores every token and excludes {other}; leave one of them out")
        if self.ends == "beside" and (self.rules != ("fixed",) or self.phase == "decode"):
            raise UsageError(
                "--ends beside needs a budget that is the same for every row: add --rules fixed, and leave --phase out"
            )
        if self.scored is not None and self.scored >= self.context - 1:
            raise UsageError(f"--scored must be below --context minus 1 = {self.context - 1}, got {self.scored}")
        if len(set(self.match)) < len(self.match):
            raise UsageError(f"--match must not repeat a method, got {' '.join(self.match)}")
        rivals = {name for name in self.methods if name != DENSE and in_table(name) not in OURS}
        if strange := [name for name in self.match if name not in rivals]:
            wanted = f"here {', '.join(sorted(rivals)) or 'none'}"
            raise UsageError(
                f"--match takes no {', '.join(strange)}; expected methods of --methods that are not ours, {wanted}"
            )
        if self.match and not {*rivals, DENSE} < {*self.methods, DENSE}:
            raise UsageError(f"--match needs a method of ours in --methods, got none; add one of {', '.join(OURS)}")

    @property
    def always(self) -> Always:
        return super().always._replace(beside=self.ends == "beside")

    @property
    def last(self) -> int:
        """Number of tokens scored at the end of each context."""
        return self.context - 1 if self.score == "all" else self.scored or scored_by_default(self.context)

    def settings(self, task: str) -> dict[str, Any]:
        return {**super().settings(task), "scored": self.last}


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
        if idle := [n for n in self.methods if n != DENSE and in_table(n) not in SELECTION_NAMES]:
            raise UsageError(f"--methods of iou takes {', '.join(SELECTION_NAMES)}, got {', '.join(idle)}")
        require_counts(self, rows=1)


@dataclass(frozen=True)
class FidelityCommand(TaskCommand):
    """Compare greedy continuations with dense attention's: Rouge-L, edit similarity, common prefix. Example: `evals
    fidelity`."""

    documents: int = 10
    context: int = 2048
    """Tokens of prompt and continuation together."""
    new_tokens: int = 64
    """Tokens per continuation."""
    out: Path = Path("runs/fidelity")

    always_prompted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, new_tokens=1)
        if self.new_tokens >= self.context:
            raise UsageError(f"--new-tokens must be below --context = {self.context}, got {self.new_tokens}")


@dataclass(frozen=True)
class NeedleCommand(MethodsCommand):
    """Find one value in a haystack, by length and depth: the answer generated after a dense prefill, and the
    log-probability of the correct one. With --haystack, a sentence in prose. Example: `evals needle --lengths 2048`."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Tokens of prompt and answer together."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Positions of the value: 0 is the beginning, 1 the end."""
    documents: int = 5
    """Needles per length and depth; a run can be continued with more."""
    haystack: tuple[Path, ...] = ()
    """Prose to hide a sentence in: text files, or folders of them. Default: lines of Python, with an assignment."""
    needle: str = NEEDLE
    """The sentence to hide in --haystack, and the answer expected."""
    question: str = QUESTION
    """The question about it."""
    out: Path = Path("runs/needle")

    always_prompted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        each_positive(self, "lengths")
        each_once(self, "depths")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UsageError(f"--depths must be from 0 to 1, got {depth:g}")
        for name in ("needle", "question"):
            if not getattr(self, name).strip():
                raise UsageError(f"--{name} needs some words, got none")


@dataclass(frozen=True)
class ThroughputCommand:
    """Time the decode steps of a whole model with random weights over synthetic caches: milliseconds, tokens per
    second, memory. Example: `evals throughput --shape small`."""

    shape: str = SMALL
    """small, demo, or a folder or hub id with a config.json; weights are random."""
    methods: Methods = WAYS
    """Dense: sdpa, eager. Sparse in all layers after the first --dense-layers: planes, recent."""
    contexts: tuple[int, ...] = (8192, 32768)
    """Numbers of cached tokens."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes: sequences decoded at once."""
    budget: float = 0.02
    """Share of the cached tokens to attend to."""
    dense_layers: int = 0
    """Number of first layers that stay dense."""
    repeats: int = 5
    """Number of turns of each method."""
    steps: int = 8
    """Timed steps per turn."""
    warmup: int = 2
    """Untimed steps at the start of each turn."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights, keys and values."""
    device: str = "cpu"
    """Device of the model: cpu, cuda, cuda:N, or auto (CUDA if available)."""
    seed: int = 0
    """Draws weights and caches."""
    out: Path = Path("runs/throughput")
    """Folder for rows, report and figure."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        require_counts(self, repeats=1, steps=1, warmup=0, dense_layers=0)
        require_device_name(self.device)
        for name in ("contexts", "batches"):
            each_positive(self, name)
        each_once(self, "methods")
        each_among(self, "methods", WAYS, "throughput")
        each_a_share(self, "budget")

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the results, as JSON values without local paths."""
        return settings_of(self, task, self.shape, "shape", "out")
