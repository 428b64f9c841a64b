"""The folder that keeps what was compiled: cubins, and the host builds of the simulator."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return HASHCORE_CACHE, or hashcore in the user's cache folder. Nothing is created here."""
    if chosen := os.environ.get("HASHCORE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hashcore"
