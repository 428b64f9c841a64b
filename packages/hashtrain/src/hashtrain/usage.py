"""Input that cannot be used: one sentence on stderr and exit code 2, for every command line of the project."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path


class UsageError(Exception):
    """A setting that cannot be. Not a ValueError, which the argument parser would wrap in a box of its own."""


def require_folder(out: Path) -> None:
    """Raise UsageError if a file stands where --out, or a folder above it, is wanted. What is missing can be made."""
    there = next(place for place in (out, *out.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        raise UsageError(f"--out must be a folder or a new name, got {out}, where {there} is a file; choose another")


def guarded(program: str, call: Callable[[], int], interrupted: str = "stopped") -> int:
    """Return what `call` returns, 2 after its one-sentence complaint about the input, or 130 if it was interrupted."""
    try:
        return call()
    except (UsageError, ValueError, OSError, FloatingPointError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{program}: {interrupted}", file=sys.stderr)
        return 130
