"""Launches of hashcore's kernels: sources, macros, grids and arguments.

Everything here works on addresses, so the same launches run on a device (cuda.launch) and in the host simulator.
"""

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hashcore.cuda import layout
from hashcore.cuda.layout import Groups, Pages, RowMap, SearchSpace, Selection, Space, Window

PACK_THREADS = 256
PLANES_THREADS = 128
MAX_GRID_Y = 65_535


class Kept(list["Launch"]):
    """Launches that are prepared once and run many times, with new values in their arguments."""

    def __init__(self, launches: Iterable["Launch"]):
        super().__init__(launches)
        self.calls: dict[int, Any] = {}
        """Functions that call the driver (cuda.launch), by device."""
        self.folder: Path | None = None
        """Folder of the sources of these functions."""

    def keep(self, device: int, folder: Path, calls: Any) -> None:
        """Cache the functions that call the driver on a device; drop those for another folder."""
        if folder is not self.folder:  # by identity: comparing paths would take as long as the launch
            self.calls, self.folder = {}, folder
        self.calls[device] = calls


class Launch(NamedTuple):
    """One kernel launch with packed arguments: pointers[i] is the address of argument i, as cuLaunchKernel needs it."""

    source: str
    macros: tuple[tuple[str, str], ...]
    kernel: str
    grid: tuple[int, int]
    threads: int
    pointers: Any
    arguments: tuple[Any, ...]  # keeps the targets of the pointers alive
    programmatic: bool = False  # may be scheduled before its predecessor ends


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
    return Launch(source, tuple(macros), kernel, grid, threads, pointers, kept, programmatic)


_address = ctypes.c_void_p
_int = ctypes.c_int32
_long = ctypes.c_int64


def pack(kind: str, x: int, codes: int, words: int) -> Launch:
    """Pack 32 * words numbers at x into words."""
    grid = -(-words // PACK_THREADS)  # a warp computes 32 words
    return make_launch("pack.cu", f"pack_{kind}", (grid, 1), PACK_THREADS, (_address(x), _address(codes), _long(words)))


def by_row(kernel: str, rows: int, arguments: Sequence[Any]) -> Launch:
    """Return the launch of a kernel of planes.cu, which gives a warp to a row."""
    return make_launch("planes.cu", kernel, (-(-rows // (PLANES_THREADS // 32)), 1), PLANES_THREADS, arguments)


def score_macros(words: int, weights: Sequence[int], tensor: bool = False) -> list[tuple[str, str]]:
    """Return the macros of score.cu: words, planes, and how matches are counted.

    tensor: whether tensor cores may count them. They do where that is faster; then the weights need not be known.
    """
    macros = [("HASHCORE_WORDS", str(words)), ("HASHCORE_PLANES", str(len(weights)))]
    if tensor and words == 4 and 3 <= len(weights) <= 7:
        macros.append(("HASHCORE_TENSOR", "1"))
    elif layout.are_planes(weights):
        macros.append(("HASHCORE_WEIGHTS", ",".join(map(str, weights))))
    return macros


def _weights(weights: Sequence[int]) -> layout.Weights:
    return layout.Weights((ctypes.c_int32 * 8)(*weights))


def score_all(
    query: int, keys: int, scores: int, rows: int, n: int, words: int, weights: Sequence[int], map: RowMap, tensor: bool
) -> Launch:
    """Score every key of every row against the row's planes."""
    grid = (rows, min(-(-n // layout.TILE), MAX_GRID_Y))
    arguments = (_address(query), _address(keys), _address(scores), map, _weights(weights), _int(n))
    return make_launch("score.cu", "score_all", grid, layout.THREADS, arguments, score_macros(words, weights, tensor))


class Search(NamedTuple):
    """The arguments that the launches of a search share; each call sets their values."""

    query: ctypes.c_void_p
    keys: ctypes.c_void_p
    values: ctypes.c_void_p
    indices: ctypes.c_void_p
    window: Window
    selection: Selection
    space: Space
    """The workspace, which all turns use one after the other."""
    launches: Kept
    pages: Pages


def search(
    map: RowMap,
    words: int,
    weights: Sequence[int],
    rows: int,
    group: int,
    index_bits: int,
    plan: SearchSpace,
    tensor: bool,
    pages: Pages | None = None,
) -> Search:
    """Prepare a search: two launches per turn; one turn unless the workspace is too large.

    tensor: see `score_macros`; pages: for keys in pages.
    """
    top = layout.top_score(words, weights)
    query, keys, values, indices = (_address() for _ in range(4))
    window, selection = Window(), Selection()
    space = Space(stride=plan.stride, shift=layout.sample_shift(top), top=top)
    packed, paged = _weights(weights), [] if pages is None else [("HASHCORE_PAGES", "1")]
    macros, table = [*score_macros(words, weights, tensor), *paged], () if pages is None else (pages,)
    line = map.size[3] if group > 1 else rows
    in_line = -(-line // group)
    launches: list[Launch] = []
    for first in range(0, rows // line * in_line, plan.slots // group):
        groups = Groups(first, line, group)
        count = min(plan.slots // group, rows // line * in_line - first)
        name = "list_candidates_shared" if group > 1 else "list_candidates"
        given = query, keys, map, window, selection, packed, space, groups, *table
        launches.append(make_launch("score.cu", name, (count, plan.splits), layout.THREADS, given, macros, True))
        codes = layout.Codes(packed, len(weights), words)
        places = query, keys, values, indices, map, window, selection
        given = *places, codes, space, groups, *table
        name, grid = f"select_{index_bits}", (count * group, plan.splits)
        launches.append(make_launch("choose.cu", name, grid, layout.THREADS, given, paged, True))
    return Search(query, keys, values, indices, window, selection, space, Kept(launches), pages or Pages())
