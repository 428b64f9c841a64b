"""Settings of the commands, checked before anything is read or written."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import tyro
from hashtrain.config import RECENT, SINK
from hashtrain.demo import DEMO, model_path
from hashtrain.usage import UsageError, require_counts, require_device_name, require_seed

from evals.checks import each_a_share, each_among, each_once
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
    """Settings that apply to all methods: dense layers, tokens that all rows read, and how hashes search."""

    dense_layers: int = 0
    """Number of first layers that stay dense."""
    sink: int = SINK
    recent: int = RECENT
    shortlist: int | None = None
    values: float = 1.0
    dense_at: tuple[int, ...] = ()
    """Further dense layers, by index."""
    beside: bool = False
    """Whether sink and recent tokens are added to a budget that is the same for all rows."""
    by_layer: bool = False
    """Whether hash methods divide a budget among layers (`sparse_decode.Budget.by_layer`)."""
    by_head: bool = False
    """Whether they divide that of each layer among its KV heads (`sparse_decode.Budget.by_head`)."""

    @property
    def divided(self) -> dict[str, bool]:
        """Fields of `sparse_decode.Budget` for hash methods."""
        return {"by_layer": self.by_layer, "by_head": self.by_head}

    def sparse(self, layers: int) -> list[int]:
        """Return the indices of the layers, out of `layers`, that do not stay dense."""
        return [n for n in range(self.dense_layers, layers) if n not in self.dense_at]


ALWAYS = Always()


@dataclass(frozen=True)
class MethodsCommand:
    """Options shared by the tasks that run a model."""

    model: str = DEMO
    """Folder or hub id of a Hugging Face causal LM; `demo` is the model that ships with hashtrain."""
    hashers: Path = Path("runs/demo")
    """Folder that `hashtrain` wrote, with one folder per hasher."""
    methods: Methods = DEFAULT_NAMES
    """Methods to measure; see `evals list`. Dense attention is always measured, rivals and ablations only if
    named."""
    budgets: Budgets = (0.02,)
    """Shares of the tokens that a row may select."""
    documents: int = 20
    """Contexts or exercises to measure; a run can be continued with more."""
    dense_layers: int = 0
    """Number of first layers that stay dense for every method, besides those that a hasher names (the paper: 2)."""
    dense_at: tuple[int, ...] = ()
    """Further layers that stay dense for every method, by index (MagicPIG: --dense-at 0 16)."""
    heads: Heads | None = None
    """Select once per KV head (`kv`), as deployed, or once per query head (`query`), as in the paper. Default: per
    query head for `paper-exact` and its variations, per KV head for all others."""
    sink: int = SINK
    """First tokens that every row reads with any method, within its budget (the paper: 0)."""
    recent: int = RECENT
    """Last tokens that every row reads with any method, within its budget (the paper: 0)."""
    shortlist: int | None = None
    """Shortlist of hash methods: score whole codes only for about this many times the selected tokens, the best by
    their first 32 bits. Default: all tokens."""
    values: float = 1.0
    """Share of the tokens read whose values are read too: those with the most attention by their exact logits."""
    seed: int = 0
    """Draws the order of documents, the exercises, the sampled rows and the bootstrap."""
    device: str = "cpu"
    """Device of the model: cpu, cuda, cuda:N, or auto (CUDA if available). Stored with the run's environment; not part
    of the protocol."""
    dtype: Dtype = "float32"
    """Type of the model's weights, queries, keys and values; `auto` keeps the stored type."""
    out: Path = Path("runs/evals")
    """Folder for samples, rows, report and figure; rerun the command to resume."""

    both_heads: ClassVar[bool] = False
    """Whether the task chooses between the two forms of a method itself."""
    always_prompted: ClassVar[bool] = False
    """Whether the task has a dense prompt whatever its settings."""
    unstored: ClassVar[tuple[str, ...]] = ("out", "hashers", "tuned", "device")
    """Fields that are no settings of a run: local paths, and what does not change its results."""

    def __post_init__(self) -> None:
        require_counts(self, documents=1, dense_layers=0, dense_at=0, sink=0, recent=0, shortlist=1)
        each_a_share(self, "values", "; 1 reads all values")
        require_seed(self.seed)
        require_device_name(self.device)
        for name in ("methods", "budgets"):
            each_once(self, name)
        each_a_share(self, "budgets")
        each_among(self, "methods", NAMES)
        if not set(self.methods) & set(SPARSE_NAMES):
            raise UsageError(f"--methods needs one of {', '.join(SPARSE_NAMES)} beside dense")

    @property
    def model_path(self) -> str:
        """The argument of `from_pretrained`."""
        return model_path(self.model)

    @property
    def always(self) -> Always:
        """Settings that apply to all methods."""
        return Always(self.dense_layers, self.sink, self.recent, self.shortlist, self.values, self.dense_at)

    @property
    def own_heads(self) -> bool:
        """Whether to load methods in the form that `heads` names."""
        return not self.both_heads

    @property
    def longest(self) -> tuple[str, int]:
        """The flag that decides how many tokens the model must accept, and their number."""
        raise NotImplementedError

    @property
    def dense_prompt(self) -> bool:
        """Whether rows before the evaluated ones are dense, as in serving; otherwise every row is sparse."""
        return self.always_prompted or getattr(self, "phase", None) == "decode"

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the results, as JSON values without local paths."""
        return settings_of(self, task, self.model, "model", *self.unstored)


@dataclass(frozen=True)
class TaskCommand(MethodsCommand):
    """Options shared by the tasks on text."""

    text: tuple[Path, ...] = ()
    """Text that no hasher was trained on: UTF-8 files, .jsonl, .parquet, folders of them, or a data set on the Hub,
    hub:OWNER/NAME[:SPLIT[:FIELD]] (extra `hashtrain[datasets]`). Default: held-out standard-library modules."""
    context: int = 4096
    """Tokens per context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, context=32)

    @property
    def longest(self) -> tuple[str, int]:
        return "--context", self.context


