"""Settings of `throughput`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hashtrain.config import HasherConfig, ModelShape
from hashtrain.usage import UsageError, require_counts, require_device_name, require_seed

from evals.settings import Methods, each_a_share, each_among, each_once, each_positive, settings_of

WAYS = ("sdpa", "eager", "planes", "recent")
DENSE_WAYS = ("sdpa", "eager")
PLANES = HasherConfig("transform", ModelShape(1, 1, 1, 128)).planes
"""Default number of bit planes of a query: that of `transform`, the default hasher of `attach`."""
SMALL = "small"
"""Name of a shape for two CPU cores (`evals.tasks.throughput`)."""


@dataclass(frozen=True)
class ThroughputCommand:
    """Time the decode steps of a whole model with random weights over synthetic caches: milliseconds, tokens per
    second, memory; first, the roofline. Example: `evals throughput --shape small`."""

    shape: str = SMALL
    """small, demo, or a folder or hub id with a config.json; weights are random."""
    bits: int = 128
    """Bits per code."""
    planes: int = PLANES
    """Bit planes of a query. Default: those of `transform`, the hasher of `attach`; `planes` has 3."""
    hidden: int = 128
    """Hidden width of the hash functions."""
    methods: Methods = WAYS
    """Dense: sdpa, eager. Sparse in all layers after the first --dense-layers: planes, recent."""
    contexts: tuple[int, ...] = (8192, 32768)
    """Numbers of cached tokens."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes: sequences decoded at once."""
    budget: float = 0.02
    """Share of the cached tokens to attend to."""
    dense_layers: int = 0
    """Number of first layers that stay dense."""
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
    out: Path = Path("runs/throughput")
    """Folder for rows, report and figure."""

    def __post_init__(self) -> None:
        require_seed(self.seed)
        require_counts(self, bits=32, planes=1, hidden=1, repeats=1, steps=1, warmup=0, dense_layers=0)
        require_device_name(self.device)
        for name in ("contexts", "batches"):
            each_positive(self, name)
        each_once(self, "methods")
        each_among(self, "methods", WAYS, "throughput")
        each_a_share(self, "budget")
        if self.bits % 32:
            raise UsageError(f"--bits must be a multiple of 32, got {self.bits}")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"--bandwidth must be above 0, got {self.bandwidth:g}")

    def settings(self, task: str) -> dict[str, Any]:
        """Return the settings that decide the results, as JSON values without local paths."""
        return settings_of(self, task, self.shape, "shape", "out")
