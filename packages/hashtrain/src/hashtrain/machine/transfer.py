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


class Ahead:
    """Copies tensors to a CUDA device on a separate stream while the current one computes."""

    def __init__(self, device: torch.device):
        self.device: torch.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)

    def send(self, x: Tensor) -> Tensor:
        """Start a copy and return the tensor, which may not be used before `take`."""
        with torch.cuda.stream(self.stream):
            return to_device(x, self.device)

    def take(self, x: Tensor) -> Tensor:
        """Make the current stream, not the host, wait for the copy."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        x.record_stream(current)  # allocated on the other stream: its memory must not be reused too early
        return x
