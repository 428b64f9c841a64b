"""A whole decode step of one layer on the CPU in one call: hash, search, sum, attend, for each (sequence, KV head).

It calls the kernels of the separate steps at their addresses, in the same order, and adds no arithmetic. This saves
Python calls, which take microseconds each once the other layers of the model have evicted the CPU's caches. These
kernels are compiled once for both ways.
"""

# numba is untyped.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false, reportGeneralTypeIssues=false

from typing import Any

import numba
import numpy as np
from hashcore.cpu import kernel_calls, launch_plan, search_kernels
from hashcore.cpu.intrinsics import observe, pointer, publish
from hashcore.cpu.parts import copy, inner
from numba import types

from sparse_decode.attention import attend_kernels
from sparse_decode.attention.attend_kernels import _widen
from sparse_decode.hashing import encode
from sparse_decode.unselected import moment_kernels

FORM = (
    *("HKV", "GROUP", "DIM", "DIM_V", "KIND", "BITS", "PLANES", "COORDINATES", "SPREAD", "QUERY_HIDDEN", "KEY_HIDDEN"),
    *("SINK", "RECENT", "REMAINDER"),
    *(f"{name}_{step}" for name in ("Q", "K", "V", "CODE") for step in ("BATCH", "HEAD", "TOKEN")),
    *(f"QUERY_{name.upper()}" for name in encode.NAMES),
    *(f"KEY_{name.upper()}" for name in encode.NAMES),
    *("COORDINATE", "POWER", "LIMIT", "COEFFICIENTS", "SLOPES", "SEARCH", "HASH", "ATTEND", "LEAN"),
)
"""Names of the int64 arguments that are constant over steps, in order: sizes, strides in elements, addresses."""
(
    HKV, GROUP, DIM, DIM_V, KIND, BITS, PLANES, COORDINATES, SPREAD, QUERY_HIDDEN, KEY_HIDDEN, SINK, RECENT, REMAINDER,
    Q_BATCH, Q_HEAD, _Q_TOKEN, K_BATCH, K_HEAD, K_TOKEN, V_BATCH, V_HEAD, V_TOKEN, CODE_BATCH, CODE_HEAD,
    CODE_TOKEN, QUERY_R, _QUERY_W1, _QUERY_B1, _QUERY_W2, _QUERY_B2, KEY_R, _KEY_W1, _KEY_B1, _KEY_W2, _KEY_B2,
    COORDINATE, POWER, LIMIT, COEFFICIENTS, SLOPES, SEARCH, HASH, ATTEND, LEAN,
) = range(len(FORM))  # fmt: skip
NOT_FINITE = 1
"""Returned by a task if a query's weights are not finite."""
_COLUMNS = len(launch_plan.COLUMNS)
_ROOM = launch_plan.CHUNK + launch_plan.MORE

_I, _F = types.int64, types.float32


def _of(kind: Any, ndim: int) -> types.Array:
    return types.Array(kind, ndim, "C")


_WEIGHTS = _of(_F, 3)
_STRIDES = types.UniTuple(_I, 5)
# The arguments of the kernels that are called, which are those with which the separate steps call them.
_SEARCHED = (_I, _I, _of(_I, 1), _of(_I, 2), _of(_I, 1), _I, _I, _I, _I)
_HASHED = (
    *(_I, _I, _of(_F, 4), *[_WEIGHTS] * 5, _of(types.int32, 2), _of(_F, 2), _of(_F, 2), _I, _I),
    *(_of(_F, 4), _of(types.int32, 5), _of(types.bool_, 1)),
)
_ATTENDED = tuple(
    (
        *(_I, _I, _of(_F, 4), _I, _I, _STRIDES, _I, _I, _STRIDES, _of(kind, 1), _of(_I, 2), _of(_I, 4), _of(_F, 4)),
        *(_of(_F, 4), _of(_I, 3), _F, _F, _of(_F, 1), _I, _of(_F, 2), _of(_F, 4), _of(_F, 4), _of(_I, 2)),
    )
    for kind in (types.uint32, types.uint16)
)
_LEANED = (
    *(_I, _I, _of(types.float64, 1), _of(types.bool_, 2), _of(_F, 4), _of(_F, 4), _of(types.float64, 3)),
    *(_of(types.float64, 3), _of(types.int8, 4), _of(_F, 3), _of(_F, 3), _of(_F, 1), _of(_F, 3), _of(_F, 3)),
)
_search_tasks, _hash_tasks, _lean_tasks = map(kernel_calls.caller, (_SEARCHED, _HASHED, _LEANED))
_attend_whole, _attend_halves = map(kernel_calls.caller, _ATTENDED)


