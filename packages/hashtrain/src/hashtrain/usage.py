"""Handle unusable input: one sentence on stderr and exit code 2, for every command line of the project."""

import difflib
import errno
import importlib.util
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

LARGEST = (1 << 31) - 1
"""Largest count that a flag accepts."""
LARGEST_SEED = (1 << 32) - 1
"""Largest seed: accepted by every library's generators, and by torch's after multiplying by a layer's number."""
PIPE_CLOSED = 128 + 13  # as if SIGPIPE had ended the program


class UsageError(Exception):
    """An invalid setting. Not a ValueError, which the argument parser would wrap in a box of its own."""


def did_you_mean(given: Sequence[str], known: Collection[str]) -> str:
    """Return the unknown names, and the known ones that look alike, for an error; if none does, all of them."""
    close = dict.fromkeys(one for name in given for one in difflib.get_close_matches(name, known))
    remedy = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(known)}"
    return f"{', '.join(given)}; {remedy}"


def require_folder(out: Path) -> None:
    """Raise UsageError if --out, or a folder above it, is a file. Missing folders are fine."""
    there = next(place for place in (out, *out.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        raise UsageError(f"--out must be a folder or a new name, got {out}, where {there} is a file; choose another")


def require_counts(command: object, **bounds: int) -> None:
    """Raise UsageError if a field, or one of its values, is below its bound or above `LARGEST`."""
    for name, least in bounds.items():
        given: int | tuple[int, ...] | None = getattr(command, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not least <= value <= LARGEST:
                bound = f"at least {least}" if value < least else f"at most {LARGEST}"
                raise UsageError(f"--{name.replace('_', '-')} must be {bound}, got {value}")


def require_seed(seed: int) -> None:
    """Raise UsageError unless every generator accepts this --seed."""
    if not 0 <= seed <= LARGEST_SEED:
        raise UsageError(f"--seed must be between 0 and {LARGEST_SEED}, got {seed}")


def require_device_name(device: str) -> None:
    """Raise UsageError if --device is not a name that `hashtrain.device.device_for` accepts."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {device}")


def require_package(package: str, what: str, extra: str, more: str = "") -> None:
    """Raise ValueError, which ends with `more`, if a package that an extra of hashtrain brings is not installed."""
    if importlib.util.find_spec(package) is None:
        install = f"in the checkout `uv pip install './packages/hashtrain[{extra}]'`{more}"
        raise ValueError(f"{what} needs the package {package}, which is not installed: {install}")


def require_plain_file(path: Path, flag: str = "") -> None:
    """Raise UsageError if a path is a pipe or a device, on which a reader might block or never finish."""
    if (kind := file_kind(path.stat().st_mode)) not in ("", "a folder"):
        raise UsageError(f"{flag} {path} is {kind}, expected a regular file; copy its output into one".strip())


def file_kind(mode: int) -> str:
    """Name what is not a regular file; "" for a regular file."""
    kinds = {stat.S_IFREG: "", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def guarded(program: str, call: Callable[[], int], interrupted: str = "stopped") -> int:
    """Return the result of `call`; 2 with one sentence on stderr if the input cannot be used; 130 if interrupted; 141,
    silently, if the reader of the output has exited, as after `| head`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not end a run
    try:
        try:
            return call()
        finally:
            print(end="", flush=True)
    except (UsageError, ValueError, OSError, FloatingPointError, MemoryError, RuntimeError, SystemExit) as error:
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # raised by rich
            words, code = "", PIPE_CLOSED
        elif isinstance(error, SystemExit) or (isinstance(error, RuntimeError) and not _lacks_memory(error)):
            raise
        else:
            words, code = f"{program}: {sentence(error)}\n", 2
    except KeyboardInterrupt:
        words, code = f"{program}: {interrupted}\n", 130
    print(words, end="", file=sys.stderr, flush=True)
    try:
        print(end="", flush=True)
    except OSError:  # no reader, or a full device: Python would fail on it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _lacks_memory(error: RuntimeError) -> bool:
    """Whether it is for lack of memory, for which torch has no class of its own on the CPU; any other is a bug."""
    return type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error)


def sentence(error: BaseException) -> str:
    """Return an error as one sentence; system errors without their numbers."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return f"{where}{error.strerror}" + ("; free some space and rerun the command" if full else "")
    if isinstance(error, MemoryError | RuntimeError):
        first = next(iter(str(error).splitlines()), "")
        return f"not enough memory ({first or 'allocation failed'}); reduce the request"
    return str(error)
