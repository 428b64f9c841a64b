"""Atomic file writes: a file is replaced completely or not at all. Also removes leftovers of killed writers."""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_WORKPLACE = re.compile(r"\.hashcore-[0-9a-f]{16}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file of the same name in a temporary folder beside `path`; move it to `path` on success.

    The final file has the mode that the umask gives a new file. Leftovers of killed writers in the folder of `path` are
    removed first.
    """
    sweep(path.parent)
    workplace, lock = _workplace(path.parent)
    temporary = workplace / path.name
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # the system applies the umask
        mode = os.fstat(handle).st_mode & 0o777
        os.close(handle)
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # the block may have replaced the file, as safetensors does, with mode 0600
        os.replace(temporary, path)
    finally:
        shutil.rmtree(workplace)
        os.close(lock)


def sweep(folder: Path) -> None:
    """Remove what `replacing` left in a folder when its process was killed; files that are being written are kept."""
    with os.scandir(folder) as entries:
        left = [entry.path for entry in entries if _WORKPLACE.fullmatch(entry.name)]
    for workplace in left:
        # OSError: its writer is alive and has the lock, or it is another user's, or gone, or locks are not supported.
        with contextlib.suppress(OSError):
            handle = os.open(workplace, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(workplace)
            finally:
                os.close(handle)


def _workplace(folder: Path) -> tuple[Path, int]:
    """Create a folder, and lock it until its handle is closed or this process ends in any way."""
    while True:
        made = folder / f".hashcore-{secrets.token_hex(8)}"
        made.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # removed by another sweep before it was locked
            handle = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks, where sweep removes nothing
                fcntl.flock(handle, fcntl.LOCK_EX)
            if made.is_dir():
                return made, handle
            os.close(handle)
