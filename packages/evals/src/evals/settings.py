"""Settings that several commands share, and their checks, made before anything is read or written."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import tyro
from hashtrain.config import RECENT, SINK
from hashtrain.demo import DEMO
from hashtrain.usage import UsageError, did_you_mean, require_counts, require_device_name, require_seed

from evals.methods import DEFAULT_NAMES, DENSE, SPARSE_NAMES, known
from evals.results import versions

Methods = Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--method",))]
Budgets = Annotated[tuple[float, ...], tyro.conf.arg(aliases=("--budget",))]
Phase = Literal["everywhere", "decode"]
Heads = Literal["kv", "query"]
Prompt = Literal["exact", "sparse"]
Dtype = Literal["float32", "bfloat16", "float16", "auto"]


class Always(NamedTuple):
    """What applies to all methods: layers that stay dense, and tokens that all rows read."""

    dense_layers: int = 0
    """Number of first layers that stay dense."""
    sink: int = SINK
    recent: int = RECENT
    dense_at: tuple[int, ...] = ()
    """Further dense layers, by index."""
    beside: bool = False
    """Whether sink and recent tokens are added to a budget that is the same for all rows."""
    prompt: Prompt = "exact"
    """How rows of the prompt attend, which are dense for every method."""

    @property
    def dense(self) -> set[int]:
        """Indices of the layers that stay dense."""
        return {*range(self.dense_layers), *self.dense_at}

    def sparse(self, layers: int) -> list[int]:
        """Return the indices of the layers, out of `layers`, that do not stay dense."""
        return [n for n in range(layers) if n not in self.dense]


ALWAYS = Always()


def each_once(command: Any, name: str) -> None:
    """Raise UsageError if a field of several values is empty or has a value twice."""
    given = getattr(command, name)
    if not given or len(set(given)) < len(given):
        got = " ".join(map(str, given)) or "none"
        raise UsageError(f"--{name} needs one value or more, without repeats, got {got}")


def each_a_share(command: Any, name: str) -> None:
    """Raise UsageError unless a share, or each of several, is above 0 and at most 1; None is no share."""
    given = getattr(command, name)
    for value in cast(tuple[float, ...], given) if isinstance(given, tuple) else (given,):
        if value is not None and not 0 < value <= 1:
            raise UsageError(f"--{name} must be above 0 and at most 1, got {value:g}; 0.02 selects 2 %")


def each_among(command: Any, name: str, known: Collection[str], task: str = "") -> None:
    """Raise UsageError if a field of several names has one that is not known."""
    if unknown := [one for one in getattr(command, name) if one not in known]:
        of = f" of {task}" if task else ""
        raise UsageError(f"--{name}{of} takes no {did_you_mean(unknown, known)}")


def each_positive(command: Any, name: str) -> None:
    """Raise UsageError if a field of several numbers is empty, has one twice, or has one below 1."""
    each_once(command, name)
    require_counts(command, **{name: 1})


@dataclass(frozen=True)
class MethodsCommand:
    """Options shared by the tasks that run a model."""

    model: str = DEMO
    """Folder or hub id of a Hugging Face causal LM; `demo` is the model that ships with hashtrain."""
    hashers: Path = Path("runs/demo")
    """Folder that `hashtrain` wrote, with one folder per hasher."""
    methods: Methods = DEFAULT_NAMES
    """Methods to measure; see `evals list`. Dense attention is always measured, rivals and ablations only if
    named. `4k/transform` takes the hasher from the folder `4k` below --hashers."""
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
    prompt: Prompt = "exact"
    """`sparse`: with every method but dense, the rows before the evaluated ones are sparse as those of
    `attach(..., prompt="sparse")`. Needs --dtype bfloat16. `--methods oracle --budgets 1` then measures it alone."""
    seed: int = 0
    """Draws the order of documents, the exercises and the sampled rows."""
    device: str = "cpu"
    """Device of the model: cpu, cuda, cuda:N, or auto (CUDA if available). Stored with the run's environment; not part
    of the protocol."""
    dtype: Dtype = "float32"
    """Type of the model's weights, queries, keys and values; `auto`: the stored one (`load_model`)."""
    out: Path = Path("runs/evals")
    """Folder for samples, rows, report and figure; rerun the command to resume."""

    both_heads: ClassVar[bool] = False
    """Whether the task chooses between the two forms of a method itself."""
    always_prompted: ClassVar[bool] = False
    """Whether the task has a dense prompt whatever its settings."""
    unstored: ClassVar[tuple[str, ...]] = ("out", "hashers", "device")
    """Fields that are no settings of a run: local paths, and what does not change its results."""

    def __post_init__(self) -> None:
        require_counts(self, documents=1, dense_layers=0, dense_at=0, sink=0, recent=0)
        require_seed(self.seed)
        require_device_name(self.device)
        for name in ("methods", "budgets"):
            each_once(self, name)
        each_a_share(self, "budgets")
        each_among(self, "methods", known(self.methods))
        if set(self.methods) == {DENSE}:
            raise UsageError(f"--methods needs one of {', '.join(SPARSE_NAMES)} beside dense")
        if self.prompt == "sparse" and not self.dense_prompt:
            raise UsageError("--prompt sparse needs rows before the evaluated ones; in ppl, add --phase decode")

    @property
    def always(self) -> Always:
        """Settings that apply to all methods."""
        return Always(self.dense_layers, self.sink, self.recent, self.dense_at, prompt=self.prompt)

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
    within: int | None = None
    """Cut contexts of so many tokens and keep the last --context of each, so that runs of several lengths score the
    same tokens. Default: --context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, context=32, within=self.context)


def settings_of(command: Any, task: str, model: str, *left_out: str) -> dict[str, Any]:
    """Return the task, the model's name and a command's other fields as JSON values without local paths."""
    given = {name: _plain(value) for name, value in asdict(command).items() if name not in left_out}
    return {"task": task, "model": model if model == DEMO else Path(model).name, **given, "versions": versions()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in cast(tuple[Any, ...], value)]
    return value.name if isinstance(value, Path) else value
