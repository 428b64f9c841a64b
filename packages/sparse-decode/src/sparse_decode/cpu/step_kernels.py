"""Rows of one layer on the CPU in one call: hash, search, sum, attend, for each (row, set of query heads).

What a caller has already, a selection or means, is not computed. Hashing, searching and attending are parts of
it, or kernels of their own, called at their addresses: one call saves Python's, which take microseconds each once the
other layers of the model have evicted the CPU's caches.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportGeneralTypeIssues=false

from typing import Any

import numba
import numpy as np
from hashcore.cpu import kernel_calls, launch_plan, search_kernels
from hashcore.cpu.intrinsics import pointer
from hashcore.cpu.parts import copy, inner
from numba import types

from sparse_decode.cpu import attend_kernels, encode
from sparse_decode.cpu.attend_kernels import _widen
from sparse_decode.cpu.lanes import observe, publish

FORM = (
    *("SETS", "GROUP", "SHARE", "DIM", "DIM_V", "KIND", "BITS", "PLANES", "COORDINATES", "SPREAD", "QUERY_HIDDEN"),
    *("KEY_HIDDEN", "SINK", "RECENT", "REMAINDER"),
    *(f"{name}_{step}" for name in ("Q", "K", "V", "CODE") for step in ("BATCH", "HEAD", "TOKEN")),
    *(f"QUERY_{name.upper()}" for name in encode.NAMES),
    *(f"KEY_{name.upper()}" for name in encode.NAMES),
    *("COORDINATE", "POWER", "LIMIT", "COEFFICIENTS", "SLOPES", "SEARCH", "HASH"),
)
"""Names of the int64 arguments that are constant over steps, in order: sizes, strides in elements, addresses."""
(
    SETS, GROUP, SHARE, DIM, DIM_V, KIND, BITS, PLANES, COORDINATES, SPREAD, QUERY_HIDDEN, KEY_HIDDEN, SINK, RECENT,
    REMAINDER, Q_BATCH, Q_HEAD, Q_TOKEN, K_BATCH, K_HEAD, K_TOKEN, V_BATCH, V_HEAD, V_TOKEN, CODE_BATCH, CODE_HEAD,
    CODE_TOKEN, QUERY_R, _QUERY_W1, _QUERY_B1, _QUERY_W2, _QUERY_B2, KEY_R, _KEY_W1, _KEY_B1, _KEY_W2, _KEY_B2,
    COORDINATE, POWER, LIMIT, COEFFICIENTS, SLOPES, SEARCH, HASH,
) = range(len(FORM))  # fmt: skip
# The int64 arguments that differ from call to call, in order; addresses are 0 for what is not given. ROWS: rows of
# a sequence. PENDING: 1 if the last key has to be hashed. SUMMED: tokens in the sums. WIDTH: of the given selection.
# Keys in pages: TABLE_AT: page tables [B, PAGES]; PAGE: tokens of a page; REACH: elements of all pages.
(
    ROWS, Q_AT, K_AT, V_AT, CODES_AT, OUT_AT, SINKS_AT, PENDING, SUMMED, KEYS_AT, VALUES_AT, LEVELS_AT, SCALES_AT,
    MEAN_KEYS_AT, RESTS_AT, GIVEN_AT, WIDTH, TABLE_AT, PAGES, PAGE, K_REACH, V_REACH,
) = range(22)  # fmt: skip
_COLUMNS = len(launch_plan.COLUMNS)
_ROOM = launch_plan.CHUNK + launch_plan.MORE
_I, _F = types.int64, types.float32


def _of(kind: Any, ndim: int) -> types.Array:
    return types.Array(kind, ndim, "C")


_WEIGHTS = _of(_F, 3)
# The arguments of the kernels that are called, which are those with which they are called elsewhere.
_SEARCHED = (_I, _I, _of(_I, 1), _of(_I, 2), _of(_I, 1), _I, _I, _I, _I)
_HASHED = (
    *(_I, _I, _of(_F, 4), *[_WEIGHTS] * 5, _of(types.int32, 2), _of(_F, 2), _of(_F, 2), _I, _I),
    *(_of(_F, 4), _of(types.int32, 5)),
)
_search_tasks, _hash_tasks = map(kernel_calls.caller, (_SEARCHED, _HASHED))


def addresses() -> dict[str, int]:
    """Return the addresses of the kernels that are called, by their names in FORM; compiles them at first use."""
    searched = kernel_calls.address(search_kernels.search_tasks, _SEARCHED)
    return {"SEARCH": searched, "HASH": kernel_calls.address(encode._tasks, _HASHED)}


@inner
def _line(x, address, kind):  # pragma: no cover - compiled
    """Read the row at an address into x, as float32."""
    if kind == 0:
        copy(numba.carray(pointer(address), len(x), np.float32), x)
    else:
        _widen(numba.carray(pointer(address), len(x), np.uint16), kind, x.view(np.uint32), x)


@inner
def _floats(address, shape):  # pragma: no cover - compiled
    return numba.carray(pointer(address), shape, np.float32)


@inner
def _hash(form, first, hidden, head, heads, group, x, planes, words):  # pragma: no cover - compiled
    """Hash x [1, group, 1, D] with the functions of heads from `head` on; form[first] is their first address."""
    dim, coordinates, bits = form[DIM], form[COORDINATES], form[BITS]
    one = np.int64(4)
    r = _floats(form[first] + one * head * dim * coordinates, (heads, dim, coordinates))
    w1 = _floats(form[first + 1] + one * head * dim * hidden, (heads, dim, hidden))
    b1 = _floats(form[first + 2] + one * head * hidden, (heads, 1, hidden))
    w2 = _floats(form[first + 3] + one * head * hidden * coordinates, (heads, hidden, coordinates))
    b2 = _floats(form[first + 4] + one * head * coordinates, (heads, 1, coordinates))
    kv = head // group
    digits = bits if form[SPREAD] else 0
    coordinate = numba.carray(pointer(form[COORDINATE] + one * kv * digits), (1, digits), np.int32)
    power = _floats(form[POWER] + one * kv * digits, (1, digits))
    limit = _floats(form[LIMIT] + one * kv * coordinates * form[SPREAD], (1, coordinates * form[SPREAD]))
    numbers = np.empty((1, 1, 1, bits), np.float32)
    digits = coordinate, power, limit
    _hash_tasks(form[HASH], (0, 1, x, r, w1, b1, w2, b2, *digits, group, planes, numbers, words))


@inner
def _search(form, planes, codes, low, high, count, scores, indices):  # pragma: no cover - compiled
    """Write the `count` best of codes low..high-1 to scores and indices, by ascending index.

    The caller owns both arrays: numba may free an array of which only the address is used before the search runs.
    """
    words, levels = form[BITS] // 32, form[PLANES]
    header = np.zeros(launch_plan.FIRST_WEIGHT + levels, np.int64)
    header[launch_plan.N], header[launch_plan.WORDS], header[launch_plan.PLANES] = high, words, levels
    header[launch_plan.PLANE_STEP], header[launch_plan.WORD_STEP] = 4 * words, 4
    header[launch_plan.STEP] = 4 * form[CODE_TOKEN]
    header[launch_plan.WIDTH], header[launch_plan.ROWS], header[launch_plan.PARTS] = count, 1, 1
    header[launch_plan.CAPACITY] = min(2 * count, high) + _ROOM
    for p in range(levels):
        header[launch_plan.FIRST_WEIGHT + p] = 1 << p
        header[launch_plan.TOP] += (1 << p) * 32 * words
    rows = np.zeros((1, _COLUMNS), np.int64)
    rows[0, launch_plan.K], rows[0, launch_plan.LOW], rows[0, launch_plan.HIGH] = count, low, high
    where = np.int64(planes.ctypes.data), codes, np.int64(scores.ctypes.data), np.int64(indices.ctypes.data)
    _search_tasks(form[SEARCH], (0, 1, header, rows, np.empty(0, np.int64), *where))


@inner
def _select(form, call, b, s, span, low, count, q, key, code, planes, scores, indices):  # pragma: no cover - compiled
    """Hash the queries of a set, and the last key if pending, and write the `count` best tokens to indices."""
    item, last = 2 if form[KIND] else 4, span[2] - 1
    own_code = call[CODES_AT] + 4 * (b * form[CODE_BATCH] + s * form[CODE_HEAD])
    if call[PENDING]:  # if two threads write this code, they write the same
        own_k = call[K_AT] + item * (b * form[K_BATCH] + s * form[K_HEAD])
        _line(key[0, 0, 0], own_k + item * last * form[K_TOKEN], form[KIND])
        _hash(form, KEY_R, form[KEY_HIDDEN], s, 1, 1, key, 0, code)
        place = own_code + 4 * last * form[CODE_TOKEN]
        copy(code[0, 0, 0, 0], numba.carray(pointer(place), (len(code[0, 0, 0, 0]),), np.int32))
    _hash(form, QUERY_R, form[QUERY_HIDDEN], s * form[GROUP], form[GROUP], form[GROUP], q, form[PLANES], planes)
    if count:
        _search(form, planes, own_code, low, max(low, span[1]), count, scores, indices)


@inner
def _centre(n, before, x, sums, mean, of_drift, far):  # pragma: no cover - compiled
    """Write the mean of sums [D] and new tokens x [T, D], and these tokens' deviations to far [T + 1, D].

    The last row of far is how far the mean moves, times of_drift.
    """
    for d in range(len(sums)):
        total = sums[d]
        old = total / before
        for t in range(len(x)):
            far[t, d] = np.float32(x[t, d] - old)
            total += x[t, d]
        mean[d] = np.float32(total / n)
        far[len(x), d] = np.float32(of_drift * (total / n - old))


@inner(fastmath={"contract", "nsz"})
def _lean(q, slope, levels, scales, n, far_k, far_v, out):  # pragma: no cover - compiled
    """Add the terms in q of the equation of `_means` to out [Dv]; the last row of far_k is -n d_k, of far_v d_v."""
    for d in range(len(q)):
        weight, row = np.float32(q[d] * slope / n) * scales[d], levels[d]
        for i in range(len(out)):
            out[i] += weight * np.float32(row[i])
    for t in range(len(far_k)):
        dot = np.float32(0)
        for d in range(len(q)):
            dot += q[d] * far_k[t, d]
        weight = np.float32(dot * slope / n)
        for i in range(len(out)):
            out[i] += weight * far_v[t, i]


@inner
def _means(n, k, v, keys, values, levels, scales, q, slopes, mean_key, rest):  # pragma: no cover - compiled
    """Write the mean key [D] of n visible tokens and the values [G, Dv] of eq. 16 of query heads q [G, D].

    With S the spread, m and d the means of the tokens in the sums and how far they move when the last T are added, and
    n the number of all of them (`sparse_decode.sums`):

        rest = mean v + slope / n (q S + sum over the last T of q (k - m_k) (v - m_v)) - slope (q d_k) d_v

    k, v: the last tokens [T, D] and [T, Dv], which are not in the sums: keys [D], values [Dv], levels [D, Dv] and
    scales [D].
    """
    far_k, far_v = np.empty((len(k) + 1, len(keys)), np.float32), np.empty((len(k) + 1, len(values)), np.float32)
    mean_v, before = np.empty(len(values), np.float32), max(float(n - len(k)), 1.0)
    _centre(float(n), before, k, keys, mean_key, -float(n), far_k)
    _centre(float(n), before, v, values, mean_v, 1.0, far_v)
    for g in range(len(q)):
        copy(mean_v, rest[g])
        _lean(q[g], slopes[g], levels, scales, np.float32(n), far_k, far_v, rest[g])


@inner
def _sum(form, call, b, t, s, span, q, new_k, new_v, mean_key, rest):  # pragma: no cover - compiled
    """Write the remainder's mean key [D] and values [G, Dv] for the queries q [G, D] of a set."""
    dim, dim_v, kind, kv = form[DIM], form[DIM_V], form[KIND], s // form[SHARE]
    heads, sets = form[SETS] // form[SHARE], form[SETS]
    if call[MEAN_KEYS_AT]:
        copy(_floats(call[MEAN_KEYS_AT] + 4 * ((b * heads + kv) * call[ROWS] + t) * dim, (dim,)), mean_key)
        for g in range(form[GROUP]):
            at = ((b * sets + s) * form[GROUP] + g) * call[ROWS] + t
            copy(_floats(call[RESTS_AT] + 4 * at * dim_v, (dim_v,)), rest[g])
        return
    item, task, first = 2 if kind else 4, b * heads + kv, max(call[SUMMED], span[0])
    own_k = call[K_AT] + item * (b * form[K_BATCH] + kv * form[K_HEAD])
    own_v = call[V_AT] + item * (b * form[V_BATCH] + kv * form[V_HEAD])
    new = span[2] - first
    for j in range(new):
        _line(new_k[j], own_k + item * (first + j) * form[K_TOKEN], kind)
        _line(new_v[j], own_v + item * (first + j) * form[V_TOKEN], kind)
    keys = numba.carray(pointer(call[KEYS_AT] + 8 * task * dim), (dim,), np.float64)
    values = numba.carray(pointer(call[VALUES_AT] + 8 * task * dim_v), (dim_v,), np.float64)
    levels = numba.carray(pointer(call[LEVELS_AT] + task * dim * dim_v), (dim, dim_v), np.int8)
    scales = _floats(call[SCALES_AT] + 4 * task * dim, (dim,))
    slopes = _floats(form[SLOPES] + 4 * s * form[GROUP], (form[GROUP],))
    _means(span[2] - span[0], new_k[:new], new_v[:new], keys, values, levels, scales, q, slopes, mean_key, rest)


