"""What a kernel is told: everything that follows from shapes, strides and numbers, and not from where arrays lie.

Making a plan takes as long as scoring a hundred thousand keys, so cpu.prepared keeps them. A plan is two arrays of
int64, so that a call hands over few objects: `header` says what all rows share, followed by the weights, `rows` what
each row has of its own, offsets in bytes from where the arrays of a call begin.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hashcore.cpu import layout, threads
from hashcore.validation import Asked, Layout, Selection

CHUNK = 1024  # keys scored at once: 16 KiB of 128-bit keys stay in L1 while the rows of a block pass over them
BLOCK = 32  # most rows that do
MORE = 4  # of 64 scores that rarely more reach a good floor
ROOM = 1 << 20  # of what all rows of a block keep: 8 MiB
STASH = 256  # keys of a shortlist that wait to be scored together

HEADER = N, WORDS, PLANES, PLANE_STEP, WORD_STEP, STEP, TOP, WIDTH, BEST, ROOMY, ROWS, PARTS, SHORTLIST, PAGE = range(
    14
)
COLUMNS = QUERY, KEYS, OUT, K, LOW, HIGH, TABLE = range(7)
FIRST_WEIGHT = len(HEADER)
NO_TABLE = np.empty(0, np.int64)


class Plan(NamedTuple):
    """A call of a kernel without its addresses.

    Attributes:
        header: int64 [FIRST_WEIGHT + P].
        rows: int64 [R, COLUMNS].
        shape: of the result.
        tasks, workers: of threads.run.
        readable: whether the words of each key lie in turn, as the kernels read them.
        parts: of the keys, each of which a search selects from on its own.
        table: of keys in pages, where in bytes each block of each row begins, int64, flat.
    """

    header: NDArray[np.int64]
    rows: NDArray[np.int64]
    shape: tuple[int, ...]
    tasks: int
    workers: int
    readable: bool
    parts: int = 1
    table: NDArray[np.int64] = NO_TABLE


def score(
    query: Layout,
    keys: Layout,
    weights: tuple[int, ...],
    lead: tuple[int, ...],
    workers: int | None = None,
    most: int = 1,
) -> Plan:
    """Plan the scores of planes [..., P, W] against keys [..., N, W] whose leading dimensions give lead: [*lead, N].

    On so many workers, or as many of `most` as the work pays for.
    """
    header, rows = _common(query, keys, weights, lead)
    count, n = len(rows), keys.shape[-2]
    rows[:, OUT] = np.arange(count) * (4 * n)
    tasks = -(-count // BLOCK) * -(-n // CHUNK)
    workers = workers or threads.count(count * n * math.prod(query.shape[-2:]), most)
    return Plan(header, rows, (*lead, n), tasks, workers, _readable(keys))


def search(
    query: Layout,
    keys: Layout,
    weights: tuple[int, ...],
    lead: tuple[int, ...],
    width: int,
    best: bool,
    bounds: tuple[int, int, int] | None = None,
    workers: int | None = None,
    most: int = 1,
    shortlist: int = 0,
) -> Plan:
    """Plan the search of rows lead for `width` keys; bounds are k, low and high of all rows (validation.Selection).

    shortlist: how many times k keys are scored in full; 0: all.
    """
    header, rows = _common(query, keys, weights, lead)
    if bounds is not None:
        rows[:, [K, LOW, HIGH]] = bounds
    count, n = len(rows), keys.shape[-2]
    workers = workers or threads.count(count * n * math.prod(query.shape[-2:]), most)
    room = min(2 * width, n) + CHUNK + STASH + MORE  # of what a row keeps
    block = max(1, min(BLOCK, -(-count // workers), ROOM // room))
    blocks = -(-count // block)
    # A part finds its own best k, not its share of them: parts shorter than 8 k would mostly repeat each other.
    parts = max(1, min(workers // max(blocks, 1), n // max(8 * width, 1)))
    header[[WIDTH, BEST, ROOMY, ROWS, PARTS, SHORTLIST]] = width, best, room, block, parts, shortlist
    return Plan(header, rows, (*lead, width), blocks * parts, workers, _readable(keys), parts)


def filled(plan: Plan, wanted: Selection | Asked) -> Plan:
    """Return a plan of a search with what each row asks for."""
    rows = plan.rows.copy()
    rows[:, K], rows[:, LOW], rows[:, HIGH] = wanted[:3]
    return plan._replace(rows=rows)


def _readable(keys: Layout) -> bool:
    return keys.strides[-1] == 4 or keys.shape[-1] == 1


def _common(
    query: Layout, keys: Layout, weights: tuple[int, ...], lead: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    n, words = keys.shape[-2:]
    header = np.zeros(FIRST_WEIGHT + len(weights), np.int64)
    header[[N, WORDS, PLANES]] = n, words, len(weights)
    header[[PLANE_STEP, WORD_STEP]] = query.strides[-2:]
    header[STEP] = keys.strides[-2] if n > 1 else 4 * words
    header[TOP] = sum(weights) * 32 * words
    header[FIRST_WEIGHT:] = weights
    rows = np.zeros((math.prod(lead), len(COLUMNS)), np.int64)
    for column, codes in ((QUERY, query), (KEYS, keys)):
        rows[:, column] = layout.offsets(codes.shape[:-2], codes.strides[:-2], lead)
    return header, rows
