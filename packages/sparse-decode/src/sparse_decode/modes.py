"""What a caller may set around a model (inference mode, autocast, a graph), and what is then allowed."""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

prompting: ContextVar[bool] = ContextVar("sparse_decode_prompting", default=False)
"""Whether `generate` runs a prompt, of which the last chunk may be one token."""


def readable(x: Tensor) -> bool:
    """Whether Python may read a tensor's values: on a GPU the host would wait, in a graph there are none."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def ordinary_tensors() -> AbstractContextManager[object]:
    """Create ordinary tensors even in inference mode, so that they can be written outside of it later."""
    # Entered only if needed: it costs as much as a small operation, and compiled graphs do not support it.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def in_graph(device: torch.device) -> bool:
    """Whether a graph is being compiled, or captured on this device."""
    if torch.compiler.is_compiling() or device.type != "cuda" or not torch.cuda.is_initialized():
        return torch.compiler.is_compiling()
    return torch.cuda.is_current_stream_capturing()


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast, so that a key has the same code inside and outside of autocast."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
