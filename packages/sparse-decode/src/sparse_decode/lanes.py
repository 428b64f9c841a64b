"""Operations on LANES numbers at once, for numba: products of small matrices, transposition, bfloat16.

A compiler that is left alone with such loops sums within vectors, which takes longer than the products. LLVM splits
the vectors into what the processor has. Arrays are contiguous lines of memory; places and steps count their elements,
and nothing checks them.
"""

# llvmlite is untyped.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
WIDTH = 2 * LANES
"""Columns of a product that are made at once."""
MOST_ROWS = 4
"""Rows of a product that are made at once: MOST_ROWS x WIDTH sums fill half of the registers of AVX-512."""
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


def _vector(builder: Any, data: Any, at: Any, kind: Any) -> Any:
    """Point at a vector that begins with element `at`."""
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def _lines(*kinds: Any) -> None:
    if any(kind.layout != "C" or kind.ndim != 1 for kind in kinds):
        raise TypeError(f"expected contiguous lines of memory, got {kinds}")


def _multiply(rows: int) -> Any:
    """Make the function that adds A [rows, depth] B [depth, WIDTH] to C [rows, WIDTH], in the order of depth."""

    @intrinsic
    def multiply(
        typing_context: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, depth: Any, c: Any,
        c_at: Any, c_step: Any,
    ) -> Any:  # fmt: skip
        _lines(a, b, c)

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            a, b, c = (_data(context, builder, signature.args[i], values[i]) for i in (0, 3, 7))
            a_at, a_step, b_at, b_step, depth, c_at, c_step = (values[i] for i in (1, 2, 4, 5, 6, 8, 9))
            number = a_at.type
            kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
            fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
            zero, undefined = ir.Constant(ir.IntType(32), 0), ir.Constant(_FLOATS, ir.Undefined)
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)

            def place(row: int, half: int) -> Any:
                at = builder.add(c_at, builder.mul(c_step, ir.Constant(number, row)))
                return _vector(builder, c, builder.add(at, ir.Constant(number, half * LANES)), _FLOATS)

            cells = [(row, half) for row in range(rows) for half in range(2)]
            sums = {cell: cgutils.alloca_once_value(builder, builder.load(place(*cell), align=4)) for cell in cells}
            with cgutils.for_range(builder, depth, intp=number) as loop:
                at = builder.add(b_at, builder.mul(loop.index, b_step))
                ends = at, builder.add(at, ir.Constant(number, LANES))
                lines = [builder.load(_vector(builder, b, end, _FLOATS), align=4) for end in ends]
                for row in range(rows):
                    one = builder.add(builder.add(a_at, builder.mul(a_step, ir.Constant(number, row))), loop.index)
                    factor = builder.insert_element(undefined, builder.load(builder.gep(a, [one])), zero)
                    factor = builder.shuffle_vector(factor, undefined, everywhere)
                    for half in range(2):
                        held = sums[row, half]
                        builder.store(builder.call(fused, [factor, lines[half], builder.load(held)]), held)
            for cell in cells:
                builder.store(builder.load(sums[cell]), place(*cell), align=4)
            return context.get_dummy_value()

        n = types.intp
        return types.void(a, n, n, b, n, n, n, c, n, n), emit

    return multiply


multiply_1, multiply_2, multiply_3, multiply_4 = (_multiply(rows) for rows in range(1, MOST_ROWS + 1))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose LANES vectors of LANES words: log2 LANES rounds that exchange halves of pairs."""
    step = LANES // 2
    while step:
        low = [i + LANES * (i & step > 0) - step * (i & step > 0) for i in range(LANES)]
        high = [i + step if not i & step else i + LANES for i in range(LANES)]
        done = list(rows)
        for i in range(LANES):
            if not i & step:
                pair = rows[i], rows[i + step]
                done[i], done[i + step] = (builder.shuffle_vector(*pair, ir.Constant(_WORDS, x)) for x in (low, high))
        rows, step = done, step // 2
    return rows


def _turn(store: Callable[..., None]) -> Any:
    """Make the function that transposes LANES rows of LANES words of 32 bits; `store` gets each column."""

    @intrinsic
    def turn(typing_context: Any, x: Any, at: Any, step: Any, out: Any, out_at: Any, out_step: Any) -> Any:
        _lines(x, out)

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            x, out = (_data(context, builder, signature.args[i], values[i]) for i in (0, 3))
            at, step, out_at, out_step = (values[i] for i in (1, 2, 4, 5))

            def row(i: int) -> Any:
                place = builder.add(at, builder.mul(step, ir.Constant(at.type, i)))
                return builder.load(_vector(builder, x, place, _WORDS), align=2)

            def put(i: int, value: Any) -> None:
                place = builder.add(out_at, builder.mul(out_step, ir.Constant(at.type, i)))
                builder.store(value, _vector(builder, out, place, _WORDS), align=4)

            for i, column in enumerate(_transposed(builder, [row(i) for i in range(LANES)])):
                store(builder, put, i, column)
            return context.get_dummy_value()

        return types.void(x, types.intp, types.intp, out, types.intp, types.intp), emit

    return turn


def _two_halves(builder: Any, put: Callable[[int, Any], None], i: int, column: Any) -> None:
    put(2 * i, builder.shl(column, ir.Constant(_WORDS, [16] * LANES)))
    put(2 * i + 1, builder.and_(column, ir.Constant(_WORDS, [0xFFFF0000] * LANES)))


turn_words = _turn(lambda builder, put, i, column: put(i, column))
"""Write rows x[at + r step : ][:LANES] of 32 bits as columns: out[out_at + i out_step + r]."""
turn_bfloat16 = _turn(_two_halves)
"""Write rows x[at + r step : ][:2 LANES] of bfloat16 as columns of float32."""


@intrinsic
def widen_bfloat16(typing_context: Any, x: Any, at: Any, out: Any, out_at: Any, count: Any) -> Any:
    """Write x[at : at + count] of bfloat16, the upper half of a float32, to out from out_at on; LANES divide count."""
    _lines(x, out)

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        x, out = (_data(context, builder, signature.args[i], values[i]) for i in (0, 2))
        at, out_at, count = (values[i] for i in (1, 3, 4))
        with cgutils.for_range(builder, builder.udiv(count, ir.Constant(at.type, LANES)), intp=at.type) as loop:
            i = builder.mul(loop.index, ir.Constant(at.type, LANES))
            read = builder.load(_vector(builder, x, builder.add(at, i), _HALVES), align=2)
            wide = builder.shl(builder.zext(read, _WORDS), ir.Constant(_WORDS, [16] * LANES))
            builder.store(wide, _vector(builder, out, builder.add(out_at, i), _WORDS), align=4)
        return context.get_dummy_value()

    return types.void(x, types.intp, out, types.intp, types.intp), emit
