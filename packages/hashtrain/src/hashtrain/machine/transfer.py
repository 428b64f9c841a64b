"""Asynchronous copies between host and device; if the device is the CPU, nothing is copied."""

import torch
from torch import Tensor


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
