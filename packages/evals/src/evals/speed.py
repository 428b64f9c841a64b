"""Commands that measure time: their settings, checked before anything is built."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hashtrain.plan import require_device_name
from hashtrain.usage import UsageError, require_seed

from evals.plan import Methods, at_least, each_once, each_positive
from evals.result import versions
from evals.shapes import PLANES, SMALL

ENDTOEND = ("sdpa", "eager", "compiled", "planes", "recent", "planes-compiled")
DENSE_ENDTOEND = ("sdpa", "eager", "compiled")
COMPILED = ("compiled", "planes-compiled")
STEPS = ("hash", "score", "select", "search", "attend", "dense")


@dataclass(frozen=True)
class SpeedCommand:
    """What the measurements of time share."""

    shape: str = SMALL
    """small, qwen2.5-7b, llama3-8b, demo, or a folder with a config.json; weights are random."""
    contexts: tuple[int, ...] = (8192, 32768)
    """Cached tokens."""
    budget: float = 0.02
    """Share of them to attend to."""
    bits: int = 128
    """Bits of a code."""
    planes: int = PLANES
    """Bit planes of a query: by default as many as `transform` has, the hasher of `attach`; 3 are those of `planes`."""
    hidden: int = 128
    """Hidden width of the hash functions."""
    repeats: int = 5
    """Turns of each method."""
    steps: int = 8
    """Timed steps of a turn."""
    warmup: int = 2
    """Steps before them, not timed."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, keys and values."""
    bandwidth: float | None = None
    """Memory bandwidth in GB/s for the roofline; measured without it."""
    device: str = "cpu"
    """Where the model runs: cpu, cuda, cuda:N, or auto: CUDA if there is one."""
    seed: int = 0
    """Draws weights, caches and the bootstrap."""
    out: Path = Path("runs/speed")
    """Where the rows, the report and the figure go."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        at_least(self, bits=32, planes=1, hidden=1, repeats=1, steps=1, warmup=0)
        require_device_name(self.device)
        each_positive(self, "contexts")
        if not 0 < self.budget <= 1:
            raise UsageError(f"--budget must be above 0 and at most 1, got {self.budget:g}; 0.02 selects 2 %")
        if self.bits % 32:
            raise UsageError(f"--bits must be a multiple of 32, got {self.bits}")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"--bandwidth must be above 0, got {self.bandwidth:g}")

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the numbers, as JSON values and with no path of the machine."""
        plain = {
            k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k not in ("out", "shape")
        }
        return {"task": task, "model": Path(self.shape).name, **plain, "versions": versions()}


@dataclass(frozen=True)
class ThroughputCommand(SpeedCommand):
    """Decode steps of a whole model with random weights over synthetic caches: milliseconds, tokens per second, memory.
    The roofline is printed before."""

    methods: Methods = ENDTOEND
    """Dense: sdpa, eager, compiled. Sparse from layer 2 on: planes, recent, planes-compiled. The compiled ones decode
    over a static cache under torch.compile, which needs a C++ compiler on the CPU."""
    batches: tuple[int, ...] = (1,)
    """Sequences at once."""
    dense_layers: int = 0
    """The first layers, which stay dense."""
    out: Path = Path("runs/throughput")
    """Where the rows, the report and the figure go."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, dense_layers=0)
        for name in ("methods", "batches"):
            each_once(self, name)
        at_least(self, batches=1)
        if strange := [name for name in self.methods if name not in ENDTOEND]:
            raise UsageError(f"--methods of throughput takes {', '.join(ENDTOEND)}, got {', '.join(strange)}")


@dataclass(frozen=True)
class KernelsCommand(SpeedCommand):
    """Each step of one sparse decode step of one layer, alone, beside dense attention: milliseconds and share of what
    memory allows."""

    contexts: tuple[int, ...] = (32768, 131072)
    """Cached tokens."""
    steps: int = 16
    """Timed steps of a turn."""
    out: Path = Path("runs/kernels")
    """Where the rows, the report and the figure go."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device != "cpu":
            raise UsageError(f"--device of kernels is cpu, got {self.device}")
