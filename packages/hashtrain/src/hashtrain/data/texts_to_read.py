"""Which parts of a user's texts are read, if there is more text than a run can use."""

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


def shares(files: Sequence[Path], room: int | None, seed: int = 0) -> dict[Path, int | None]:
    """Decide how many bytes to read of each file, from its beginning; None: the whole file.

    If all files fit into `room` bytes, or there is no limit, all are read whole, in their order. Otherwise files are
    drawn at random until the room is used. Each has an equal share of it, at least `LEAST` bytes. Only file sizes are
    inspected.
    """
    sizes = {file: file.stat().st_size for file in files}
    if room is None or sum(sizes.values()) <= room:
        return dict.fromkeys(files)
    drawn = list(files)
    random.Random(seed).shuffle(drawn)
    share, left, found = max(LEAST, room // len(drawn)), room, dict[Path, int | None]()
    for file in drawn:
        if left <= 0:
            break
        found[file] = share if sizes[file] > share else None
        left -= min(sizes[file], share)
    return found
