"""Lines of logits for numba: what rows see, and exponentials and maxima, LANES numbers at once.

LLVM vectorises such loops with narrower registers, and a maximum that keeps NaN not at all. Lines are parts of
contiguous float32 arrays: `count` numbers from `at` on, a multiple of LANES. Sums have one order, whatever calls them.
"""

# llvmlite and numba are untyped.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import math
from typing import Any

import numba
import numpy as np
from hashcore.cpu.parts import inner
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparse_decode.cpu.lanes import _FLOATS, _WORDS, LANES, _call, _data, _fused, _lines, _Numbers, _spread, _vector

LEAST = -127 * math.log(2)
"""Smallest argument of an exponential: the result has exponent bits 0."""
MOST = 128 * math.log(2)
"""Largest argument of the exponent: exponent bits 255, infinity."""
POLYNOMIAL = [1.0 / math.factorial(i) for i in range(7, -1, -1)]
"""Coefficients of exp, highest first."""


def _all(number: float) -> Any:
    return ir.Constant(_FLOATS, [number] * LANES)


def _exp(builder: Any, y: Any) -> Any:
    """Return exp(y) to a relative error of 2e-7; NaN stays NaN, subnormal results become 0, those above 2^127.5 inf.

    exp(y) = 2^n exp(r), n = round(y / log 2): a polynomial of degree 7, and n added to the exponent. log 2 is the sum
    of two constants, the first of which has few bits, so that n times it is exact.
    """
    y = builder.select(builder.fcmp_ordered("<", y, _all(LEAST)), _all(LEAST), y)
    below = builder.select(builder.fcmp_ordered("<", y, _all(MOST)), y, _all(MOST))  # not NaN: n must be an integer
    half = _fused(builder, below, _all(1 / math.log(2)), _all(0.5))
    n = _call(builder, f"llvm.floor.v{LANES}f32", _FLOATS, [half])
    r = _fused(builder, n, _all(-0.693359375), y)
    r = _fused(builder, n, _all(2.12194440e-4), r)
    p = _all(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = _fused(builder, p, r, _all(coefficient))
    whole = builder.add(builder.fptosi(n, _WORDS), ir.Constant(_WORDS, [127] * LANES))
    power = builder.bitcast(builder.shl(whole, ir.Constant(_WORDS, [23] * LANES)), _FLOATS)
    return builder.fmul(p, power)


def _reduced(builder: Any, vector: Any, join: Any) -> Any:
    """Join the lanes of a vector: lane i with lane i + 8, then i + 4, and so on."""
    undefined, half = ir.Constant(_FLOATS, ir.Undefined), LANES // 2
    while half:
        mask = ir.Constant(_WORDS, [(lane + half) % LANES for lane in range(LANES)])
        vector, half = join(vector, builder.shuffle_vector(vector, undefined, mask)), half // 2
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


@intrinsic
def _exponentials(typing_context: Any, x: Any, at: Any, count: Any, top: Any):
    _lines(x)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, (at, count, top) = _data(context, builder, signature.args[0], values[0]), values[1:]
        most, total = _spread(builder, top), cgutils.alloca_once_value(builder, _all(0))
        by = _Numbers(builder, at.type)
        with by.loop(count, LANES) as loop:
            place = _vector(builder, x, by.sum(at, by.times(loop.index, LANES)), _FLOATS)
            found = _exp(builder, builder.fsub(builder.load(place, align=4), most))
            builder.store(found, place, align=4)
            builder.store(builder.fadd(builder.load(total), found), total)
        return _reduced(builder, builder.load(total), builder.fadd)

    return types.float32(x, types.intp, types.intp, types.float32), emit


@intrinsic
def _greatest(typing_context: Any, x: Any, at: Any, count: Any):
    _lines(x)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, (at, count) = _data(context, builder, signature.args[0], values[0]), values[1:]

        def join(first: Any, second: Any) -> Any:
            greater = builder.fcmp_ordered(">", second, first)
            not_less = builder.or_(greater, builder.fcmp_unordered("uno", second, second))
            return builder.select(not_less, second, first)

        most, by = cgutils.alloca_once_value(builder, _all(-math.inf)), _Numbers(builder, at.type)
        with by.loop(count, LANES) as loop:
            place = _vector(builder, x, by.sum(at, by.times(loop.index, LANES)), _FLOATS)
            builder.store(join(builder.load(most), builder.load(place, align=4)), most)
        return _reduced(builder, builder.load(most), join)

    return types.float32(x, types.intp, types.intp), emit


# Functions of their own, not inlined by numba: fastmath of a caller would change the order of sums.
@inner
def exponentials(x: Any, at: Any, count: Any, top: Any) -> Any:  # pragma: no cover - compiled
    """Replace numbers by exp(x - top), x <= top, to a relative error of 2e-7; return their sum. -inf becomes 0."""
    return _exponentials(x, at, count, top)


@inner
def greatest(x: Any, at: Any, count: Any) -> Any:  # pragma: no cover - compiled
    """Return the largest number, or NaN if there is one; -inf without numbers."""
    return _greatest(x, at, count)


@inner(fastmath={"reassoc", "contract", "nsz"})
def cap(x: Any, at: Any, count: Any, softcap: Any, spare: Any) -> None:  # pragma: no cover - compiled
    """Replace x by softcap tanh(x / softcap), to 1e-6 of softcap: tanh |y| = (1 - e) / (1 + e), e = exp(-2 |y|).

    spare: space for count numbers.
    """
    line, small = x[at : at + count], spare[:count]
    for j in range(count):
        small[j] = -abs(line[j]) * (np.float32(2) / softcap)
    exponentials(small, 0, count, np.float32(0))
    for j in range(count):
        line[j] = np.sign(line[j]) * softcap * (np.float32(1) - small[j]) / (np.float32(1) + small[j])


@numba.njit(inline="always")
def extent(bounds):  # pragma: no cover - compiled
    """Return [low, high) of the tokens that any of the rows sees, and [first, last) of those that all see."""
    low, high, first, last = bounds[0, 0], bounds[0, 1], bounds[0, 0], bounds[0, 1]
    for r in range(1, len(bounds)):
        low, high = min(low, bounds[r, 0]), max(high, bounds[r, 1])
        first, last = max(first, bounds[r, 0]), min(last, bounds[r, 1])
    return low, high, first, last


@numba.njit(inline="always")
def hide(logits, at, size, start, end):  # pragma: no cover - compiled
    """Set the logits of `size` tokens outside [start, end) to -inf."""
    for j in range(max(0, min(size, start))):
        logits[at + j] = np.float32(-np.inf)
    for j in range(max(0, min(size, end)), size):
        logits[at + j] = np.float32(-np.inf)