@inner
def _attend(
    form, call, b, s, span, q, indices, out, scaling, softcap, sinks, table, given, like
):  # pragma: no cover - compiled
    """Attend to the tokens in `indices`; given: coefficients, mean key and values of the remainder."""
    dim, dim_v, item, kv = form[DIM], form[DIM_V], 2 if form[KIND] else 4, s // form[SHARE]
    page = b if call[TABLE_AT] == 0 else 0
    own_k = call[K_AT] + item * (page * form[K_BATCH] + kv * form[K_HEAD])
    own_v = call[V_AT] + item * (page * form[V_BATCH] + kv * form[V_HEAD])
    reach_k, reach_v = (span[2] - 1) * form[K_TOKEN] + dim, (span[2] - 1) * form[V_TOKEN] + dim_v
    if call[TABLE_AT]:
        reach_k, reach_v = call[K_REACH] - kv * form[K_HEAD], call[V_REACH] - kv * form[V_HEAD]
    k = numba.carray(pointer(own_k), reach_k, like.dtype)
    v = numba.carray(pointer(own_v), reach_v, like.dtype)
    k_at, v_at = (form[K_BATCH], form[K_TOKEN], call[PAGE]), (form[V_BATCH], form[V_TOKEN], call[PAGE])
    options = scaling, softcap, sinks, form[KIND], *given, span[2] - span[0]
    attend_kernels.attend(q, k, k_at, v, v_at, table, indices, out, *options)


