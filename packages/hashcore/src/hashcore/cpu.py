"""Scores (eq. 2, eq. 4) and selection (eq. 6) on the CPU: numba kernels and the threads that run them.

Score. A task is BLOCK query rows x CHUNK keys: 64 KiB of 128-bit keys stay in L2 while the rows pass over them. Words
are read as uint64 (uint32 if W is odd). Two words a code, the common case, are scored where they lie; other codes are
first turned into columns, one word of CHUNK keys each, shared by the rows of the block. Per key of 128 bits and 3
planes: 6 popcounts, 4 bytes written. The ceiling is the memory that the scores are written to.

Selection, per row: (1) smallest and largest score, (2) histogram, (3) threshold: walk the bins from the top until k are
covered, (4) ordered compaction: 64 scores become a 64-bit mask of those at or above the threshold, its set bits are
taken in order, and equals only while their quota lasts.

Threads. The kernels release the GIL and run on short-lived Python threads that take pieces in turn: no barrier (8-16 ms
for numba's own on a loaded machine), half the compile time, safe from several threads (numba's default layer is not)
and after a fork. Pieces never share outputs, so the result does not depend on them.
"""

# numba is untyped, and its decorators change what a function takes.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic
from numpy.typing import NDArray

CHUNK = 4096
BLOCK = 8
SPAN = 1 << 16  # scores of one row must differ by less: the histogram is then at most 256 KiB
GRAIN = 1 << 23  # popcounts, or 1/4 of the scores to select from, that pay for a thread: about 0.5 ms


