"""Runs CUDA kernels on the CPU, for tests: compiles the same .cu files with g++ and runs them thread by thread.

    simulator = Simulator(read_source(folder, "pack.cu"), ["pack_f32"])
    simulator.launch("pack_f32", grid, block, [guarded(x), guarded(codes), np.int64(words)], order=7)

hostsim.hpp documents what is checked. Needs g++ with C++20 (11 or later) on Linux.
"""

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from hashcore.cuda.program import cache_folder
from hashcore.cuda.source import Macros
from numpy.typing import NDArray

FOLDER = Path(__file__).parent
# Undefined behaviour traps, and the trap is reported as an error, without a sanitizer runtime in Python. Hidden
# visibility and no unique symbols, so that libraries do not share state.
FLAGS = [
    *("-std=c++20", "-O1", "-fPIC", "-shared", "-x", "c++", "-w"),
    *("-fvisibility=hidden", "-fno-gnu-unique", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE"),
    *("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-fno-sanitize=vptr"),
]
POISON = 0xA5


class SimulationError(Exception):
    """An error of a kernel, with its place: a message of hostsim.hpp."""


def compiler() -> str | None:
    """Return the path of g++, or None."""
    return shutil.which("g++")


class Simulator:
    """The kernels of one source text, compiled for the host.

    Args:
        source: from hashcore.cuda.source.read_source; a test may modify it first.
        kernels: names of its extern "C" kernels; macros: definitions, as for NVRTC's -D.
    Raises: RuntimeError without g++, or with its message if compilation fails.
    """

    def __init__(self, source: str, kernels: Sequence[str], macros: Macros | None = None):
        self._library = ctypes.CDLL(str(_build(source, kernels, macros or {})))
        self._library.hostsim_launch.restype = ctypes.c_char_p

    def launch(
        self, kernel: str, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], *, order: int = 0,
        resident: int = 3,
    ) -> None:  # fmt: skip
        """Run one grid to its end.

        Args:
            grid, block: up to three sizes each.
            arguments: numpy arrays (passed as pointers), None (a null pointer), numpy scalars and ctypes values.
            order: thread order: 0 ascending, 1 descending, any other number is the seed of a random order.
            resident: number of blocks in flight, 1 to 8.
        Raises: SimulationError.
        """
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [(ctypes.c_uint * 3)(*(*size, 1, 1)[:3]) for size in (grid, block)]
        how = ctypes.c_int(order), ctypes.c_uint(resident)
        error = self._library.hostsim_launch(kernel.encode(), *sizes, pointers, *how)
        if error is not None:
            raise SimulationError(f"{kernel}: {error.decode(errors='replace')}")


def guarded(array: NDArray[Any], align: int = 16) -> NDArray[Any]:
    """Copy an array to memory between two guard pages, as close as possible to the second one.

    The copy is aligned to `align` bytes, so up to align - 1 bytes are between its end and the guard page; check_slack
    checks whether a kernel wrote there.
    """
    page, size = mmap.PAGESIZE, max(array.nbytes, 1)
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for edge in (base, base + page + room):
        if libc.mprotect(ctypes.c_void_p(edge), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect of a guard page failed")
    start = (page + room - size) // align * align
    inside = np.frombuffer(memory, np.uint8, room, page)
    inside[:] = POISON
    copy = np.frombuffer(memory, array.dtype, array.size, start).reshape(array.shape)
    copy[...] = array
    return copy


def check_slack(array: NDArray[Any]) -> None:
    """Raise SimulationError if a kernel wrote between a guarded array and its guard pages."""
    if not array.size:  # torch does not keep the address of an empty tensor
        return
    page, start = mmap.PAGESIZE, array.ctypes.data
    room = -(-array.nbytes // page) * page
    first = -(-(start + array.nbytes) // page) * page - room
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * room).from_address(first))
    if (whole[: start - first] != POISON).any() or (whole[start - first + array.nbytes :] != POISON).any():
        raise SimulationError("a kernel wrote just outside a buffer")


def _value(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p()
    if isinstance(argument, np.ndarray):
        return ctypes.c_void_p(argument.ctypes.data)
    if isinstance(argument, np.generic):
        number = cast(Any, argument)
        dtype: np.dtype[Any] = number.dtype
        return np.ctypeslib.as_ctypes_type(dtype)(number.item())
    ctypes.sizeof(argument)  # raises TypeError unless it is a ctypes value
    return argument


def _build(source: str, kernels: Sequence[str], macros: Macros) -> Path:
    gxx = compiler()
    if gxx is None:
        raise RuntimeError("expected g++ with C++20 on PATH, found none; install it to run kernels on the CPU")
    exports = "".join(f"HOSTSIM_KERNEL({name})\n" for name in kernels)
    text = f'#include "hostsim.hpp"\nnamespace {{\n{source}\n}}\n{exports}'
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]
    version = subprocess.run([gxx, "--version"], capture_output=True, text=True, check=True).stdout
    parts = (text, *(path.read_text() for path in sorted(FOLDER.glob("*.hpp"))), *flags, version)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    library = cache_folder() / "hostsim" / f"{key}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / "kernels.so"
            command = [gxx, *flags, "-I", str(FOLDER), "-", "-o", str(built)]
            done = subprocess.run(command, input=text, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"g++ refused the kernels {', '.join(kernels)}:\n{done.stderr}")
            os.replace(built, library)
    return library
