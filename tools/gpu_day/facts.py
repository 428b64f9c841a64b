"""What the machine is, and how fast: versions, a copy, a launch, the first search of a process."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time

import torch
from timing import Stage

PACKAGES = (
    *("torch", "transformers", "triton", "numpy", "numba", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"),
    *("hypothesis", "pytest", "pytest-xdist", "tyro"),
)
SMI = "name,driver_version,memory.total,clocks.max.sm,clocks.mem"


def run(stage: Stage) -> None:
    """Write the rows `facts`, `first_search`, `copy` and `launch`."""
    found: dict[str, object] = {"python": platform.python_version(), "cpus": os.cpu_count(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
        found["smi"] = subprocess.run(asked, capture_output=True, text=True, timeout=15, check=True).stdout.strip()
    if stage.cuda:
        about = torch.cuda.get_device_properties(0)
        found |= {"device": about.name, "capability": f"{about.major}.{about.minor}"}
        found |= {"sms": about.multi_processor_count, "l2_mb": about.L2_cache_size / 2**20}
    stage.put("facts", **found)
    with stage.part("first search"):
        _first_search(stage)
    if stage.cuda:
        source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        stage.put("copy", tb_s=2 * source.numel() / stage.graph_us([lambda: target.copy_(source)] * 4) / 1e6)
        x = torch.zeros(1024, device="cuda")
        tiny = [lambda: x.add_(1)] * 300
        stage.put("launch", graph_us=stage.graph_us(tiny), eager_us=stage.eager_us(tiny)[0])


def _first_search(stage: Stage) -> None:
    begun = time.perf_counter()
    import hashcore

    x = torch.randn(4, 4, 128, device=stage.device)
    planes, weights = hashcore.planes(x[:, 0], 6, check=False)
    hashcore.search(planes, hashcore.pack(x), 2, weights, order="index")
    stage.wait()
    stage.put("first_search", seconds=time.perf_counter() - begun)
