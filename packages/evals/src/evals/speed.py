"""Settings of the commands that measure time, checked before anything is built."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hashtrain.usage import UsageError, require_counts, require_device_name, require_seed

from evals.base_commands import Methods
from evals.checks import each_a_share, each_among, each_once, each_positive
from evals.commands import ShapeCommand
from evals.shapes import SMALL

ENDTOEND = ("sdpa", "eager", "compiled", "planes", "recent", "planes-compiled")
DENSE_ENDTOEND = ("sdpa", "eager", "compiled")
COMPILED = ("compiled", "planes-compiled")
STEPS = ("hash", "score", "select", "search", "attend", "dense")


@dataclass(frozen=True)
class SpeedCommand(ShapeCommand):
    """Options shared by the commands that measure time."""

    shape: str = SMALL
    """small, qwen2.5-7b, llama3-8b, demo, or a folder with a config.json; weights are random."""
    contexts: tuple[int, ...] = (8192, 32768)
    """Numbers of cached tokens."""
    budget: float = 0.02
    """Share of the cached tokens to attend to."""
    repeats: int = 5
    """Number of turns of each method."""
    steps: int = 8
    """Timed steps per turn."""
    warmup: int = 2
    """Untimed steps at the start of each turn."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights, keys and values."""
    bandwidth: float | None = None
    """Memory bandwidth in GB/s for the roofline. Default: measured."""
    device: str = "cpu"
    """Device of the model: cpu, cuda, cuda:N, or auto (CUDA if available)."""
    seed: int = 0
    """Draws weights, caches and the bootstrap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seed(self.seed)
        require_counts(self, repeats=1, steps=1, warmup=0)
        require_device_name(self.device)
        each_positive(self, "contexts")
        each_a_share(self, "budget")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"--bandwidth must be above 0, got {self.bandwidth:g}")


@dataclass(frozen=True)
class ThroughputCommand(SpeedCommand):
    """Time the decode steps of a whole model with random weights over synthetic caches: milliseconds, tokens per
    second, memory. Prints the roofline first."""

    methods: Methods = ENDTOEND
    """Dense: sdpa, eager, compiled. Sparse in all layers after the first --dense-layers: planes, recent,
    planes-compiled. The compiled ones use a static cache and torch.compile, which needs a C++ compiler on the CPU."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes: sequences decoded at once."""
    dense_layers: int = 0
    """Number of first layers that stay dense."""
    out: Path = Path("runs/throughput")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, dense_layers=0)
        for name in ("methods", "batches"):
            each_once(self, name)
        require_counts(self, batches=1)
        each_among(self, "methods", ENDTOEND, "throughput")


@dataclass(frozen=True)
class KernelsCommand(SpeedCommand):
    """Time each part of a sparse decode step in one layer, and dense attention: milliseconds, and the share of the
    memory roofline reached."""

    contexts: tuple[int, ...] = (32768, 131072)
    steps: int = 16
    out: Path = Path("runs/kernels")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device != "cpu":
            raise UsageError(f"--device of kernels is cpu, got {self.device}")