def score(
    query: NDArray[np.int32],
    keys: NDArray[np.int32],
    weights: tuple[int, ...],
    lead: tuple[int, ...],
    threads: int | None = None,
) -> NDArray[np.int32]:
    """Score planes [..., P, W] against keys [..., N, W], whose leading dimensions broadcast to lead: int32 [..., N]."""
    out = np.empty((*lead, keys.shape[-2]), np.int32)
    if out.size == 0:
        return out
    query, query_of = _distinct(query, lead)
    keys, keys_of = _distinct(keys, lead)
    rows = out.reshape(-1, out.shape[-1])
    tasks = -(-rows.shape[0] // BLOCK) * -(-rows.shape[1] // CHUNK)
    popcounts = out.size * query.shape[-1] * query.shape[-2]
    arguments = (_words(query), _words(keys), _readonly(np.array(weights, np.uint32)), query_of, keys_of, rows)
    _run(_compiled(_score_tasks), tasks, popcounts, threads, arguments)
    return out


def topk(
    scores: NDArray[Any], k: NDArray[Any], width: int, threads: int | None = None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Select the k[...] highest scores of each row of [..., N] into [..., width]."""
    native = scores.dtype.newbyteorder("=")
    values = np.zeros((*scores.shape[:-1], width), native)
    indices = np.full(values.shape, -1, np.int64)
    if scores.size == 0:
        return values, indices
    count = scores.size // scores.shape[-1]
    rows = np.ascontiguousarray(scores, native).reshape(count, -1)
    sizes = np.ascontiguousarray(k, np.int64).reshape(count)
    arguments = (_readonly(rows), _readonly(sizes), values.reshape(count, width), indices.reshape(count, width))
    wide = max(_run(_compiled(_topk_rows), count, 4 * scores.size, threads, arguments))
    if wide >= 0:
        span = int(rows[wide].max()) - int(rows[wide].min())
        raise ValueError(
            f"the scores of a row must differ by less than {SPAN}, got {span} in row {wide}; "
            "use smaller weights or fewer bits"
        )
    return values, indices


def _distinct(x: NDArray[np.int32], lead: tuple[int, ...]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return x as contiguous [count, rows, W] without its repeats, and which of them each output row uses."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides[:-2])
    x = np.ascontiguousarray(x[once], np.int32)
    shape = x.shape[:-2]
    count = int(np.prod(shape, dtype=np.int64))
    index = np.broadcast_to(np.arange(count, dtype=np.int64).reshape(shape), lead).ravel()
    return x.reshape(count, *x.shape[-2:]), _readonly(index)


def _words(x: NDArray[np.int32]) -> NDArray[Any]:
    wide = x.view(np.uint64 if x.shape[-1] % 2 == 0 else np.uint32)
    return _readonly(np.require(wide, requirements=["C", "A"]))  # a slice of words may start off an 8-byte boundary


def _readonly(x: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view: numba compiles once more for every mix of writable and read-only arguments."""
    x = x.view()
    x.flags.writeable = False
    return x


def _run(
    kernel: Callable[..., int], tasks: int, work: int, threads: int | None, arguments: tuple[Any, ...]
) -> list[int]:
    """Run tasks [0, tasks) of a kernel, in one go if they are few or threads is 1; return what each piece returns."""
    if threads is None:
        threads = max(1, min(work // GRAIN, numba.config.NUMBA_NUM_THREADS))
    pieces = min(tasks, 4 * threads)  # a thread that a busy machine holds up takes fewer
    if threads == 1:
        return [kernel(0, tasks, *arguments)]
    edges = [tasks * piece // pieces for piece in range(pieces + 1)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda first, last: kernel(first, last, *arguments), edges, edges[1:]))


@functools.cache
def _compiled(function: Callable[..., int]) -> Callable[..., int]:
    """Compile a kernel on its first use, keeping the machine code on disk for the next process.

    A kernel takes 0.6-1.2 s to compile and 5 ms to load, and the first of a process 0.4 s more for numba's own start:
    a command that scores once should not pay for a compiler each time. numba caches beside this file or, where that
    cannot be written, in the user's cache folder; where neither can, it refuses, and the kernel is compiled for this
    process only. All of it happens here and not at import, because choosing the folder writes to it.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return numba.njit(nogil=True)(function)


@intrinsic
def _popcount(typing_context: Any, x: Any) -> Any:
    """Count the set bits of an unsigned integer; LLVM makes it vpopcntq or what the machine has."""
    return x(x), lambda context, builder, signature, values: builder.ctpop(values[0])


@intrinsic
def _lowest_bit(typing_context: Any, x: Any) -> Any:
    """Return the position of the lowest set bit of a non-zero integer."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.cttz(values[0], context.get_constant(numba.types.boolean, True))

    return x(x), emit


def _score_tasks(first, last, query, keys, weights, query_of, keys_of, out):
    """Score tasks [first, last): query [q, P, V], keys [k, N, V] in words of one type, out int32 [rows, N]."""
    rows, n = out.shape
    words = keys.shape[2]
    chunks = (n + CHUNK - 1) // CHUNK
    columns = np.empty((words, CHUNK if words != 2 else 0), keys.dtype)
    for task in range(first, last):
        low = task % chunks * CHUNK
        high = min(low + CHUNK, n)
        loaded = -1
        for row in range(task // chunks * BLOCK, min(task // chunks * BLOCK + BLOCK, rows)):
            # Slice first and index from 0: with a base added to the index LLVM emits gathers, 3-11 times slower.
            flat = keys[keys_of[row]].reshape(-1)[low * words : high * words]
            planes = query[query_of[row]]
            o = out[row, low:high]
            if words == 2:
                _score_pairs(flat, planes, weights, o)
                continue
            if loaded != keys_of[row]:
                loaded = keys_of[row]
                for v in range(words):
                    for i in range(high - low):
                        columns[v, i] = flat[i * words + v]
            for v in range(words):
                _score_column(columns[v, : high - low], planes[:, v], weights, o, v > 0)
    return 0


@numba.njit
def _score_pairs(x, planes, weights, out):
    """Write the scores of keys of two words, which lie in turn in x: three planes a pass over x, then one."""
    p = 0
    while p + 3 <= len(weights):
        a0, b0, w0 = ~planes[p, 0], ~planes[p, 1], np.uint64(weights[p])
        a1, b1, w1 = ~planes[p + 1, 0], ~planes[p + 1, 1], np.uint64(weights[p + 1])
        a2, b2, w2 = ~planes[p + 2, 0], ~planes[p + 2, 1], np.uint64(weights[p + 2])
        for i in range(len(out)):
            a, b = x[2 * i], x[2 * i + 1]
            total = w0 * (_popcount(a ^ a0) + _popcount(b ^ b0))
            total += w1 * (_popcount(a ^ a1) + _popcount(b ^ b1))
            total += w2 * (_popcount(a ^ a2) + _popcount(b ^ b2))
            out[i] = np.int32(total) + (out[i] if p else np.int32(0))
        p += 3
    while p < len(weights):
        a0, b0, w0 = ~planes[p, 0], ~planes[p, 1], np.uint64(weights[p])
        for i in range(len(out)):
            total = w0 * (_popcount(x[2 * i] ^ a0) + _popcount(x[2 * i + 1] ^ b0))
            out[i] = np.int32(total) + (out[i] if p else np.int32(0))
        p += 1


@numba.njit
def _score_column(x, plane, weights, out, add):
    """Write, or add to out, the scores of one word of every key: three planes a pass over x, then one."""
    p = 0
    while p + 3 <= len(weights):
        a0, w0 = ~plane[p], np.uint64(weights[p])
        a1, w1 = ~plane[p + 1], np.uint64(weights[p + 1])
        a2, w2 = ~plane[p + 2], np.uint64(weights[p + 2])
        for i in range(len(out)):
            total = w0 * _popcount(x[i] ^ a0) + w1 * _popcount(x[i] ^ a1) + w2 * _popcount(x[i] ^ a2)
            out[i] = np.int32(total) + (out[i] if add else np.int32(0))
        add = True
        p += 3
    while p < len(weights):
        a0, w0 = ~plane[p], np.uint64(weights[p])
        for i in range(len(out)):
            out[i] = np.int32(w0 * _popcount(x[i] ^ a0)) + (out[i] if add else np.int32(0))
        add = True
        p += 1


def _topk_rows(first, last, scores, k, values, indices):
    """Select from rows [first, last); return a row whose scores lie too far apart, or -1."""
    histogram = np.empty(SPAN, np.int32)
    for row in range(first, last):
        s = scores[row]
        smallest = largest = s[0]  # (1)
        for i in range(len(s)):
            smallest = min(smallest, s[i])
            largest = max(largest, s[i])
        # Differences are taken modulo 2^64: right for every integer type, signed or not.
        span = np.uint64(largest) - np.uint64(smallest)
        if span >= np.uint64(SPAN):
            return row
        if k[row] == 0:
            continue
        histogram[: span + np.uint64(1)] = 0  # (2)
        for i in range(len(s)):
            histogram[np.uint64(s[i]) - np.uint64(smallest)] += 1
        step, quota = np.uint64(span), k[row]  # (3)
        while histogram[step] < quota:
            quota -= histogram[step]
            step -= np.uint64(1)
        threshold = s.dtype.type(np.uint64(smallest) + step)
        _compact(s, threshold, quota, indices[row])
        for i in range(k[row]):
            values[row, i] = s[indices[row, i]]
    return -1


@numba.njit
def _compact(s, threshold, quota, indices):
    """Write, in order, the indices of all scores above the threshold and of the first quota equal to it (4)."""
    taken = 0
    whole = len(s) // 64 * 64
    for base in range(0, whole, 64):
        block = s[base : base + 64]
        mask = np.uint64(0)
        for i in range(64):
            mask |= np.uint64(block[i] >= threshold) << np.uint64(i)
        while mask:
            i = _lowest_bit(mask)
            mask &= mask - np.uint64(1)
            equal = block[i] == threshold
            if equal and quota == 0:
                continue
            quota -= equal
            indices[taken] = base + np.int64(i)
            taken += 1
    for i in range(whole, len(s)):
        equal = s[i] == threshold
        if s[i] > threshold or (equal and quota > 0):
            quota -= equal
            indices[taken] = i
            taken += 1
