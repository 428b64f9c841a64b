"""C allocator settings for work that frees and allocates the same megabytes at every step."""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let the process keep freed memory. Returns whether the C library supports this (glibc does).

    By default glibc returns large blocks to the system and gets them back as zeroed pages. With one worker per core
    that costs a fifth of a training step (docs/log.md). Results do not change.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _KEEP_BYTES)) & bool(mallopt(_TRIM_THRESHOLD, _KEEP_BYTES))
