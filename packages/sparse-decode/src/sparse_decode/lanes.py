"""Operations on LANES numbers at once, for numba: dot products of rows, sums of weighted rows.

A compiler that is left alone with such loops sums within vectors, which takes longer than the products. LLVM splits
the vectors into what the processor has. Arrays are contiguous lines of memory; places and steps count their elements,
and nothing checks them.

Rows of 16 bits are bfloat16, the upper half of a float32. A vector of LANES words holds 2 LANES of them; shifted and
masked they are those at even and those at odd places, without a transport between lanes. So everything that meets them
is kept in that order, the even ones of 2 LANES first: `place` says where.
"""

# llvmlite is untyped.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
WIDTH = 2 * LANES
"""Columns of a weighted sum that are made at once."""
MOST_ROWS = 4
"""Rows of a result that are made at once: MOST_ROWS x TOKENS sums fill half of the registers of AVX-512."""
TOKENS = 4
"""Dot products of a row that are made at once."""
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)


def place(i: int) -> int:
    """Return where component i of a row of bfloat16 is kept."""
    return (i & -WIDTH) | (i % 2 * LANES) | (i % WIDTH >> 1)


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.make_array(kind)(context, builder, value).data


def _vector(builder: Any, data: Any, at: Any, kind: Any) -> Any:
    """Point at a vector that begins with element `at`."""
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def _lines(*kinds: Any) -> None:
    if any(kind.layout != "C" or kind.ndim != 1 for kind in kinds):
        raise TypeError(f"expected contiguous lines of memory, got {kinds}")


def _wide(builder: Any, x: Any, at: Any) -> list[Any]:
    """Load WIDTH numbers of a row, float32 or bfloat16, as two vectors of float32."""
    number = at.type
    if x.type.pointee != ir.IntType(16):
        ends = at, builder.add(at, ir.Constant(number, LANES))
        return [builder.load(_vector(builder, x, end, _FLOATS), align=4) for end in ends]
    words = builder.load(_vector(builder, x, at, _WORDS), align=2)
    even = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
    odd = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
    return [builder.bitcast(each, _FLOATS) for each in (even, odd)]


def _fused(builder: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")


def _weigh(rows: int) -> Any:
    """Make the function that adds A [rows, depth] B [depth, WIDTH] to C [rows, WIDTH], in the order of depth."""

    @intrinsic
    def weigh(
        typing_context: Any, a: Any, a_at: Any, a_step: Any, b: Any, b_at: Any, b_step: Any, depth: Any, c: Any,
        c_at: Any, c_step: Any,
    ) -> Any:  # fmt: skip
        _lines(a, b, c)

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            a, b, c = (_data(context, builder, signature.args[i], values[i]) for i in (0, 3, 7))
            a_at, a_step, b_at, b_step, depth, c_at, c_step = (values[i] for i in (1, 2, 4, 5, 6, 8, 9))
            number, fused = a_at.type, _fused(builder)
            zero, undefined = ir.Constant(ir.IntType(32), 0), ir.Constant(_FLOATS, ir.Undefined)
            everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)

            def place(row: int, half: int) -> Any:
                at = builder.add(c_at, builder.mul(c_step, ir.Constant(number, row)))
                return _vector(builder, c, builder.add(at, ir.Constant(number, half * LANES)), _FLOATS)

            cells = [(row, half) for row in range(rows) for half in range(2)]
            sums = {cell: cgutils.alloca_once_value(builder, builder.load(place(*cell), align=4)) for cell in cells}
            with cgutils.for_range(builder, depth, intp=number) as loop:
                lines = _wide(builder, b, builder.add(b_at, builder.mul(loop.index, b_step)))
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

    return weigh


weigh_1: Any = _weigh(1)
weigh_2: Any = _weigh(2)
weigh_3: Any = _weigh(3)
weigh_4: Any = _weigh(4)


