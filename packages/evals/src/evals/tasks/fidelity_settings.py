"""Settings of `fidelity`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hashtrain.usage import UsageError, require_counts

from evals.settings import TaskCommand


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
