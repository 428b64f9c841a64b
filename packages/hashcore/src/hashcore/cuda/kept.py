"""What a thread keeps from call to call: prepared launches by the form of a call, and scratch memory by lane."""

import threading
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from hashcore.cuda import launch, layout

T = TypeVar("T")

MOST_FORMS = 64
MOST_LANES = 8
MOST_BYTES = 2 * layout.MAX_WORKSPACE
"""Of a lane's memory; what asks for more gets memory of its own."""


class Table(threading.local, Generic[T]):
    """What a thread keeps by the form of a call; beyond `most`, the oldest goes.

    A form holds all that launches depend on but for the values that are written into them before each call: shapes,
    strides, types and the device. What is kept may hold an empty result, never what was given.
    """

    def __init__(self, most: int = MOST_FORMS):
        self.most = most
        self.found: dict[Any, T] = {}  # in the order of their making

    def keep(self, form: object, made: T) -> T:
        """Keep what was made for a form, and return it."""
        self.found.pop(form, None)
        while len(self.found) >= self.most:
            del self.found[next(iter(self.found))]
        self.found[form] = made
        return made


class Memory(NamedTuple):
    """Scratch memory, int32: its address is asked for in every call, and asking torch costs twice as much."""

    address: int
    words: int
    tensor: torch.Tensor


_lanes: Table[Memory] = Table(MOST_LANES)


def scratch(words: int, device: torch.device) -> Memory:
    """Return scratch memory that this thread uses again in all that runs in order with this.

    Args:
        words: with the first `layout.SAMPLES`, which are the searches' alone and zero between them.
    """
    lane = launch.lane(device)
    found = _lanes.found.get(lane)
    if found is None or found.words < words:
        # Zero, so that the first samples are right; in a capture they need not be, and each replay saves a launch.
        make = torch.empty if len(lane) > 2 else torch.zeros
        keeps = 4 * words <= MOST_BYTES
        if keeps and found is not None:
            words = max(words, min(2 * found.words, MOST_BYTES // 4))
        tensor = make(words, dtype=torch.int32, device=device)
        found = Memory(tensor.data_ptr(), words, tensor)
        if keeps:
            _lanes.keep(lane, found)
    return found