def _lanes(*of: tuple[int, ...]) -> tuple[list[int], ...]:
    """Return which lanes of a pair of vectors make another vector: these of each four in turn, or these fours."""
    return tuple(
        [4 * four + lane % 4 + LANES * (lane > 3) for four in range(LANES // 4) for lane in each] for each in of
    )


def _fours(*of: tuple[int, ...]) -> tuple[list[int], ...]:
    return tuple([4 * four + lane for four in each for lane in range(4)] for each in of)


_ROUNDS = (
    _lanes((0, 4, 1, 5), (2, 6, 3, 7)),
    _lanes((0, 1, 4, 5), (2, 3, 6, 7)),
    _fours((0, 1, 4, 5), (2, 3, 6, 7)),
    _fours((0, 2, 4, 6), (1, 3, 5, 7)),
)
"""What is added to what to sum LANES vectors, each to one number, in their order: a pair becomes one, four times."""


def _summed(builder: Any, vectors: list[Any]) -> Any:
    """Sum each of LANES vectors: a vector of the sums."""
    for sides in _ROUNDS:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        halves = [[builder.shuffle_vector(*pair, ir.Constant(_WORDS, side)) for side in sides] for pair in pairs]
        vectors = [builder.fadd(*pair) for pair in halves]
    return vectors[0]


def _dots(rows: int) -> Any:
    """Make the function that writes C [rows, TOKENS] = A [rows, width] X [TOKENS, width]^T; WIDTH divides width."""

    @intrinsic
    def dots(
        typing_context: Any, a: Any, a_at: Any, a_step: Any, x: Any, x_at: Any, x_step: Any, width: Any, c: Any,
        c_at: Any, c_step: Any,
    ) -> Any:  # fmt: skip
        _lines(a, x, c)

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            a, x, c = (_data(context, builder, signature.args[i], values[i]) for i in (0, 3, 7))
            a_at, a_step, x_at, x_step, width, c_at, c_step = (values[i] for i in (1, 2, 4, 5, 6, 8, 9))
            number, fused = a_at.type, _fused(builder)

            def row_of(at: Any, step: Any, row: int) -> Any:
                return builder.add(at, builder.mul(step, ir.Constant(number, row)))

            nothing = ir.Constant(_FLOATS, [0.0] * LANES)
            cells = [(row, token) for row in range(rows) for token in range(TOKENS)]
            sums = {cell: cgutils.alloca_once_value(builder, nothing) for cell in cells}
            with cgutils.for_range(builder, builder.udiv(width, ir.Constant(number, WIDTH)), intp=number) as loop:
                i = builder.mul(loop.index, ir.Constant(number, WIDTH))
                keys = [_wide(builder, x, builder.add(row_of(x_at, x_step, token), i)) for token in range(TOKENS)]
                for row in range(rows):
                    query = _wide(builder, a, builder.add(row_of(a_at, a_step, row), i))
                    for token in range(TOKENS):
                        total = builder.load(sums[row, token])
                        for half in range(2):
                            total = builder.call(fused, [query[half], keys[token][half], total])
                        builder.store(total, sums[row, token])
            undefined = ir.Constant(_FLOATS, ir.Undefined)
            vectors = [builder.load(sums[cell]) for cell in cells]
            found = _summed(builder, vectors + [undefined] * (LANES - len(vectors)))
            few = ir.VectorType(ir.FloatType(), TOKENS)
            for row in range(rows):
                which = ir.Constant(ir.VectorType(ir.IntType(32), TOKENS), [TOKENS * row + i for i in range(TOKENS)])
                line = builder.shuffle_vector(found, undefined, which)
                builder.store(line, _vector(builder, c, row_of(c_at, c_step, row), few), align=4)
            return context.get_dummy_value()

        n = types.intp
        return types.void(a, n, n, x, n, n, n, c, n, n), emit

    return dots


dots_1: Any = _dots(1)
dots_2: Any = _dots(2)
dots_3: Any = _dots(3)
dots_4: Any = _dots(4)
