"""The environment of a run: software, which decides its results, and hardware, which decides its times."""

import importlib
import platform
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("hashcore", "hashtrain", "sparse-decode", "evals")
"""This project's own."""
SOFTWARE = ("python", "torch", "transformers", "numpy", "numba", *PACKAGES)


def environment(device: str = "cpu") -> dict[str, str]:
    """Return the versions, the processor, torch's threads and the device; no host name, user or path.

    Args:
        device: where the model runs; a CUDA device is reported by its model, such as `NVIDIA H100`.
    """
    import torch  # imported here: `--help` needs only the packages' names

    packages = {name: version(name) for name in ("torch", "transformers", "numpy", "numba")} | own_versions()
    software = {"python": platform.python_version(), **packages}
    named = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {**software, "processor": processor(), "threads": str(torch.get_num_threads()), "device": named}


def own_versions() -> dict[str, str]:
    """Return the versions of this project's packages, which need not be installed: their sources are enough."""
    return {name: importlib.import_module(name.replace("-", "_")).__version__ for name in PACKAGES}


def processor() -> str:
    """Return the model name of the processor, or its architecture if the system has no name for it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
