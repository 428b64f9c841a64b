"""Modes of torch that callers switch on around a model, and that what we keep or compute must not depend on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def ordinary_tensors() -> AbstractContextManager[object]:
    """Make tensors that may also be written to outside of the inference mode in which they were made."""
    # Not entered for nothing: it costs as much as a small operation, and compiled graphs do not take it.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in the types of the tensors: codes of the same key are the same inside and outside of autocast."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: torch.device) -> bool:
    """Say whether autocast is on for a device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