def addresses(kind: int, remainder: bool) -> dict[str, int]:
    """Return the addresses of the kernels that are called, by their names in FORM; compiles them at first use."""
    found = {
        "SEARCH": kernel_calls.address(search_kernels.search_tasks, _SEARCHED),
        "HASH": kernel_calls.address(encode._tasks, _HASHED),
        "ATTEND": kernel_calls.address(attend_kernels.tasks, _ATTENDED[kind > 0]),
    }
    return found | ({"LEAN": kernel_calls.address(moment_kernels.tasks, _LEANED)} if remainder else {})


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
    numbers, finite = np.empty((1, 1, 1, bits), np.float32), np.ones(1, np.bool_)
    digits = coordinate, power, limit
    _hash_tasks(form[HASH], (0, 1, x, r, w1, b1, w2, b2, *digits, group, planes, numbers, words, finite))
    return finite[0]


@inner
def _search(form, planes, codes, n, count, scores, indices):  # pragma: no cover - compiled
    """Write the `count` best of n codes, without sink and recent tokens, to scores and indices, by ascending index.

    The caller owns both arrays: numba may free an array of which only the address is used before the search runs.
    """
    words, levels = form[BITS] // 32, form[PLANES]
    header = np.zeros(launch_plan.FIRST_WEIGHT + levels, np.int64)
    header[launch_plan.N], header[launch_plan.WORDS], header[launch_plan.PLANES] = n, words, levels
    header[launch_plan.PLANE_STEP], header[launch_plan.WORD_STEP] = 4 * words, 4
    header[launch_plan.STEP] = 4 * form[CODE_TOKEN]
    header[launch_plan.WIDTH], header[launch_plan.ROWS], header[launch_plan.PARTS] = count, 1, 1
    header[launch_plan.ROOMY] = min(2 * count, n) + _ROOM
    for p in range(levels):
        header[launch_plan.FIRST_WEIGHT + p] = 1 << p
        header[launch_plan.TOP] += (1 << p) * 32 * words
    rows = np.zeros((1, _COLUMNS), np.int64)
    rows[0, launch_plan.K], rows[0, launch_plan.LOW] = count, min(form[SINK], n)
    rows[0, launch_plan.HIGH] = max(n - form[RECENT], rows[0, launch_plan.LOW])
    where = np.int64(planes.ctypes.data), codes, np.int64(scores.ctypes.data), np.int64(indices.ctypes.data)
    _search_tasks(form[SEARCH], (0, 1, header, rows, np.empty(0, np.int64), *where))