def tasks(
    first: int, last: int, form: Any, call: Any, like: Any, scaling: Any, softcap: Any, spans: Any, reads: Any,
    selected: Any, ready: Any, used: Any,
) -> int:  # pragma: no cover - compiled  # fmt: skip
    """Run tasks [first, last) of T, for T rows and sets, or of 2 T without a given selection.

    Of 2 T, the first T tasks select and the others attend, so that threads which share an odd number of tasks are busy
    for the same time. No task waits for another: one that attends before its selection is ready selects itself.

    Args:
        form, call: int64, in the order of FORM, and of ROWS to V_REACH.
        like: an array of words as wide as those of keys and values.
        spans: for each row the start and end of what it sees, with where the always-read last tokens begin between
            them: int64 [R, 3].
        reads: numbers of tokens that sets read, int64 [R or 1, SETS or 1]; without a given selection.
        selected: where indices are written, int64 [T, most]; with a given selection [0, most].
        ready: zeros, int64 [T]; used: for the number of tokens that were read, int64 [T].
    Returns: 1 if a given index is no token, else 0.
    """
    sets, group, dim, dim_v, kind = form[SETS], form[GROUP], form[DIM], form[DIM_V], form[KIND]
    item, words, levels, count_tasks, rows = 2 if kind else 4, form[BITS] // 32, form[PLANES], len(ready), call[ROWS]
    given = call[GIVEN_AT] != 0
    q, key = np.empty((1, group, 1, dim), np.float32), np.empty((1, 1, 1, dim), np.float32)
    code, planes = np.empty((1, 1, 1, 1, words), np.int32), np.empty((1, 1, 1, levels, words), np.int32)
    most, new = selected.shape[1], np.int64(0)
    scores, own_indices = np.empty(most, np.int32), np.empty(most, np.int64)
    for r in range(len(spans)):
        new = max(new, spans[r, 2] - max(call[SUMMED], spans[r, 0]))
    new = new * np.int64(form[REMAINDER] and call[MEAN_KEYS_AT] == 0)
    new_k, new_v = np.empty((new, dim), np.float32), np.empty((new, dim_v), np.float32)
    mean_key, rest = np.zeros(dim, np.float32), np.zeros((group, dim_v), np.float32)
    sinks = np.full(group, np.float32(-np.inf), np.float32)
    wrong = 0
    for step in range(first, last):
        task = step % count_tasks
        r, s = task // sets, task % sets
        b, t, head, span = r // rows, r % rows, s * group, spans[r]
        attends, out = given or step >= count_tasks, _floats(call[OUT_AT] + 4 * task * group * dim_v, (group, dim_v))
        low = min(span[0] + form[SINK], span[2])  # candidates lie from here on
        tail = max(low, span[1])
        late = attends and not given and not observe(ready, task)
        for g in range(group):
            at = b * form[Q_BATCH] + (head + g) * form[Q_HEAD] + t * form[Q_TOKEN]
            _line(q[0, g, 0], call[Q_AT] + item * at, kind)
        room = own_indices if late or given else selected[task]  # the thread that is late still writes to `selected`
        n_sink, n_tail, count = low - span[0], span[2] - tail, np.int64(0)
        if given:
            at = ((b * sets + s) * rows + t) * call[WIDTH]
            for token in numba.carray(pointer(call[GIVEN_AT] + 8 * at), (call[WIDTH],), np.int64):
                if low <= token < tail:
                    room[n_sink + count] = token
                    count += 1
                elif token >= span[2]:
                    wrong = 1
        else:
            count = max(0, reads[r % len(reads), s % reads.shape[1]] - n_sink - form[RECENT])
            count = min(count, tail - low)
            if step < count_tasks or late:
                _select(form, call, b, s, span, low, count, q, key, code, planes, scores, room[n_sink:])
        if not attends or late or given:
            for j in range(n_sink):
                room[j] = span[0] + j
            for j in range(n_tail):
                room[n_sink + count + j] = tail + j
        if not attends:
            publish(ready, task, 1)
            continue
        out[:] = 0
        indices = room[: n_sink + count + n_tail]
        used[task] = len(indices)
        if not len(indices):
            continue
        if call[SINKS_AT]:
            copy(_floats(call[SINKS_AT] + 4 * head, (group,)), sinks)
        coefficients = _floats(form[COEFFICIENTS] + 20 * head, (group * form[REMAINDER], 5))
        queries = q.reshape(group, dim)
        if form[REMAINDER]:
            _sum(form, call, b, t, s, span, queries, new_k, new_v, mean_key, rest)
        table = numba.carray(pointer(call[TABLE_AT] + 8 * b * call[PAGES]), (call[PAGES],), np.int64)
        means_given = coefficients, mean_key, rest
        _attend(form, call, b, s, span, queries, indices, out, scaling, softcap, sinks, table, means_given, like)
    return wrong
