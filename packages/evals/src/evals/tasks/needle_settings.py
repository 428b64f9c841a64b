"""Settings of `needle`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hashtrain.usage import UsageError

from evals.settings import MethodsCommand, each_once, each_positive
from evals.synthetic import NEEDLE, QUESTION


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

    @property
    def longest(self) -> tuple[str, int]:
        return "--lengths", max(self.lengths)
