"""The cache folder for cubins and for the simulator's host builds."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return HASHCORE_CACHE, or hashcore in the user's cache folder, without creating it."""
    if chosen := os.environ.get("HASHCORE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hashcore"
