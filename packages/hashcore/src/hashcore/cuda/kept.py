"""Per-thread caches: prepared launches by the form of a call, and scratch memory by lane (device, stream, capture)."""

import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from hashcore.cuda import launch, layout

T = TypeVar("T")

MOST_FORMS = 64
MOST_LANES = 8
MOST_BYTES = 2 * layout.MAX_WORKSPACE
"""Maximal size of a lane's memory; larger requests get their own memory."""


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


class Memory(NamedTuple):
    """Scratch memory, int32, with its address: each call needs it, and asking torch takes twice as long."""

    address: int
    words: int
    tensor: torch.Tensor


_lanes: Table[Memory] = Table(MOST_LANES)


def scratch(words: int, device: torch.device) -> Memory:
    """Return scratch memory that this thread reuses for all work on the current stream of a device."""
    lane = launch.lane(device)
    found = _lanes.found.get(lane)
    if found is not None and found.words >= words:
        return found
    keeps = 4 * words <= MOST_BYTES
    if keeps and found is not None:
        words = max(words, min(2 * found.words, MOST_BYTES // 4))
    made = _new(words, device, torch.empty)
    return _lanes.keep(lane, made) if keeps else made


_zeroed: Table[Memory] = Table(MOST_LANES)


def zeroed(words: int, device: torch.device) -> Memory:
    """Return memory like `scratch`, zero before its first use, also in a capture: each replay begins with a memset.

    It is for kernels that need words of zeros and leave them zero; other words may be overwritten.
    """
    lane = launch.lane(device)
    found = _zeroed.found.get(lane)
    return found if found is not None and found.words >= words else _zeroed.keep(lane, _new(words, device, torch.zeros))


def _new(words: int, device: torch.device, make: Callable[..., torch.Tensor]) -> Memory:
    tensor = make(words, dtype=torch.int32, device=device)
    return Memory(tensor.data_ptr(), words, tensor)
