"""The C allocator, for work that frees and asks for the same megabytes at every step."""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let the process keep what it frees, and say whether its C library has such a setting (glibc has).

    Otherwise glibc gives large blocks back to the system and gets them again as zeroed pages: with a worker a core that
    costs a fifth of a training step (docs/log.md). Only the time changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _KEEP_BYTES)) & bool(mallopt(_TRIM_THRESHOLD, _KEEP_BYTES))