def tasks(
    first: int, last: int, form: Any, scaling: Any, softcap: Any, q_at: int, k_at: int, v_at: int,
    code_at: int, n: int, reads: Any, pending: int, sinks_at: int, out_at: int, sums: Any, summed: int,
    selected: Any, ready: Any,
) -> int:  # pragma: no cover - compiled  # fmt: skip
    """Run tasks [first, last) of 2 T, for T sequences and KV heads; return NOT_FINITE or 0.

    The first T tasks select and the others attend, so that threads which share an odd number of heads are busy for
    the same time. No task waits for another: one that attends before its selection is ready selects itself.

    Args:
        form: int64, in the order of FORM.
        q_at, k_at, v_at, code_at, out_at: addresses of q [B, Hq, 1, D], k, v, codes, and out, float32
            [B, 1, Hq, Dv].
        n: number of tokens including the new one; reads: numbers of tokens that KV heads read, int64 [Hkv], or [1]
            if all read as many.
        pending: 1 if the last key has to be hashed.
        sinks_at: address of learned sinks, float32 [Hq]; 0 for none.
        sums: addresses of the sums of keys and values, levels and scales, over `summed` tokens; 0 for none.
        selected: where indices are written, int64 [T, most reads]; ready: zeros, int64 [T].
    """
    hkv, group, dim, dim_v, kind = form[HKV], form[GROUP], form[DIM], form[DIM_V], form[KIND]
    item, words, levels, heads = 2 if kind else 4, form[BITS] // 32, form[PLANES], len(ready)
    sink, recent = min(form[SINK], n), form[RECENT]
    end = max(n - recent, sink)
    q, key = np.empty((1, group, 1, dim), np.float32), np.empty((1, 1, 1, dim), np.float32)
    new = n - summed if form[REMAINDER] else 0
    new_k, new_v = np.empty((1, 1, new, dim), np.float32), np.empty((1, 1, new, dim_v), np.float32)
    code, planes = np.empty((1, 1, 1, 1, words), np.int32), np.empty((1, 1, 1, levels, words), np.int32)
    scores = np.empty(selected.shape[1], np.int32)
    stats, used = np.empty((2, 1, 1, group), np.float32), np.empty((1, 1, 1), np.int64)
    mean_keys, rest = np.zeros((1, 1, dim), np.float32), np.zeros((1, group, dim_v), np.float32)
    blocks, visible = np.empty((0, 0), np.int64), np.full((1, 1), n, np.int64)
    counts, joins = np.full(1, float(n)), np.ones((1, new), np.bool_)
    own_sinks = np.full(group, -np.inf, np.float32)
    own_indices = np.empty(selected.shape[1], np.int64)
    whole, halves = np.empty(0, np.uint32), np.empty(0, np.uint16)
    status = 0
    for step in range(first, last):
        task = step % heads
        b, h = task // hkv, task % hkv
        head = h * group
        own_k = k_at + item * (b * form[K_BATCH] + h * form[K_HEAD])
        for g in range(group):
            _line(q[0, g, 0], q_at + item * (b * form[Q_BATCH] + (head + g) * form[Q_HEAD]), kind)
        late = step >= heads and not observe(ready, task)
        count = max(0, reads[h % len(reads)] - form[SINK] - recent)
        room = own_indices if late else selected[task]  # the thread that is late still writes to `selected`
        indices = room[: sink + count + n - end]
        if step < heads or late:
            own_code = code_at + 4 * (b * form[CODE_BATCH] + h * form[CODE_HEAD])
            if pending:  # if two threads write this code, they write the same
                _line(key[0, 0, 0], own_k + item * (n - 1) * form[K_TOKEN], kind)
                _hash(form, KEY_R, form[KEY_HIDDEN], h, 1, 1, key, 0, code)
                place = own_code + 4 * (n - 1) * form[CODE_TOKEN]
                copy(code[0, 0, 0, 0], numba.carray(pointer(place), (words,), np.int32))
            if not _hash(form, QUERY_R, form[QUERY_HIDDEN], head, group, group, q, levels, planes):
                status = NOT_FINITE
                continue
            for token in range(sink):
                indices[token] = token
            for token in range(end, n):
                indices[sink + count + token - end] = token
            if count:
                _search(form, planes, own_code, n, count, scores, indices[sink:])
        if step < heads:
            publish(ready, task, 1)
            continue
        own_v = v_at + item * (b * form[V_BATCH] + h * form[V_HEAD])
        if sinks_at:
            copy(_floats(sinks_at + 4 * head, (group,)), own_sinks)
        coefficients = _floats(form[COEFFICIENTS] + 20 * head, (group * form[REMAINDER], 5))
        if form[REMAINDER]:
            for t in range(new):
                _line(new_k[0, 0, t], own_k + item * (summed + t) * form[K_TOKEN], kind)
                _line(new_v[0, 0, t], own_v + item * (summed + t) * form[V_TOKEN], kind)
            keys = numba.carray(pointer(sums[0] + 8 * task * dim), (1, 1, dim), np.float64)
            values = numba.carray(pointer(sums[1] + 8 * task * dim_v), (1, 1, dim_v), np.float64)
            spread = numba.carray(pointer(sums[2] + task * dim * dim_v), (1, 1, dim, dim_v), np.int8)
            spread_scales = _floats(sums[3] + 4 * task * dim, (1, 1, dim))
            slopes = _floats(form[SLOPES] + 4 * head, (group,))
            queries = q.reshape(1, group, dim)
            held = counts, joins, new_k, new_v, keys, values, spread, spread_scales
            _lean_tasks(form[LEAN], (0, 1, *held, queries, slopes, mean_keys, rest))
        own = _floats(out_at + 4 * (b * hkv + h) * group * dim_v, (1, 1, group, dim_v))
        own[:] = 0
        reach = (n - 1) * form[K_TOKEN] + dim, (n - 1) * form[V_TOKEN] + dim_v
        where = own_k, reach[0], (0, 0, form[K_TOKEN], 1, n), own_v, reach[1], (0, 0, form[V_TOKEN], 1, n)
        made = indices.reshape(1, 1, 1, -1), own, stats, used, scaling, softcap, own_sinks, kind, coefficients
        means = mean_keys.reshape(1, 1, 1, dim), rest.reshape(1, group, 1, dim_v)
        if kind == 0:
            _attend_whole(form[ATTEND], (0, 1, q, *where, whole, blocks, *made, *means, visible))
        else:
            _attend_halves(form[ATTEND], (0, 1, q, *where, halves, blocks, *made, *means, visible))
    return status
