"""Which parts of a user's texts are read, if there is more text than a run can use."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

LEAST = 1 << 20
"""Fewest bytes read of a file that is read at all; smaller files are read whole."""
PART = 256 << 10
"""Bytes of a part of a file that is not read whole: some contexts, because every part gives its first one first."""
_LEAST_ROOM = 64 << 20
_BYTES_PER_TOKEN = 8  # English has about 4.3, Python 3.3; some text is lost at the ends of documents


class Span(NamedTuple):
    """A part of a file: `size` bytes from `start`; None: the whole file."""

    file: Path
    start: int = 0
    size: int | None = None


def room_for(tokens: int) -> int:
    """Return how many bytes of text to read to get this many tokens, with a margin."""
    return max(_LEAST_ROOM, _BYTES_PER_TOKEN * tokens)


def shares(
    files: Sequence[Path], room: int | None, seed: int = 0, in_order: Callable[[Path], bool] = lambda file: False
) -> list[Span]:
    """Decide which parts of each file to read.

    If all files fit into `room` bytes, or there is no limit, all are read whole, in their order. Otherwise files are
    drawn at random until the room is used. Each has an equal share of it, at least `LEAST` bytes; a file that is larger
    than its share is read in parts of `PART` bytes and a little more, evenly spaced over its whole length. Only file
    sizes are inspected.

    Args:
        seed: draws the files.
        in_order: whether a file, such as a table, can only be read from its beginning.
    """
    sizes = {file: file.stat().st_size for file in files}
    if room is None or sum(sizes.values()) <= room:
        return [Span(file) for file in files]
    drawn = list(files)
    random.Random(seed).shuffle(drawn)
    share, left = max(LEAST, room // len(drawn)), room
    found: list[Span] = []
    for file in drawn:
        if left <= 0:
            break
        taken = min(sizes[file], share)
        if taken == sizes[file]:
            found.append(Span(file))
        elif in_order(file):
            found.append(Span(file, 0, taken))
        else:
            found += _spread(file, sizes[file], taken)
        left -= taken
    return found


def _spread(file: Path, size: int, taken: int) -> list[Span]:
    """Return parts of `taken` bytes altogether; they never overlap, because a part is no longer than their distance."""
    count = taken // PART
    return [Span(file, number * size // count, taken // count) for number in range(count)]
