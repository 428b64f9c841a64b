"""Copies between host and device that the host does not wait for; where the device is the CPU, no copies at all."""

# Some methods of torch have no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Send a tensor to a device: from the host to CUDA through pinned memory, behind what is queued there."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """Queue a copy into pinned host memory, whose numbers are there after `finish`; a tensor of the host stays."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def finish(device: torch.device) -> None:
    """Wait until all that is queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Ahead:
    """A tensor on its way to a CUDA device while that computes: on a stream of its own, beside the current one."""

    def __init__(self, device: torch.device):
        self.device: torch.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)

    def send(self, x: Tensor) -> Tensor:
        """Start the copy and return the tensor, which nothing may use before `take`."""
        with torch.cuda.stream(self.stream):
            return to_device(x, self.device)

    def take(self, x: Tensor) -> Tensor:
        """Let the current stream, not the host, wait for the copy."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        x.record_stream(current)  # it was allocated for the other stream: freed memory may not be reused before
        return x
