"""Devices: which one a process works on, and copies to and from it.

Worker processes on CUDA have one device each, and train different layers. On the CPU nothing is copied.
"""

import torch
from hashcore.cuda.program import require_compiler
from torch import Tensor

worker = 0
"""Number of this process among the workers of a run; 0 in the process that starts them."""


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
    return device_for(asked, worker)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Send a tensor to a device; from the host to CUDA through pinned memory, in stream order."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """Queue a copy into pinned host memory, valid after `finish`; a host tensor is returned as it is."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def finish(device: torch.device) -> None:
    """Wait until all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
