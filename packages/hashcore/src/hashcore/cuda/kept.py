"""Memory of kernels, and per-thread caches: prepared launches by the form of a call, words of zeros by lane."""

import threading
from typing import Any, Generic, TypeVar

import torch

from hashcore.cuda import launch

T = TypeVar("T")

MOST_FORMS = 64
MOST_LANES = 8


class Table(threading.local, Generic[T]):
    """A per-thread cache by the form of a call; beyond `most` entries, the oldest is dropped.

    A form has all that launches depend on, except for values that are set before each call: shapes, strides, dtypes and
    the device. Cached values may contain an empty result, but never an argument.
    """

    def __init__(self, most: int = MOST_FORMS):
        self.most = most
        self.found: dict[Any, T] = {}  # in order of creation

    def keep(self, form: object, made: T) -> T:
        """Cache the value for a form, and return it."""
        self.found.pop(form, None)
        while len(self.found) >= self.most:
            del self.found[next(iter(self.found))]
        self.found[form] = made
        return made


def scratch(words: int, device: torch.device) -> torch.Tensor:
    """Return int32 memory for the launches of one call, to be kept until they are in the stream."""
    return torch.empty(words, dtype=torch.int32, device=device)


_zeroed: Table[torch.Tensor] = Table(MOST_LANES)


def zeroed(words: int, device: torch.device) -> torch.Tensor:
    """Return int32 memory that this thread reuses for all work in a lane: a device, its current stream, and a capture.

    It is zero before its first use, also in a capture: each replay begins with a memset. It is for kernels that need
    words of zeros and leave them zero; other words may be overwritten.
    """
    lane = launch.lane(device)
    found = _zeroed.found.get(lane)
    if found is not None and found.numel() >= words:
        return found
    return _zeroed.keep(lane, torch.zeros(words, dtype=torch.int32, device=device))
