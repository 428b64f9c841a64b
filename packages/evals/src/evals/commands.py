"""Settings of further commands, checked before anything is read or written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro
from hashtrain.usage import UsageError, require_counts

from evals.base_commands import DividedCommand, Methods, MethodsCommand, TaskCommand, settings_of
from evals.checks import each_a_share, each_among, each_once, each_positive, left_out, one_budget
from evals.codes import CODES
from evals.methods import CODED_NAMES, DEFAULT_NAMES
from evals.shapes import PLANES
from evals.synthetic import KINDS, NEEDLE, QUESTION


@dataclass(frozen=True)
class OutputErrorCommand(DividedCommand):
    """Relative error of each layer's attention output, by method, on the inputs of dense attention."""

    methods: Methods = (*DEFAULT_NAMES, "quest", "quest-heads")
    """Methods to measure; see `evals list`."""
    documents: int = 8
    rows: int = 64
    """Rows measured per context, drawn from its last three quarters."""
    out: Path = Path("runs/output-error")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, rows=1)


@dataclass(frozen=True)
class FidelityCommand(TaskCommand):
    """Compare greedy continuations with those of dense attention: Rouge-L, edit similarity, common prefix. With --from,
    the stored answers of a run of longbench, by task."""

    documents: int = 10
    context: int = 2048
    """Tokens of prompt and continuation together."""
    new_tokens: int = 64
    """Tokens per continuation."""
    from_run: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Folder of a finished run of longbench, whose answers are compared; the model is not run, and of the other options
    only --out and --seed are used."""
    out: Path = Path("runs/fidelity")

    always_prompted: ClassVar[bool] = True
    # A run of stored answers has the settings of the other run.
    unstored: ClassVar[tuple[str, ...]] = (*TaskCommand.unstored, "from_run")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, new_tokens=1)
        if self.new_tokens >= self.context:
            raise UsageError(f"--new-tokens must be below --context = {self.context}, got {self.new_tokens}")


@dataclass(frozen=True)
class SyntheticCommand(MethodsCommand):
    """Options shared by the synthetic exercises."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Tokens of prompt and answer together."""

    always_prompted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        each_positive(self, "lengths")

    @property
    def longest(self) -> tuple[str, int]:
        return "--lengths", max(self.lengths)


@dataclass(frozen=True)
class RulerCommand(SyntheticCommand):
    """Synthetic exercises like RULER's: one key, many keys, variables, copying, counting. Dense prefill, then every
    token of the answer with the method."""

    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds of exercises."""
    out: Path = Path("runs/ruler-synthetic")

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once(self, "kinds")
        each_among(self, "kinds", KINDS)


@dataclass(frozen=True)
class NeedleCommand(SyntheticCommand):
    """One value in a haystack, by length and depth: the answer generated after a dense prefill, and the log-probability
    of the correct one. With --haystack, a sentence in prose and a question about it."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        each_once(self, "depths")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UsageError(f"--depths must be from 0 to 1, got {depth:g}")
        for name in ("needle", "question"):
            if not getattr(self, name).strip():
                raise UsageError(f"--{name} needs some words, got none")


@dataclass(frozen=True)
class ConesCommand(TaskCommand):
    """Geometry of queries and keys (the paper's figure 2): angles, principal components, and how evenly hash bits and
    codes are used."""

    methods: Methods = ("lsh", "paper", "transform")
    """Hashers whose codes to examine."""
    documents: int = 4
    out: Path = Path("runs/cones")

    both_heads: ClassVar[bool] = True  # only codes are examined, not selections

    def __post_init__(self) -> None:
        super().__post_init__()
        left_out(self, "heads", "cones", "it examines only codes")
        each_among(self, "methods", CODED_NAMES, "cones")


@dataclass(frozen=True)
class CodelengthCommand(TaskCommand):
    """IoU of untrained LSH at many code lengths and of learned hashes, and the LSH length that equals each."""

    methods: Methods = ("paper", "transform")
    """Learned hashers to compare with."""
    more_hashers: tuple[Path, ...] = ()
    """Folders of hashers with other code lengths, as `hashtrain --bits 64 --out FOLDER` makes them. Every hasher of
    --methods found there is measured too."""
    bits: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    """Code lengths of untrained LSH, multiples of 32."""
    documents: int = 8
    rows: int = 64
    """Rows measured per context."""
    out: Path = Path("runs/codelength")

    both_heads: ClassVar[bool] = True  # both kinds are measured, or the one that --heads names

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, rows=1)
        each_once(self, "bits")
        if odd := [bits for bits in self.bits if bits < 32 or bits % 32]:
            raise UsageError(f"--bits must be multiples of 32, got {odd[0]}")
        one_budget(self, "codelength")
        each_among(self, "methods", CODED_NAMES, "codelength")


@dataclass(frozen=True)
class CodesCommand(TaskCommand):
    """Codes of 16 bytes a key, factors included: hashers beside product quantisation, ITQ, RaBitQ and TurboQuant, by
    the exact attention that their best keys find, per KV head."""

    methods: Methods = ("lsh", "transform-start", "transform")
    """Hashers of 128 bits."""
    codes: tuple[str, ...] = tuple(CODES)
    """Codes to compare them with."""
    training_text: tuple[Path, ...] = ()
    """Text to fit these codes on, best that of the hashers. Default: standard-library modules that are not held out."""
    training_contexts: int = 4
    """Contexts to fit on."""
    training_keys: int = 4096
    """Tokens of each of them whose keys are used, drawn at random."""
    documents: int = 4
    rows: int = 64
    """Rows measured per context, drawn from its last three quarters."""
    out: Path = Path("runs/codes")

    both_heads: ClassVar[bool] = True  # both ways to combine a group's heads are measured

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, rows=1, training_contexts=1, training_keys=1)
        each_once(self, "codes")
        each_among(self, "codes", CODES)
        each_among(self, "methods", CODED_NAMES, "codes")
        for name, usual in (("heads", None), ("shortlist", None), ("values", 1.0)):
            left_out(self, name, "codes", "it compares whole codes", usual)


@dataclass(frozen=True)
class ShapeCommand:
    """Options shared by the tasks that need only a model's shape."""

    shape: str = "qwen2.5-7b"
    """qwen2.5-7b, llama3-8b, small, demo, or a folder with a config.json."""
    bits: int = 128
    """Bits per code."""
    planes: int = PLANES
    """Bit planes of a query. Default: those of `transform`, the hasher of `attach`; `planes` has 3."""
    hidden: int = 128
    """Hidden width of the hash functions."""
    out: Path = Path("runs/shape")
    """Folder for rows, report and figure."""

    def __post_init__(self) -> None:
        require_counts(self, bits=32, planes=1, hidden=1)
        if self.bits % 32:
            raise UsageError(f"--bits must be a multiple of 32, got {self.bits}")

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the results, as JSON values without local paths."""
        return settings_of(self, task, self.shape, "shape", "out")


@dataclass(frozen=True)
class CodesizeCommand(ShapeCommand):
    """Bytes that each method stores per token and KV head in addition to keys and values, and their ratio to those."""

    out: Path = Path("runs/codesize")


@dataclass(frozen=True)
class ComplexityCommand(ShapeCommand):
    """Operations and bytes of each part of a sparse decode step in one layer, and of dense attention, by formula."""

    contexts: tuple[int, ...] = (8192, 32768, 131072)
    """Numbers of cached tokens."""
    budget: float = 0.02
    """Share of the cached tokens to attend to."""
    out: Path = Path("runs/complexity")

    def __post_init__(self) -> None:
        super().__post_init__()
        each_positive(self, "contexts")
        each_a_share(self, "budget")
