"""Launch plans of the kernels: all arguments except data pointers.

Creating a plan takes as long as scoring a hundred thousand keys, so hashcore.cpu caches plans. A plan is two int64
arrays, so that a call passes few objects: `header` has the values that all rows share, followed by the weights; `rows`
has the values of each row, with byte offsets from the data pointers.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hashcore.arguments import offsets
from hashcore.cpu import threads
from hashcore.validation import Comparison

CHUNK = 1024  # keys per task: 16 KiB of 128-bit keys, which stay in L1 while all rows of a block are scored
BLOCK = 32  # maximal number of rows of a block
MORE = 4  # unconditional writes per 64 scores: rarely more reach a good floor
ROOM = 1 << 20  # maximal number of entries that all rows of a block keep: 8 MiB

HEADER = N, WORDS, PLANES, PLANE_STEP, WORD_STEP, STEP, TOP, WIDTH, BEST, CAPACITY, ROWS, PARTS, PAGE = range(13)
COLUMNS = QUERY, KEYS, OUT, K, LOW, HIGH, TABLE = range(7)
FIRST_WEIGHT = len(HEADER)
NO_TABLE = np.empty(0, np.int64)


class Plan(NamedTuple):
    """The arguments of a kernel call without addresses.

    Attributes:
        header: int64 [FIRST_WEIGHT + P].
        rows: int64 [R, COLUMNS].
        shape: of the result.
        tasks, workers: arguments of threads.run.
        parts: number of parts of the keys; a search selects from each part separately.
        table: for keys in pages, the byte offset of each block of each row, int64, flat; else the bitmap of the keys
            that may be found, or empty.
    """

    header: NDArray[np.int64]
    rows: NDArray[np.int64]
    shape: tuple[int, ...]
    tasks: int
    workers: int
    parts: int = 1
    table: NDArray[np.int64] = NO_TABLE


def score(compared: Comparison, most: int) -> Plan:
    """Plan the scores [*lead, N] of planes [..., P, W] against keys [..., N, W], on at most `most` threads."""
    header, rows = _common(compared)
    count, n = len(rows), compared.shape[-1]
    rows[:, OUT] = np.arange(count) * (4 * n)
    tasks = -(-count // BLOCK) * -(-n // CHUNK)
    return Plan(header, rows, (*compared.lead, n), tasks, _workers(compared, count, most))


def search(compared: Comparison, width: int, wanted: tuple[Any, ...], best: bool, most: int) -> Plan:
    """Plan a search for up to `width` keys per row, on at most `most` threads; wanted: as of `filled`."""
    header, rows = _common(compared)
    count, n = len(rows), compared.shape[-1]
    workers = _workers(compared, count, most)
    room = min(2 * width, n) + CHUNK + MORE  # entries that a row keeps
    block = max(1, min(BLOCK, -(-count // workers), ROOM // room))
    blocks = -(-count // block)
    # Each part selects its own best k, so parts shorter than 8 k would do mostly redundant work.
    parts = max(1, min(workers // max(blocks, 1), n // max(8 * width, 1)))
    header[[WIDTH, BEST, CAPACITY, ROWS, PARTS]] = width, best, room, block, parts
    return Plan(header, filled(rows, wanted), (*compared.lead, width), blocks * parts, workers, parts)


def filled(rows: NDArray[np.int64], wanted: tuple[Any, ...]) -> NDArray[np.int64]:
    """Return a copy of a plan's rows with their k, low and high: int64 [R], or integers for all rows."""
    rows = rows.copy()
    rows[:, K], rows[:, LOW], rows[:, HIGH] = wanted
    return rows


def _workers(compared: Comparison, rows: int, most: int) -> int:
    return threads.count(rows * compared.keys.shape[-2] * math.prod(compared.query.shape[-2:]), most)


def _common(compared: Comparison) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    query, keys, weights, lead = compared.query, compared.keys, compared.weights, compared.lead
    n, words = keys.shape[-2:]
    header = np.zeros(FIRST_WEIGHT + len(weights), np.int64)
    header[[N, WORDS, PLANES]] = n, words, len(weights)
    header[[PLANE_STEP, WORD_STEP]] = query.strides[-2:]
    header[STEP] = keys.strides[-2] if n > 1 else 4 * words
    header[TOP] = sum(weights) * 32 * words
    header[FIRST_WEIGHT:] = weights
    rows = np.zeros((math.prod(lead), len(COLUMNS)), np.int64)
    for column, codes in ((QUERY, query), (KEYS, keys)):
        rows[:, column] = offsets(codes.shape[:-2], codes.strides[:-2], lead)
    return header, rows
