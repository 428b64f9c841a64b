"""Launches of kernels: sources, macros, grids and packed arguments.

They hold addresses, so the same launches run on a device (cuda.launch) and in the host simulator.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hashcore.cuda import layout
from hashcore.validation import are_short

PACK_THREADS = 256
PLANES_THREADS = 128


class Launch(NamedTuple):
    """One kernel launch with packed arguments: pointers[i] is the address of argument i, as cuLaunchKernel needs it.

    It may be kept and launched again with new values in its arguments.
    """

    source: str
    macros: tuple[tuple[str, str], ...]
    kernel: str
    grid: tuple[int, int]
    threads: int
    pointers: Any
    arguments: tuple[Any, ...]  # keeps the targets of the pointers alive
    programmatic: bool  # may be scheduled before its predecessor ends
    calls: dict[tuple[int, Path], Any]
    """Functions that call the driver (cuda.launch), by device and folder of the sources."""


def make_launch(
    source: str,
    kernel: str,
    grid: tuple[int, int],
    threads: int,
    arguments: Sequence[Any],
    macros: Sequence[tuple[str, str]] = (),
    programmatic: bool = False,
) -> Launch:
    """Create a launch whose arguments are ctypes values and structures."""
    kept = tuple(arguments)
    pointers = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(argument) for argument in kept))
    return Launch(source, tuple(macros), kernel, grid, threads, pointers, kept, programmatic, {})


def pack(kind: str, x: int, codes: int, words: int) -> Launch:
    """Pack 32 * words numbers at x into words."""
    grid = -(-words // PACK_THREADS)  # a warp computes 32 words
    arguments = ctypes.c_void_p(x), ctypes.c_void_p(codes), ctypes.c_int64(words)
    return make_launch("pack.cu", f"pack_{kind}", (grid, 1), PACK_THREADS, arguments)


def planes(w: int, planes: int, rows: int, words: int, count: int) -> Launch:
    """Quantise rows of 32 * words float32 numbers at w into `count` planes each; a warp has a row."""
    grid = -(-rows // (PLANES_THREADS // 32))
    arguments = ctypes.c_void_p(w), ctypes.c_void_p(planes), *map(ctypes.c_int32, (rows, words, count))
    return make_launch("planes.cu", "quantise_rows", (grid, 1), PLANES_THREADS, arguments)


def score_macros(words: int, weights: Sequence[int], tensor: bool = False) -> list[tuple[str, str]]:
    """Return the macros of score.cu: words, planes, and how matches are counted.

    tensor: whether tensor cores may count them. They do where that is faster and two scores fit a word; then the
        weights need not be known.
    """
    macros = [("HASHCORE_WORDS", str(words)), ("HASHCORE_PLANES", str(len(weights)))]
    if tensor and words == 4 and 3 <= len(weights) <= 7 and are_short(words, weights):
        macros.append(("HASHCORE_TENSOR", "1"))
    elif layout.are_planes(weights):
        macros.append(("HASHCORE_WEIGHTS", ",".join(map(str, weights))))
    return macros
