"""Writes that a kill cannot break: a file is replaced whole or not at all, and the next write removes what was left."""

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
    """Give the block a file of the same name in a folder of its own beside `path`, and move it if the block succeeds.

    Whatever the block writes there, the file ends with the mode that the umask gives a new file. What killed writers
    left beside `path`, of this or another name, is removed first.
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
        temporary.chmod(mode)  # the block may have put a file of its own there, as safetensors does with 0600
        os.replace(temporary, path)
    finally:
        shutil.rmtree(workplace)
        os.close(lock)


def sweep(folder: Path) -> None:
    """Remove what `replacing` left in a folder when its process was killed; what is being written stays."""
    with os.scandir(folder) as entries:
        left = [entry.path for entry in entries if _WORKPLACE.fullmatch(entry.name)]
    for workplace in left:
        # Its writer lives and holds the lock; or it is another user's, or gone by now; or nothing can be locked here.
        with contextlib.suppress(OSError):
            handle = os.open(workplace, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(workplace)
            finally:
                os.close(handle)


def _workplace(folder: Path) -> tuple[Path, int]:
    """Make a folder, and lock it until its handle is closed or this process ends, however it ends."""
    while True:
        made = folder / f".hashcore-{secrets.token_hex(8)}"
        made.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            handle = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks, where nothing can be swept either
                fcntl.flock(handle, fcntl.LOCK_EX)
            if made.is_dir():
                return made, handle
            os.close(handle)
