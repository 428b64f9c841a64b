"""What each further command will do: its settings, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashtrain.plan import DEMO
from hashtrain.usage import UsageError

from evals.methods import CODED_NAMES, DEFAULT_NAMES
from evals.plan import Methods, MethodsCommand, TaskCommand, at_least, each_once, each_positive
from evals.result import versions
from evals.shapes import PLANES
from evals.synthetic import KINDS


@dataclass(frozen=True)
class OutputErrorCommand(TaskCommand):
    """Relative error of each layer's attention output, by method, on the inputs that dense attention gives it."""

    methods: Methods = (*DEFAULT_NAMES, "quest", "quest-heads")
    """What to measure; `evals list` names them."""
    documents: int = 8
    """Contexts to measure; a run may be continued with more."""
    rows: int = 64
    """Rows measured in each context, from its last three quarters."""
    out: Path = Path("runs/output-error")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, rows=1)


@dataclass(frozen=True)
class FidelityCommand(TaskCommand):
    """Greedy continuations against those of dense attention: Rouge-L, edit similarity, common prefix."""

    documents: int = 10
    """Contexts to go on from; a run may be continued with more."""
    context: int = 2048
    """Tokens of prompt and continuation."""
    new_tokens: int = 64
    """Tokens of a continuation."""
    out: Path = Path("runs/fidelity")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, new_tokens=1)
        if self.new_tokens >= self.context:
            raise UsageError(f"--new-tokens must be below --context = {self.context}, got {self.new_tokens}")

    @property
    def dense_prompt(self) -> bool:
        """Whether the rows before those that are judged are dense, as in serving; else every row is sparse."""
        return True


@dataclass(frozen=True)
class SyntheticCommand(MethodsCommand):
    """What the exercises made by rule share."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Tokens of prompt and answer together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        each_positive(self, "lengths")

    @property
    def longest(self) -> tuple[str, int]:
        """The flag that says how many tokens the model must take, and the number."""
        return "--lengths", max(self.lengths)

    @property
    def dense_prompt(self) -> bool:
        """Whether the rows before those that are judged are dense, as in serving; else every row is sparse."""
        return True


@dataclass(frozen=True)
class RulerCommand(SyntheticCommand):
    """Exercises made by rule, as in RULER: one key, many keys, variables, copying, counting; dense prefill, then every
    token of the answer by the method."""

    kinds: tuple[str, ...] = tuple(KINDS)
    """Which exercises."""
    out: Path = Path("runs/ruler-synthetic")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once(self, "kinds")
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise UsageError(f"--kinds takes {', '.join(KINDS)}, got {', '.join(unknown)}")


@dataclass(frozen=True)
class NeedleCommand(SyntheticCommand):
    """One value in a haystack, by length and depth: what is generated after a dense prefill, and the log-probability of
    the answer."""

    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where the value lies: 0 is the beginning, 1 the end."""
    documents: int = 5
    """Needles to look for at each length and depth; a run may be continued with more."""
    out: Path = Path("runs/needle")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once(self, "depths")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UsageError(f"--depths must be from 0 to 1, got {depth:g}")


@dataclass(frozen=True)
class ConesCommand(TaskCommand):
    """Where queries and keys lie (the paper's figure 2): angles, principal components, and how evenly hash bits and
    codes are used."""

    methods: Methods = ("lsh", "paper", "planes", "transform")
    """Hashers whose codes to look at."""
    documents: int = 4
    """Contexts to look at; a run may be continued with more."""
    out: Path = Path("runs/cones")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    @property
    def own_heads(self) -> bool:
        """It looks at codes, not at selections."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is not None:
            raise UsageError(f"cones takes no --heads, got {self.heads}: it looks at codes alone; leave it out")
        if strange := [name for name in self.methods if name not in CODED_NAMES]:
            raise UsageError(f"--methods of cones takes {', '.join(CODED_NAMES)}, got {', '.join(strange)}")


@dataclass(frozen=True)
class CodelengthCommand(TaskCommand):
    """Overlap of untrained LSH at many code lengths beside the learned hashes, and the LSH length that equals each."""

    methods: Methods = ("paper", "planes", "transform")
    """Learned hashers to compare with."""
    more_hashers: tuple[Path, ...] = ()
    """Folders of hashers of other code lengths, as `hashtrain --bits 64 --out FOLDER` makes them: those of --methods
    that a folder has are measured, too."""
    bits: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    """Code lengths of untrained LSH, multiples of 32."""
    documents: int = 8
    """Contexts to measure; a run may be continued with more."""
    rows: int = 64
    """Rows measured in each context."""
    out: Path = Path("runs/codelength")
    """Where the samples, the rows, the report and the figure go; the same command again goes on where it stopped."""

    @property
    def own_heads(self) -> bool:
        """Both kinds of heads are measured, or the one that --heads names."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, rows=1)
        each_once(self, "bits")
        if odd := [bits for bits in self.bits if bits < 32 or bits % 32]:
            raise UsageError(f"--bits must be multiples of 32, got {odd[0]}")
        if len(self.budgets) > 1:
            raise UsageError(f"--budgets of codelength takes one, got {len(self.budgets)}")
        if strange := [name for name in self.methods if name not in CODED_NAMES]:
            raise UsageError(f"--methods of codelength takes {', '.join(CODED_NAMES)}, got {', '.join(strange)}")


@dataclass(frozen=True)
class ShapeCommand:
    """What the tasks that need only a model's shape share."""

    shape: str = "qwen2.5-7b"
    """qwen2.5-7b, llama3-8b, small, demo, or a folder with a config.json."""
    bits: int = 128
    """Bits of a code."""
    planes: int = PLANES
    """Bit planes of a query: by default as many as `transform` has, the hasher of `attach`; 3 are those of `planes`."""
    hidden: int = 128
    """Hidden width of the hash functions."""
    out: Path = Path("runs/shape")
    """Where the rows, the report and the figure go."""

    def __post_init__(self) -> None:
        at_least(self, bits=32, planes=1, hidden=1)
        if self.bits % 32:
            raise UsageError(f"--bits must be a multiple of 32, got {self.bits}")

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the numbers, as JSON values and with no path of the machine."""
        facts = {"bits": self.bits, "planes": self.planes, "hidden": self.hidden}
        return {
            "task": task,
            "model": Path(self.shape).name if self.shape != DEMO else DEMO,
            **facts,
            "versions": versions(),
        }


@dataclass(frozen=True)
class CodesizeCommand(ShapeCommand):
    """Bytes per token and KV head that each method keeps beside the keys and values, and their share of them."""

    out: Path = Path("runs/codesize")
    """Where the rows, the report and the figure go."""


@dataclass(frozen=True)
class ComplexityCommand(ShapeCommand):
    """Operations and bytes of each step of one sparse decode step of one layer, beside dense attention; by formula."""

    contexts: tuple[int, ...] = (8192, 32768, 131072)
    """Cached tokens."""
    budget: float = 0.02
    """Share of them to attend to."""
    out: Path = Path("runs/complexity")
    """Where the rows, the report and the figure go."""

    def __post_init__(self) -> None:
        super().__post_init__()
        each_positive(self, "contexts")
        if not 0 < self.budget <= 1:
            raise UsageError(f"--budget must be above 0 and at most 1, got {self.budget:g}; 0.02 selects 2 %")

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the numbers."""
        return {**super().settings(task), "contexts": list(self.contexts), "budget": self.budget}
