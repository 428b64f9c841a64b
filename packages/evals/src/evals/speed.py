"""Settings of the commands that measure time, checked before anything is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hashtrain.usage import UsageError, require_counts, require_device_name, require_seed

from evals.base_commands import Methods
from evals.checks import each_a_share, each_among, each_once, each_positive
from evals.result import versions
from evals.shapes import PLANES, SMALL

ENDTOEND = ("sdpa", "eager", "compiled", "planes", "recent", "planes-compiled")
DENSE_ENDTOEND = ("sdpa", "eager", "compiled")
COMPILED = ("compiled", "planes-compiled")
STEPS = ("hash", "score", "select", "search", "attend", "dense")


@dataclass(frozen=True)
class SpeedCommand:
    """Options shared by the commands that measure time."""

    shape: str = SMALL
    """small, qwen2.5-7b, llama3-8b, demo, or a folder with a config.json; weights are random."""
    contexts: tuple[int, ...] = (8192, 32768)
    """Numbers of cached tokens."""
    budget: float = 0.02
    """Share of the cached tokens to attend to."""
    bits: int = 128
    """Bits per code."""
    planes: int = PLANES
    """Bit planes of a query. Default: those of `transform`, the hasher of `attach`; `planes` has 3."""
    hidden: int = 128
    """Hidden width of the hash functions."""
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
    out: Path = Path("runs/speed")
    """Folder for rows, report and figure."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        require_counts(self, bits=32, planes=1, hidden=1, repeats=1, steps=1, warmup=0)
        require_device_name(self.device)
        each_positive(self, "contexts")
        each_a_share(self, "budget")
        if self.bits % 32:
            raise UsageError(f"--bits must be a multiple of 32, got {self.bits}")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"--bandwidth must be above 0, got {self.bandwidth:g}")

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the results, as JSON values without local paths."""
        plain = {
            k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k not in ("out", "shape")
        }
        return {"task": task, "model": Path(self.shape).name, **plain, "versions": versions()}


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
