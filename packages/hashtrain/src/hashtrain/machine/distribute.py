"""Devices: which one a process works on. Worker processes on CUDA have one device each, and train different layers."""

import torch
from hashcore.cuda.program import require_compiler

from hashtrain.machine import workers


def device_for(asked: str, local: int) -> torch.device:
    """Return the device that one process works on.

    Args:
        asked: `auto` (CUDA if available), `cpu`, `cuda` (one device per process of a machine) or `cuda:N`.
        local: number of the process on its machine.
    Raises: ValueError if there is no such device, or if our kernels, which are also needed after hours of training,
        cannot be compiled for it.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    number = int(index) if index else local % max(1, count)
    if number >= count:
        got = f"{count} CUDA devices, cuda:0 to cuda:{count - 1}" if count else "no CUDA device that torch can use"
        raise ValueError(f"--device {asked} does not exist: this machine has {got}; use --device cpu")
    require_compiler()
    return torch.device("cuda", number)


def here(asked: str) -> torch.device:
    """Return the device of this process, a worker or the one that started them."""
    return device_for(asked, workers.number)
