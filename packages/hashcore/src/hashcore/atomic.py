"""Writes that a kill cannot break: a file is replaced whole or not at all."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_ONE_AT_A_TIME = threading.Lock()


def _umask() -> int:
    """Read the process's mask for new files, which POSIX only hands out in exchange for another."""
    with _ONE_AT_A_TIME:
        umask = os.umask(0)
        os.umask(umask)
    return umask


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
        temporary.chmod(0o666 & ~_umask())  # mkstemp's 0600 would hide the file from the owner's group
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
