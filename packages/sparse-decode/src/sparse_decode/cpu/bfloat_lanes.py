"""SIMD operations on bfloat16 for numba, by the dot product of AVX512_BF16: two products a lane and instruction.

    sums[lane] += a[2 lane + 1] b[2 lane + 1] + a[2 lane] b[2 lane]      products and sums in float32, subnormal ones 0

A word is two neighbours of a sum: components 2i and 2i + 1 of a query or key, or one component of the values of tokens
2j and 2j + 1. So nothing is widened. Words of BLOCK tokens are put in order once, for all lines that use them:

    turn   keys [16, 32 n]  -> tile [16 n, BLOCK] of words       a lane is a token: no sum within a vector
    pair   values [2, 32 n] -> tile [32 n] of words              a lane is a component

Arrays are contiguous and one-dimensional; 16-bit rows are uint16, words uint32. Offsets and steps count elements and
are not checked. Sums have one order, whatever the number of lines.
"""

# llvmlite and numba are untyped.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import functools
import math
from typing import Any

import numba
import numpy as np
from hashcore.cpu.parts import inner
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparse_decode.cpu.lanes import (
    _FLOATS,
    _WORDS,
    LANES,
    WIDTH,
    _by_rows,
    _call,
    _data,
    _fused,
    _lines,
    _Numbers,
    _prefetch,
    _spread,
    _vector,
)  # fmt: skip
from sparse_decode.cpu.softmax import _all, _reduced

BLOCK = 64
"""Tokens of a tile."""
VECTORS = BLOCK // LANES
"""Vectors of a tile's row: with MOST_ROWS lines, half of the registers hold sums."""
POWERS = [0.009582853, 0.055906425, 0.240240986, 0.693124193, 1.0]
"""Coefficients of 2^r for |r| <= 1/2, highest first, to a relative error of 3e-6."""
LEAST = -126.0
"""Least exponent of a weight that is not 0: a smaller one, a subnormal number, would take thirty times as long."""
_ONES = 0x3F803F80  # twice 1 in bfloat16
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


class _BFloat(ir.HalfType):
    def __str__(self) -> Any:
        return "bfloat"


_BFloat._create_instance()
_NUMBERS = ir.VectorType(_BFloat(), 2 * LANES)


@functools.cache
def features() -> frozenset[str]:
    """Return the features of the processor that numba compiles for, each after a + or -, as LLVM names them."""
    from numba.core.registry import cpu_target  # starts LLVM

    return frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


@functools.cache
def supported() -> bool:
    """Whether numba compiles for a processor with AVX512_BF16."""
    return "+avx512bf16" in features()


