"""Which files of a user's texts are read, and how much of each, if there is more text than a run can use."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

LEAST = 1 << 20
"""Fewest bytes read of a file that is read at all; smaller files are read whole."""
_LEAST_ROOM = 64 << 20
_BYTES_PER_TOKEN = 8  # English has about 4.3, Python 3.3; some text is lost at the ends of documents


def room_for(tokens: int) -> int:
    """Return how many bytes of text to read to get this many tokens, with a margin."""
    return max(_LEAST_ROOM, _BYTES_PER_TOKEN * tokens)


def shares(files: Sequence[Path], room: int | None, seed: int = 0) -> list[tuple[Path, int | None]]:
    """Decide how much of each file to read.

    If all files fit into `room` bytes, or there is no limit, all are read whole, in their order. Otherwise files are
    drawn at random, and each is read from its beginning up to an equal share of the room, at least `LEAST` bytes, until
    the room is used: many small files are read whole, a few large ones in part. Only file sizes are inspected.

    Args:
        seed: draws the files.
    Returns: (file, bytes to read; None for the whole file) for each file to read.
    """
    sizes = {file: file.stat().st_size for file in files}
    if room is None or sum(sizes.values()) <= room:
        return [(file, None) for file in files]
    drawn = list(files)
    random.Random(seed).shuffle(drawn)
    share, left = max(LEAST, room // len(drawn)), room
    found: list[tuple[Path, int | None]] = []
    for file in drawn:
        if left <= 0:
            break
        taken = min(sizes[file], share)
        found.append((file, taken if taken < sizes[file] else None))
        left -= taken
    return found
