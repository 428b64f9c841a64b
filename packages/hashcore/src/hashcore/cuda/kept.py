"""What a thread keeps from call to call: prepared launches by the form of a call, and scratch memory by lane."""

import threading
from collections.abc import Callable
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
        self._grown: dict[Any, Any] = {}

    def keep(self, form: object, made: T) -> T:
        """Keep what was made for a form, and return it."""
        self.found.pop(form, None)
        while len(self.found) >= self.most:
            del self.found[next(iter(self.found))]
        self.found[form] = made
        return made

    def renew(self, form: object, kind: object, n: int, rewrite: Callable[[T], bool], make: Callable[[], T]) -> T:
        """Return what is kept for the form of one token fewer, rewritten and kept for this one; else make it.

        A cache that has grown by a token does not meet its former length again, and most launches differ in arguments
        alone.

        Args:
            kind: what forms of other lengths have in common; n: the length.
            rewrite: writes into launches what differs; False if these cannot be those of the form.
        """
        former = self._grown.pop((kind, n - 1), None)
        made = None if former is None else self.found.pop(former, None)
        if made is None or not rewrite(made):
            made = make()
        while len(self._grown) >= self.most:
            del self._grown[next(iter(self._grown))]
        self._grown[kind, n] = form
        return self.keep(form, made)


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