def settings_of(command: Any, task: str, model: str, *left_out: str) -> dict[str, Any]:
    """Return the task, the model's name and a command's other fields as JSON values without local paths."""
    given = {name: _plain(value) for name, value in asdict(command).items() if name not in left_out}
    return {"task": task, "model": model if model == DEMO else Path(model).name, **given, "versions": versions()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in cast(tuple[Any, ...], value)]
    return value.name if isinstance(value, Path) else value


@dataclass(frozen=True)
class DividedCommand(TaskCommand):
    """Options shared by the tasks that may divide a budget among layers and heads."""

    by_layer: bool = False
    """Hash methods read more in layers whose selections cost more, at the same total, by what training measured."""
    by_head: bool = False
    """Hash methods read more in KV heads whose selections cost more, at the same total of each layer."""

    @property
    def always(self) -> Always:
        return super().always._replace(by_layer=self.by_layer, by_head=self.by_head)

    def settings(self, task: str) -> dict[str, Any]:
        given = super().settings(task)
        for name in ("by_layer", "by_head"):
            if not given[name]:  # runs from before these options have none
                del given[name]
        return given


@dataclass(frozen=True)
class PplCommand(DividedCommand):
    """Perplexity, and divergence from dense attention, on held-out text, with every row sparse or only the rows that
    predict the scored tokens, the last ones of each context."""

    budgets: Budgets = (0.02, 0.01, 0.005)
    rules: tuple[Rule, ...] = ("visible", "fixed")
    """What a budget is a share of: `visible`: the row's visible tokens, at least 1; `fixed`, the paper's: the whole
    context, at least 20."""
    phase: Phase = "everywhere"
    """Sparse rows: `everywhere`, the paper's protocol; or `decode`, as in serving: the rows before the scored part are
    a dense prompt, and each scored token is predicted by a sparse row."""
    score: Score = "second-half"
    """Tokens scored in each context: the second half, or `all` but the first, as in the paper."""
    scored: int | None = None
    """Number of tokens scored at the end of each context. Default: see --score."""
    ends: Ends = "within"
    """Whether --sink and --recent tokens count `within` the budget, or come `beside` it, as the paper's sink and local
    tokens do. `beside` requires --rules fixed."""
    match: tuple[str, ...] = ()
    """Also measure our methods at the measured density of these methods, such as magicpig, on each context: a fair
    comparison with methods that ignore the budget."""
    tuned: Path | None = None
    """Folder of `evals tune`: also measure the rivals of --methods with the chosen parameters, as NAME-tuned."""
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
        rivals = {name + TUNED for name in self.methods if name in RIVAL_NAMES and self.tuned is not None}
        rivals |= set(self.methods) - {DENSE, *OURS}
        if strange := [name for name in self.match if name not in rivals]:
            wanted = f"here {', '.join(sorted(rivals)) or 'none'}"
            raise UsageError(
                f"--match takes no {', '.join(strange)}; expected methods of --methods that are not ours, {wanted}"
            )
        if self.match and not set(OURS) & set(self.methods):
            raise UsageError(f"--match needs a method of ours in --methods, got none; add one of {', '.join(OURS)}")

    @property
    def always(self) -> Always:
        return super().always._replace(beside=self.ends == "beside")

    @property
    def last(self) -> int | None:
        """Number of tokens scored at the end of each context; None for the second half."""
        return self.context - 1 if self.score == "all" else self.scored


@dataclass(frozen=True)
class IouCommand(TaskCommand):
    """Overlap of each method's selection with the largest exact attention, by layer and head, for rows drawn from the
    last three quarters of each context, or for its last row."""

    methods: Methods = SELECTION_DEFAULTS
    """Methods to measure; see `evals list`. Methods with the remainder are rejected, because it selects nothing."""
    rows: int = 64
    """Rows measured per context."""
    rows_from: RowsFrom = "drawn"
    """Rows to measure: `drawn` from the last three quarters of each context, or `last`, as in the paper: only the last
    row of each context, whatever --rows is."""
    out: Path = Path("runs/iou")

    both_heads: ClassVar[bool] = True  # both kinds are measured, or the one that --heads names

    def __post_init__(self) -> None:
        super().__post_init__()
        if idle := [name for name in self.methods if name in SPARSE_NAMES and name not in SELECTION_NAMES]:
            raise UsageError(f"--methods of iou takes {', '.join(SELECTION_NAMES)}, got {', '.join(idle)}")
        require_counts(self, rows=1)

    def settings(self, task: str) -> dict[str, Any]:
        given = super().settings(task)
        return given if self.rows_from == "drawn" else given | {"rows": 1}


@dataclass(frozen=True)
class ListCommand:
    """List the tasks and the methods."""