def _paired(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return total + the products of two vectors of words."""
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [total, a, b])


def _words(builder: Any, data: Any, at: Any) -> Any:
    return builder.load(_vector(builder, data, at, _WORDS), align=2)


def _rounded(builder: Any, first: Any, second: Any) -> Any:
    """Return two vectors of float32 as one of words of bfloat16, rounded to nearest, ties to even."""
    numbers = _call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _NUMBERS, [second, first])
    return builder.bitcast(numbers, _WORDS)


def _shuffled(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _in_four(of: int) -> tuple[list[int], list[int]]:
    """Return shuffle masks that interleave the lower and the upper halves of groups of 4 lanes by `of` lanes."""
    first = [i * of + j + side for i in range(2 // of) for side in (0, LANES) for j in range(of)]
    lower = [4 * four + lane for four in range(LANES // 4) for lane in first]
    return lower, [lane + 2 for lane in lower]


@intrinsic
def turn(typing_context: Any, x: Any, at: Any, step: Any, count: Any, tile: Any, to: Any):
    """Write the words of rows [16, 32 count] of x to columns of tile [16 count, BLOCK], from `to` on."""
    _lines(x, tile)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, tile = (_data(context, builder, signature.args[i], values[i]) for i in (0, 4))
        at, step, count, to = values[1], values[2], values[3], values[5]
        by, four = _Numbers(builder, at.type), ir.VectorType(ir.IntType(32), 4)
        with by.loop(count) as loop:
            for q in range(4):  # words 4q to 4q + 3
                rows = [by.sum(at, by.times(step, t), by.times(loop.index, WIDTH), 8 * q) for t in range(LANES)]
                parts = [builder.load(_vector(builder, x, row, four), align=2) for row in rows]
                held = []
                for i in range(4):  # group l of 4 lanes: token 4l + i
                    halves = [
                        _shuffled(builder, parts[i + 8 * h], parts[i + 8 * h + 4], list(range(8))) for h in (0, 1)
                    ]
                    held.append(_shuffled(builder, *halves, list(range(16))))
                mixed = [_shuffled(builder, held[i], held[i + 1], side) for i in (0, 2) for side in _in_four(1)]
                found = [_shuffled(builder, mixed[i], mixed[i + 2], side) for i in (0, 1) for side in _in_four(2)]
                for w, line in enumerate(found):
                    place = by.sum(to, by.times(by.sum(by.times(loop.index, LANES), 4 * q + w), BLOCK))
                    builder.store(line, _vector(builder, tile, place, _WORDS), align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, tile, n), emit


@intrinsic
def pair(typing_context: Any, x: Any, at: Any, step: Any, count: Any, tile: Any, to: Any):
    """Write the components of rows [2, 32 count] of x to tile as words of one component each, from `to` on."""
    _lines(x, tile)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, tile = (_data(context, builder, signature.args[i], values[i]) for i in (0, 4))
        at, step, count, to = values[1], values[2], values[3], values[5]
        by = _Numbers(builder, at.type)
        with by.loop(count) as loop:
            i = by.times(loop.index, WIDTH)
            rows = [builder.load(_vector(builder, x, by.sum(at, i, s), _HALVES), align=2) for s in (0, step)]
            for half in range(2):
                lanes = [LANES * half + lane + side for lane in range(LANES) for side in (0, WIDTH)]
                line = builder.bitcast(_shuffled(builder, *rows, lanes), _WORDS)
                builder.store(line, _vector(builder, tile, by.sum(to, i, LANES * half), _WORDS), align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, tile, n), emit


def _summing(fresh: bool) -> Any:
    """Return an intrinsic: C [rows, BLOCK] = factor A [rows, depth] B [depth, BLOCK] if fresh, else C + A B.

    A has up to MOST_ROWS rows. On the way it prefetches later rows of x to the L2 cache: `quarters` times 16 rows from
    x_at on, a cache line of each quarter at a step. Spread like this, prefetches do not wait for one another.
    """

    @intrinsic
    def product(
        typing_context: Any, rows: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, depth: Any,
        factor: Any, c: Any, c_at: Any, c_step: Any, x: Any, x_at: Any, x_step: Any, quarters: Any,
    ) -> Any:  # fmt: skip
        _lines(a, b, c, x)

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            a, b, c, x = (_data(context, builder, signature.args[i], values[i]) for i in (1, 4, 9, 12))
            given = (a, *values[2:4]), (b, *values[5:7]), values[7:9], (c, *values[10:12]), (x, *values[13:])
            _by_rows(builder, values[0], lambda count: _sum(builder, count, fresh, *given))
            return context.get_dummy_value()

        n = types.intp
        return types.void(n, a, n, n, b, n, n, n, types.float32, c, n, n, x, n, n, n), emit

    return product


def _sum(builder: Any, rows: int, fresh: bool, *given: Any) -> None:
    """Emit the code of `_summing` for a number of rows."""
    (a, a_at, a_step), (b, b_at, b_step), (depth, factor), (c, c_at, c_step), (x, x_at, x_step, quarters) = given
    by, cells = _Numbers(builder, a_at.type), [(row, i) for row in range(rows) for i in range(VECTORS)]
    places = {(row, i): by.sum(c_at, by.times(c_step, row), LANES * i) for row, i in cells}
    places = {cell: _vector(builder, c, place, _FLOATS) for cell, place in places.items()}
    first = {cell: _all(0) if fresh else builder.load(place, align=4) for cell, place in places.items()}
    sums = {cell: cgutils.alloca_once_value(builder, value) for cell, value in first.items()}
    with by.loop(depth) as loop:
        sixteenth, rest = by.parts(loop.index)
        later = by.sum(x_at, by.times(x_step, rest), by.times(sixteenth, WIDTH))
        with by.loop(quarters) as quarter:
            _prefetch(builder, x, by.sum(later, by.times(by.times(x_step, LANES), quarter.index)), 2)
        line = by.sum(b_at, by.times(b_step, loop.index))
        right = [_words(builder, b, by.sum(line, LANES * i)) for i in range(VECTORS)]
        for row in range(rows):
            one = by.sum(a_at, by.times(a_step, row), loop.index)
            left = _spread(builder, builder.load(builder.gep(a, [one])), _WORDS)
            for i in range(VECTORS):
                held = sums[row, i]
                builder.store(_paired(builder, builder.load(held), left, right[i]), held)
    for cell, place in places.items():
        total = builder.load(sums[cell])
        builder.store(builder.fmul(total, _spread(builder, factor)) if fresh else total, place, align=4)


products: Any = _summing(fresh=True)
weighed: Any = _summing(fresh=False)


@numba.njit(inline="always")
def weigh(
    weights: Any, at: Any, step: Any, rows: Any, tile: Any, depth: Any, out: Any, to: Any, wide: Any, x: Any,
    x_at: Any, x_step: Any, quarters: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Add weights [up to MOST_ROWS rows, depth] times tile [depth, wide] to out, and prefetch rows of x.

    BLOCK divides wide.
    """
    one = np.float32(1)
    for i in range(0, wide, BLOCK):
        weighed(rows, weights, at, step, tile, i, wide, depth, one, out, to + i, wide, x, x_at + i, x_step, quarters)


def _power(builder: Any, y: Any) -> Any:
    """Return 2^y to a relative error of 3e-6; NaN stays NaN, and less than 2^LEAST is 0."""
    normal = builder.bitcast(builder.fcmp_unordered(">=", y, _all(LEAST)), ir.IntType(16))
    n = _call(builder, f"llvm.roundeven.v{LANES}f32", _FLOATS, [y])
    r, p = builder.fsub(y, n), _all(POWERS[0])
    for coefficient in POWERS[1:]:
        p = _fused(builder, p, r, _all(coefficient))
    current = ir.Constant(ir.IntType(32), 4)
    return _call(builder, "llvm.x86.avx512.mask.scalef.ps.512", _FLOATS, [p, n, _all(0), normal, current])


@intrinsic
def _soften(typing_context: Any, x: Any, at: Any, count: Any, top: Any, factor: Any):
    _lines(x)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, (at, count, top, factor) = _data(context, builder, signature.args[0], values[0]), values[1:]
        by, binary = _Numbers(builder, at.type), _all(1 / math.log(2))
        scale = builder.fmul(_spread(builder, factor), binary)
        most, total = builder.fmul(_spread(builder, top), binary), cgutils.alloca_once_value(builder, _all(0))
        with by.loop(count, WIDTH) as loop:
            found = []
            for half in range(2):
                here = by.sum(at, by.times(loop.index, WIDTH), LANES * half)
                logit = builder.load(_vector(builder, x, here, _FLOATS), align=4)
                less = builder.fneg(most)
                found.append(_power(builder, _fused(builder, logit, scale, less)))
            words = _rounded(builder, *found)
            place = _vector(builder, x, by.sum(at, by.times(loop.index, LANES)), _WORDS)
            builder.store(words, place, align=4)
            builder.store(_paired(builder, builder.load(total), words, ir.Constant(_WORDS, [_ONES] * LANES)), total)
        return _reduced(builder, builder.load(total), builder.fadd)

    return types.float32(x, types.intp, types.intp, types.float32, types.float32), emit


@intrinsic
def narrow(typing_context: Any, x: Any, at: Any, count: Any, factor: Any, words: Any):
    """Write factor times the numbers of x, `count` from `at` on, as bfloat16 to words; WIDTH divides count."""
    _lines(x, words)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, words = (_data(context, builder, signature.args[i], values[i]) for i in (0, 4))
        (at, count, factor), by = values[1:4], _Numbers(builder, values[1].type)
        with by.loop(count, WIDTH) as loop:
            places = [by.sum(at, by.times(loop.index, WIDTH), LANES * half) for half in range(2)]
            found = [builder.load(_vector(builder, x, place, _FLOATS), align=4) for place in places]
            found = [builder.fmul(line, _spread(builder, factor)) for line in found]
            place = _vector(builder, words, by.times(loop.index, LANES), _WORDS)
            builder.store(_rounded(builder, *found), place, align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, types.float32, words), emit


@intrinsic
def _largest(typing_context: Any, x: Any, at: Any, count: Any):
    _lines(x)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, (at, count) = _data(context, builder, signature.args[0], values[0]), values[1:]
        by = _Numbers(builder, at.type)

        def join(first: Any, second: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", second, first), second, first)

        most = [cgutils.alloca_once_value(builder, _all(-math.inf)) for _ in range(VECTORS)]
        with by.loop(count, BLOCK) as loop:
            for i, held in enumerate(most):
                here = by.sum(at, by.times(loop.index, BLOCK), LANES * i)
                line = builder.load(_vector(builder, x, here, _FLOATS), align=4)
                builder.store(join(builder.load(held), line), held)
        return _reduced(builder, functools.reduce(join, [builder.load(held) for held in most]), join)

    return types.float32(x, types.intp, types.intp), emit


@intrinsic
def raised(
    typing_context: Any, x: Any, step: Any, lines: Any, count: Any, factor: Any, less: Any, first: Any, best: Any
):
    """Raise best [count] to the largest of factor x - less over `lines` lines, `step` apart, and each LANES numbers.

    less [first + lines] has a number for each line. NaN does not count.
    """
    _lines(x, less, best)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, less, best = (_data(context, builder, signature.args[i], values[i]) for i in (0, 5, 7))
        step, lines, count, factor, first = values[1], values[2], values[3], values[4], values[6]
        by, scale = _Numbers(builder, step.type), _spread(builder, factor)

        def join(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", b, a), b, a)

        with by.loop(count) as loop:
            most = cgutils.alloca_once_value(builder, _all(-math.inf))
            builder.store(_all(-math.inf), most)
            with by.loop(lines) as line:
                here = by.sum(by.times(step, line.index), by.times(loop.index, LANES))
                number = builder.load(builder.gep(less, [by.sum(first, line.index)]))
                numbers = builder.load(_vector(builder, x, here, _FLOATS), align=4)
                score = _fused(builder, numbers, scale, builder.fneg(_spread(builder, number)))
                builder.store(join(builder.load(most), score), most)
            found, place = _reduced(builder, builder.load(most), join), builder.gep(best, [loop.index])
            builder.store(join(builder.load(place), found), place)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, types.float32, less, n, best), emit


# Functions of their own, not inlined by numba: fastmath of a caller would change the order of sums.
@inner
def soften(x: Any, at: Any, count: Any, top: Any, factor: Any) -> Any:  # pragma: no cover - compiled
    """Replace numbers by the weights exp(factor x - top), rounded to bfloat16, and return their sum.

    The words of a line's weights begin where the line does.
    """
    return _soften(x, at, count, top, factor)


@inner
def largest(x: Any, at: Any, count: Any) -> Any:  # pragma: no cover - compiled
    """Return the largest number that is not NaN; -inf without numbers. BLOCK divides count."""
    return _largest(x, at, count)
