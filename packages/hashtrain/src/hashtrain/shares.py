"""Which files are read, and how far, where a reader's texts are larger than what a run can use."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

LEAST = 1 << 20
"""Bytes that are read of every file that is read at all, or the whole of a smaller one."""
_LEAST_ROOM = 64 << 20
_BYTES_PER_TOKEN = 8  # English has about 4.3, Python 3.3; some is lost where documents end


def room_for(tokens: int) -> int:
    """Return the bytes of text that give so many tokens, with some to spare: what is worth reading."""
    return max(_LEAST_ROOM, _BYTES_PER_TOKEN * tokens)


def shares(files: Sequence[Path], room: int | None, seed: int = 0) -> list[tuple[Path, int | None]]:
    """Say how much of each file is read.

    If all fit into `room` bytes, or there is no bound, all are read whole, in their order. If not, files are drawn, and
    each is read from its beginning as far as an even share of the room goes, `LEAST` bytes at least, until the room is
    used: many small files are read whole, a few large ones in part. Only sizes are looked at.

    Args:
        seed: draws the files.
    Returns: (file, bytes to read; None for the whole) of those that are read.
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
