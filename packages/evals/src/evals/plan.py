"""What each command will do: its settings, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from hashtrain.config import RECENT, SINK
from hashtrain.plan import DEMO, model_path, require_device_name
from hashtrain.usage import UsageError, require_counts, require_seed

from evals.methods import (
    DEFAULT_NAMES,
    DENSE,
    NAMES,
    OURS,
    RIVAL_NAMES,
    SELECTION_DEFAULTS,
    SELECTION_NAMES,
    SPARSE_NAMES,
    TUNED,
)
from evals.result import versions

Methods = Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--method",))]
Budgets = Annotated[tuple[float, ...], tyro.conf.arg(aliases=("--budget",))]
Rule = Literal["visible", "fixed"]
Phase = Literal["everywhere", "decode"]
Heads = Literal["kv", "query"]
Score = Literal["second-half", "all"]
Ends = Literal["within", "beside"]
RowsFrom = Literal["drawn", "last"]
Dtype = Literal["float32", "bfloat16", "float16", "auto"]


class Always(NamedTuple):
    """What no method decides: the layers that stay dense, tokens that all rows read, and how hashes search."""

    dense_layers: int = 0
    """The first layers."""
    sink: int = SINK
    recent: int = RECENT
    shortlist: int | None = None
    dense_at: tuple[int, ...] = ()
    """Further layers, by index."""
    beside: bool = False
    """Whether sink and recent tokens come on top of a budget that is the same for all rows."""

    def sparse(self, layers: int) -> list[int]:
        """List the layers, of so many, that do not stay dense."""
        return [n for n in range(self.dense_layers, layers) if n not in self.dense_at]


ALWAYS = Always()


@dataclass(frozen=True)
class MethodsCommand:
    """What the tasks that run a model share."""

    model: str = DEMO
    """A folder or hub id of a Hugging Face causal LM; `demo` is the model that ships with hashtrain."""
    hashers: Path = Path("runs/demo")
    """The folder that `hashtrain` wrote, with one folder per hasher."""
    methods: Methods = DEFAULT_NAMES
    """What to measure; `evals list` names them. Dense attention is always measured, the rivals' own only if named."""
    budgets: Budgets = (0.02,)
    """Shares of the tokens that a row may select."""
    documents: int = 20
    """Contexts or exercises to measure; a run may be continued with more."""
    dense_layers: int = 0
    """The first layers, which stay dense for every method, beside those that a hasher names (the paper: 2)."""
    dense_at: tuple[int, ...] = ()
    """Further layers that stay dense for every method, by index (MagicPIG: --dense-at 0 16)."""
    heads: Heads | None = None
    """Whether a method selects once per KV head (`kv`), as deployed, or once per query head (`query`), as in the paper;
    None: as each method is meant, `paper-exact` and its kin per query head, the others per KV head."""
    sink: int = SINK
    """First tokens that every row reads, whatever the method, within its budget (the paper: 0)."""
    recent: int = RECENT
    """Last tokens that every row reads, whatever the method, within its budget (the paper: 0)."""
    shortlist: int | None = None
    """Hash methods score by whole codes about this many times the tokens they select, the best by their first 32 bits;
    None: all tokens."""
    seed: int = 0
    """Draws the order of documents, the exercises, the sampled rows and the bootstrap."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:N, or auto: CUDA if there is one. Stored with the run's environment, since
    it is no part of the protocol."""
    dtype: Dtype = "float32"
    """Of the model's weights, and so of queries, keys and values; `auto` as they are stored."""
    out: Path = Path("runs/evals")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        at_least(self, documents=1, dense_layers=0, dense_at=0, sink=0, recent=0, shortlist=1)
        require_seed(self.seed)
        require_device_name(self.device)
        for name in ("methods", "budgets"):
            each_once(self, name)
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
        return model_path(self.model)

    @property
    def always(self) -> Always:
        """What no method decides."""
        return Always(self.dense_layers, self.sink, self.recent, self.shortlist, self.dense_at)

    @property
    def own_heads(self) -> bool:
        """Whether methods are to be loaded in the form that `heads` names; else the task has both, and chooses."""
        return True

    @property
    def longest(self) -> tuple[str, int]:
        """The flag that says how many tokens the model must take, and the number."""
        raise NotImplementedError

    @property
    def dense_prompt(self) -> bool:
        """Whether the rows before those that are judged are dense, as in serving; else every row is sparse."""
        return False

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the numbers, as JSON values and with no path of the machine."""
        given = {k: v for k, v in asdict(self).items() if k not in ("out", "hashers", "tuned", "device")}
        given["model"] = self.model if self.model == DEMO else Path(self.model).name
        return {"task": task, **{k: _plain(v) for k, v in given.items()}, "versions": versions()}


@dataclass(frozen=True)
class TaskCommand(MethodsCommand):
    """What the tasks on text share."""

    text: tuple[Path, ...] = ()
    """Text that no hasher was trained on: UTF-8 files, .jsonl, .parquet, folders of them, or a data set of the Hub,
    hub:OWNER/NAME[:SPLIT[:FIELD]] (extra `hashtrain[datasets]`); without any, held-out standard-library modules."""
    context: int = 4096
    """Tokens a context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, context=32)

    @property
    def longest(self) -> tuple[str, int]:
        """The flag that says how many tokens the model must take, and the number."""
        return "--context", self.context


