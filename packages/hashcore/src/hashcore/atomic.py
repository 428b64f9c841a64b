"""Writes that a kill cannot break: a file is replaced whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a temporary file beside `path`, and move it onto `path` if the block succeeds."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's 0600 would hide the file from the owner's group
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