def at_least(command: Any, **bounds: int) -> None:
    """Raise UsageError if a field is below its bound, or larger than any count."""
    require_counts(command, **bounds)


def each_once(command: Any, name: str) -> None:
    """Raise UsageError if a field of several values has none, or one twice."""
    given = getattr(command, name)
    if not given or len(set(given)) < len(given):
        raise UsageError(f"--{name} needs one value or more, each once, got {' '.join(map(str, given)) or 'none'}")


def each_positive(command: Any, name: str) -> None:
    """Raise UsageError if a field of several numbers has none, one twice, or one below 1."""
    each_once(command, name)
    require_counts(command, **{name: 1})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Path) else value


@dataclass(frozen=True)
class PplCommand(TaskCommand):
    """Perplexity, and divergence from dense attention, on held-out text with every row sparse, or only those that are
    scored: the last ones of each context."""

    budgets: Budgets = (0.02, 0.01, 0.005)
    """Shares of the tokens that a row may select."""
    rules: tuple[Rule, ...] = ("visible", "fixed")
    """Share of what: `visible` to the row, at least 1 token; `fixed`, the paper's: the whole context, at least 20."""
    phase: Phase = "everywhere"
    """Which rows are sparse: `everywhere`, the paper's protocol; `decode`, as in serving: the rows before the scored
    part are a dense prompt, and each scored token is predicted by a sparse row."""
    score: Score = "second-half"
    """Which tokens of each context are scored: the second half, or `all` but the first, as in the paper."""
    scored: int | None = None
    """How many of each context's tokens are scored, the last ones; without it, those of --score."""
    ends: Ends = "within"
    """Whether --sink and --recent tokens count `within` the budget, or come `beside` it, as the paper's sink and local
    tokens do; the latter with --rules fixed alone."""
    match: tuple[str, ...] = ()
    """Methods, such as magicpig, at whose measured density on each context ours are measured, too: a fair comparison
    with those that heed no budget."""
    tuned: Path | None = None
    """A folder of `evals tune`: the rivals of --methods are measured with what it chose, too, as NAME-tuned."""
    out: Path = Path("runs/ppl")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once(self, "rules")
        require_counts(self, scored=1)
        if self.score == "all" and (self.scored is not None or self.phase == "decode"):
            other = "--phase decode, which has a prompt" if self.scored is None else f"--scored {self.scored}"
            raise UsageError(f"--score all scores every token, and goes with no {other}; leave one of them out")
        if self.ends == "beside" and (self.rules != ("fixed",) or self.phase == "decode"):
            raise UsageError(
                "--ends beside needs --rules fixed alone and --phase everywhere: other rows' budgets differ"
            )
        if self.scored is not None and self.scored >= self.context - 1:
            raise UsageError(f"--scored must be below --context {self.context} less 1, got {self.scored}")
        if len(set(self.match)) < len(self.match):
            raise UsageError(f"--match takes each method once, got {' '.join(self.match)}")
        rivals = {name + TUNED for name in self.methods if name in RIVAL_NAMES and self.tuned is not None}
        rivals |= set(self.methods) - {DENSE, *OURS}
        if strange := [name for name in self.match if name not in rivals]:
            raise UsageError(f"--match takes methods of --methods that are not ours, got {', '.join(strange)}")
        if self.match and not set(OURS) & set(self.methods):
            raise UsageError(f"--match needs one of {', '.join(OURS)} in --methods")

    @property
    def always(self) -> Always:
        """What no method decides."""
        return super().always._replace(beside=self.ends == "beside")

    @property
    def last(self) -> int | None:
        """How many tokens are scored, the last ones; None for the second half."""
        return self.context - 1 if self.score == "all" else self.scored

    @property
    def dense_prompt(self) -> bool:
        """Whether the rows before those that are judged are dense, as in serving; else every row is sparse."""
        return self.phase == "decode"


@dataclass(frozen=True)
class IouCommand(TaskCommand):
    """Overlap of each method's selection with the largest exact attention, by layer and head; of rows drawn from the
    last three quarters of each context, or of its last row."""

    methods: Methods = SELECTION_DEFAULTS
    """What to measure; `evals list` names them. The remainder selects nothing, so methods with it are not taken."""
    rows: int = 64
    """Rows measured in each context."""
    rows_from: RowsFrom = "drawn"
    """Which rows: `drawn` from the last three quarters of each context, or `last`, the paper's form: the last row
    alone, one a context, whatever --rows says."""
    out: Path = Path("runs/iou")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if idle := [name for name in self.methods if name in SPARSE_NAMES and name not in SELECTION_NAMES]:
            raise UsageError(f"--methods of iou takes {', '.join(SELECTION_NAMES)}, got {', '.join(idle)}")
        at_least(self, rows=1)

    @property
    def own_heads(self) -> bool:
        """Both kinds of heads are measured, or the one that --heads names."""
        return False

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the numbers, as JSON values and with no path of the machine."""
        given = super().settings(task)
        return given if self.rows_from == "drawn" else given | {"rows": 1}


@dataclass(frozen=True)
class ListCommand:
    """Name the tasks and the methods."""
